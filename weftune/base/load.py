"""Loading of a base's tokenizer, its shape, or the base itself, from the user's name for it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
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
from weftune.base.model import Base
from weftune.base.outline import BaseConfig, base_config, outline
from weftune.base.place import at_hand, explained, place
from weftune.base.quant.linear import quantise_linears, replace_linears
from weftune.base.quant.stored import CONFIG_KEY, Quantised, quantised
from weftune.base.safe_files import no_safetensors
from weftune.base.shape import model_shape
from weftune.base.spec import BaseSpec, Dtype
from weftune.base.weights import (
    WeightFiles,
    head_stored,
    lacking,
    quantised_forms,
    read_weights,
    stored_dtype,
    weight_files,
)
from weftune.core.clock import Phase, phase
from weftune.core.shapes import ModelShape
from weftune.errors import BaseModelError, UserError


@phase(Phase.LOADING)
def load_tokenizer(spec: BaseSpec) -> PreTrainedTokenizerBase:
    with explained(spec):
        return AutoTokenizer.from_pretrained(place(spec), revision=spec.revision, trust_remote_code=False)


@phase(Phase.LOADING)
def inspect(spec: BaseSpec, device: torch.device | None = None) -> ModelShape:
    """Return the shape the base would have on `device` (None: the best one here), from its config alone."""
    config = load_config(spec, place(spec))
    dtype = base_dtype(spec, device or best_device())
    with explained(spec):
        return model_shape(bare_model(config, dtype, _files_if_stored(spec, config)), dtype)


def shape_at_hand(spec: BaseSpec) -> ModelShape | None:
    """Return its shape if nothing has to be fetched or converted for it, otherwise None."""
    return inspect(spec) if at_hand(spec) else None


def load_base(spec: BaseSpec, device: torch.device) -> Base:
    return Base.from_model(load_plain(spec, device), spec, device)


def load_plain(spec: BaseSpec, device: torch.device) -> PreTrainedModel:
    """Return the model as transformers runs it, read directly to the device."""
    where = place(spec)
    config = load_config(spec, where)
    transformers_logging.disable_progress_bar()
    with explained(spec):
        files = weight_files(where, spec.revision)
        if files is None:
            raise no_safetensors(spec.model)
        if config.wrapped or config.quantised:
            return _load_read(spec, config, files, device)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            config=config.text,
            revision=spec.revision,
            dtype=base_dtype(spec, device),
            device_map={"": device},
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    model, found = loaded
    _refuse_lacking(spec, config, found["missing_keys"])
    assert isinstance(model, PreTrainedModel)
    return model


def _load_read(
    spec: BaseSpec, config: BaseConfig, files: WeightFiles, device: torch.device
) -> PreTrainedModel:
    """Load weights tensor by tensor: quantised ones, and those of a wrapper's text tower alone."""
    model = bare_model(config, base_dtype(spec, device), files)
    missing = lacking(model, files)
    if missing and config.quantised and not (config.wrapped or config.quantised.stored):
        return _load_quantising(spec, config, device)
    _refuse_lacking(spec, config, missing)
    read_weights(model, files, device)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(
            files.where, revision=spec.revision or "main"
        )
    return model.eval()


def _load_quantising(spec: BaseSpec, config: BaseConfig, device: torch.device) -> PreTrainedModel:
    """Load with transformers, which knows how the files name their weights if the model names them otherwise.
    All of them are in host memory before they are quantised."""
    assert config.quantised is not None
    dtype = cast(Dtype, str(base_dtype(spec, device)).removeprefix("torch."))
    model = load_plain(replace(spec, quantize=None, dtype=dtype), torch.device("cpu"))
    quantise_linears(model, quantised_forms(model, config.quantised, None))
    nn.Module.to(model, device)
    return model


def bare_model(config: BaseConfig, dtype: torch.dtype, files: WeightFiles | None) -> PreTrainedModel:
    """Return the model on the meta device; its quantised linears are as in the files, if those have any."""
    model = outline(config, dtype)
    if config.quantised is not None:
        replace_linears(model, quantised_forms(model, config.quantised, files))
    return model


def _files_if_stored(spec: BaseSpec, config: BaseConfig) -> WeightFiles | None:
    stored = config.quantised is not None and config.quantised.stored
    return weight_files(place(spec), spec.revision) if stored else None


def _refuse_lacking(spec: BaseSpec, config: BaseConfig, names: Collection[str]) -> None:
    if names:
        raise BaseModelError(
            f"The files of {spec.model} lack {len(names)} weights of a {config.text.model_type} model, "
            f"{min(names)} for one."
        )


def load_config(spec: BaseSpec, where: str) -> BaseConfig:
    """Return the config of the model that is trained: for a wrapper, that of its text tower."""
    with explained(spec):
        config = AutoConfig.from_pretrained(where, revision=spec.revision, trust_remote_code=False)
        found = base_config(config, lambda: _head_stored(spec, where))
    found = replace(found, quantised=_quantised(config, found.text, spec))
    refuse_config(found.text, spec.model)
    if type(found.text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BaseModelError(f"{spec.model} ({found.text.model_type}) is no causal language model.")
    return found


def _quantised(config: PretrainedConfig, text: PretrainedConfig, spec: BaseSpec) -> Quantised | None:
    """Return the quantisation from the spec and the config, that of the wrapper if there is one. The key is
    removed from the configs, because transformers would require packages for it."""
    found = quantised({CONFIG_KEY: getattr(config, CONFIG_KEY, None), "model_type": text.model_type}, spec)
    for one in (config, text):
        if hasattr(one, CONFIG_KEY):
            delattr(one, CONFIG_KEY)
    return found


def _head_stored(spec: BaseSpec, where: str) -> bool | None:
    files = weight_files(where, spec.revision)
    return None if files is None else head_stored(files)


def base_dtype(spec: BaseSpec, device: torch.device) -> torch.dtype:
    if spec.dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def own_dtype(spec: BaseSpec) -> torch.dtype:
    """Return the dtype of the base's files, whatever dtype it is trained in."""
    where = place(spec)
    with explained(spec):
        files = weight_files(where, spec.revision)
        found = None if files is None else stored_dtype(files)
    return found or torch.float32


def quantised_as(spec: BaseSpec, stored_only: bool = False) -> Quantised | None:
    """Return the format of a base's quantised weights. None if they are plain or, with `stored_only`, if the
    files hold plain weights."""
    found = load_config(spec, place(spec)).quantised
    return None if found is None or (stored_only and not found.stored) else found


def best_device() -> torch.device:
    return _this_gpu() if torch.cuda.is_available() else torch.device("cpu")


def _this_gpu() -> torch.device:
    """Return the GPU with its index, which torch needs for memory queries. A process that has not used a GPU
    so far has not chosen one; querying torch would start CUDA in processes that only start others."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def device_named(name: str | None) -> torch.device:
    """Return the device that the user requested. None selects the best one here."""
    if name is None:
        return best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device: {name} is no device; write cuda or cpu.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: this machine has no CUDA device that torch can use; see weftune doctor.")
    return _this_gpu() if device == torch.device("cuda") else device
