"""Reading of single tensors from a base's safetensors files, and writing of a multimodal wrapper's files with
a changed text tower."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from weftune.base.config import CONFIG, open_safetensors, read_config, weight_map
from weftune.base.decoders import DOWN, EXPERTS, GATE_UP, IMAGE_ROPE_KEYS, MIXTURES, old_module_name
from weftune.base.quant.formats import WeightFormat
from weftune.base.quant.linear import FORMATS, quant_paths
from weftune.base.quant.read import (
    QuantReader,
    is_stored_part,
    is_stored_weight,
    stored_format,
    stored_matrix,
    weights_by_part,
)
from weftune.base.quant.stored import Quantised
from weftune.base.shape import linears
from weftune.base.spec import BaseSpec
from weftune.core.shapes import layer_number

FILE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Maps the name of a dtype in safetensors files to the dtype."""
HEAD = "lm_head.weight"

EXTRA_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Names of files in a multimodal model's folder that are not weights, config or tokenizer."""

Fill = Callable[[str, Tensor], None]
"""Function that writes the values of a parameter, given by its name, into a given tensor."""
StoredNames = Mapping[str, tuple[str, ...]]
"""Maps the name of each parameter of a model to the names of the tensors in files that it consists of,
usually one."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The names of the tensors in a folder or a Hub repository, and the file that contains each of them."""

    location: str
    revision: str | None
    files: Mapping[str, str]
    """Maps the name of each tensor to its file."""

    def path(self, name: str) -> Path:
        found = find_file(self.location, self.files[name], self.revision)
        if found is None:
            raise OSError(f"{self.files[name]} is missing, which its index names")
        return found


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The part of a parameter that is read from its file: some ranges of indices along one dimension."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """Consecutive indices along `dim` as (start, stop), in order."""
    size: int
    """Size of the whole parameter along `dim`."""


def weight_files(location: str, revision: str | None) -> WeightFiles | None:
    """Return the safetensors files of a folder or a Hub repository with their tensors, found in its index
    file if it has one. None if there are no safetensors files."""
    index = find_file(location, SAFE_WEIGHTS_INDEX_NAME, revision)
    if index is not None:
        return WeightFiles(location, revision, weight_map(index))
    whole = find_file(location, SAFE_WEIGHTS_NAME, revision)
    if whole is None:
        return None
    with open_safetensors(whole) as file:
        return WeightFiles(location, revision, dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME))


def file_reader(
    model: PreTrainedModel,
    files: WeightFiles,
    device: torch.device,
    slices: Mapping[str, ParameterSlice] | None = None,
) -> Fill | None:
    """Return a function that writes a parameter of `model`, by its name, into a tensor. None if parameters
    are missing in the files. Weights are quantised on `device`. `slices` maps the name of each parameter that
    is read in part, and is not quantised, to this part."""
    known = stored_names(model, files)
    if known is None:
        return None
    quantised = {path: known[f"{path}.weight"][0] for path in quant_paths(model)}
    reader = QuantReader(model, quantised, files.files, partial(_open_tensor, files), device)

    def read(name: str, out: Tensor) -> None:
        if reader.has_parameter(name):
            reader(name, out)
        else:
            _read(files, known, name, out, (slices or {}).get(name))

    return read


def _open_tensor(files: WeightFiles, name: str) -> Tensor:
    if name not in files.files:
        raise OSError(f"{name} is missing from its files")
    with open_safetensors(files.path(name)) as file:
        return file.get_tensor(name)


def _read(
    files: WeightFiles,
    stored_names: StoredNames,
    name: str,
    out: Tensor,
    kept_slice: ParameterSlice | None = None,
) -> None:
    if is_stored_weight(stored_names[name][0], files.files):
        value = stored_matrix(stored_names[name][0], partial(_open_tensor, files), files.files)
        refuse_other_shape(name, value.shape, out.shape)
        out.copy_(value)
        return
    by_file: dict[Path, list[str]] = {}
    for part in stored_names[name]:
        by_file.setdefault(files.path(part), []).append(part)
    for path, parts in by_file.items():
        with open_safetensors(path) as file:
            for part in parts:
                target, value = view_part(out, stored_names[name], part), _read_slice(file, part, kept_slice)
                refuse_other_shape(name, value.shape, target.shape)
                target.copy_(value)


def view_part(parameter: Tensor, parts: Sequence[str], part: str) -> Tensor:
    """Return the view of a parameter that `part`, one of its tensors in files, fills. The tensors `parts` of
    the parameter are concatenated row-wise."""
    if len(parts) == 1:
        return parameter
    return parameter.flatten(0, -2).chunk(len(parts))[parts.index(part)]


def stored_names(model: PreTrainedModel, files: WeightFiles) -> StoredNames | None:
    """Return a dict from each parameter of `model` to the names of its tensors in the weight files, or None
    if the files lack any parameter."""
    names: dict[str, tuple[str, ...]] = {}
    beside = weights_by_part(model)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in beside:
            continue
        parts = [_stored_name(files, model, part) for part in _stored_parts(model, name)]
        names[name] = tuple(part for part in parts if part is not None)
        if len(names[name]) < len(parts):
            return None
    return names


def _stored_parts(model: PreTrainedModel, name: str) -> list[str]:
    """Return the names of the tensors in files that a parameter consists of. Files hold the linears of every
    expert as separate tensors, and the model has one parameter for all experts."""
    mixture = MIXTURES.get(model.config.model_type)
    if mixture is None:
        return [name]
    gate, up, down = mixture.stored_names
    inside = {f".{EXPERTS}.{GATE_UP}": (gate, up), f".{EXPERTS}.{DOWN}": (down,)}
    own = next((linears for ending, linears in inside.items() if name.endswith(ending)), None)
    stored = name.replace(".mlp.", f".{mixture.stored_mlp}.")
    if own is None:
        return [stored]
    path, experts = stored.rpartition(".")[0], len(model.get_parameter(name))
    return [f"{path}.{number}.{linear}.weight" for number in range(experts) for linear in own]


def quantised_formats(
    model: PreTrainedModel, quantisation: Quantised, files: WeightFiles | None
) -> dict[str, WeightFormat]:
    """Return the format of each linear that is to be quantised, by the linear's path. These are all linears
    in layers or, if the base's files are already quantised, the linears that are quantised in the files."""
    found = [path for path in linears(model) if layer_number(path) is not None]
    if files is None or not quantisation.is_stored:
        return dict.fromkeys(found, FORMATS[quantisation.quantize])
    names = {path: _stored_name(files, model, f"{path}.weight") for path in found}
    return {
        path: stored_format(name, files.files)
        for path, name in names.items()
        if name is not None and is_stored_weight(name, files.files)
    }


def read_weights(model: PreTrainedModel, files: WeightFiles, device: torch.device) -> bool:
    """Load the parameters of `model`, which is on the meta device, to `device`. Return False without any
    change if a parameter is missing in the files."""
    known = stored_names(model, files)
    if known is None:
        return False
    if quant_paths(model):
        read = file_reader(model, files, device)
        assert read is not None
        read_each_parameter(model, read, device)
        return True
    shared = shared_names(model)
    by_file: dict[Path, list[str]] = {}
    for name in shared:
        if len(known[name]) == 1:
            by_file.setdefault(files.path(known[name][0]), []).append(name)
    for path, names in by_file.items():
        with open_safetensors(path) as file:
            for name in names:
                _set_parameter(model, shared[name], file.get_tensor(known[name][0]), device)
    for name in (name for name in shared if len(known[name]) > 1):
        value = torch.empty_like(model.get_parameter(name), device=device)
        _read(files, known, name, value)
        _set_parameter(model, shared[name], value, device)
    create_buffers(model, device)
    return True


def _read_slice(file: Any, name: str, part: ParameterSlice | None) -> Tensor:
    """Return a tensor of an open safetensors file, or a part of it without reading the rest."""
    if part is None:
        return cast(Tensor, file.get_tensor(name))
    stored = file.get_slice(name)
    shape = torch.Size(stored.get_shape())
    refuse_other_shape(name, shape, torch.Size([*shape[: part.dim], part.size, *shape[part.dim + 1 :]]))
    before = (slice(None),) * part.dim
    return torch.cat([stored[(*before, slice(start, stop))] for start, stop in part.ranges], part.dim)


def read_each_parameter(model: PreTrainedModel, fill: Fill, device: torch.device) -> None:
    """Load the parameters of `model` to `device` one after another, so that at most one unquantised weight is
    in memory. `fill` writes their values."""
    for name, names in shared_names(model).items():
        value = torch.empty_like(model.get_parameter(name), device=device)
        fill(name, value)
        _set_parameter(model, names, value, device)
    create_buffers(model, device)


def missing_parameters(model: PreTrainedModel, files: WeightFiles) -> list[str]:
    """Return the names of the parameters of `model` that are missing in the files."""
    beside = weights_by_part(model)
    return sorted(
        name
        for name in shared_names(model)
        if name not in beside
        and not all(_stored_name(files, model, part) for part in _stored_parts(model, name))
    )


def has_stored_head(files: WeightFiles) -> bool:
    """Return whether the weight files of a multimodal model contain the weight of the output layer."""
    return any(name in files.files for name in (HEAD, old_module_name(HEAD)))


def shared_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return a dict from the first name of every parameter to all its names: tied parameters have several."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in names_by_id.values()}


def _stored_name(files: WeightFiles, model: PreTrainedModel, name: str) -> str | None:
    """Return the name under which the weight files store a parameter, or None if they lack the parameter. A
    tied head is stored as the embedding; some files omit the prefix of the inner model, or use older
    names."""
    tied = dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    for known in (name, tied.get(name)):
        if known is None:
            continue
        for stored in (known, known.removeprefix(f"{model.base_model_prefix}."), old_module_name(known)):
            if stored in files.files:
                return stored
    return None


def _set_parameter(model: PreTrainedModel, names: Sequence[str], value: Tensor, device: torch.device) -> None:
    before = model.get_parameter(names[0])
    refuse_other_shape(names[0], value.shape, before.shape)
    parameter = nn.Parameter(value.to(device, before.dtype), requires_grad=False)
    # Transformers' own mark: `_init_weights` does not change such a parameter.
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for name in names:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, parameter)


def refuse_other_shape(name: str, stored: torch.Size, shape: torch.Size) -> None:
    if stored != shape:
        raise ValueError(f"{name} is {list(stored)} in its file, but {list(shape)} in the model")


def create_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Create the buffers that weight files do not contain, such as rotary frequencies, with the values that
    transformers gives them."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        for name, buffer in buffers.items():
            module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
        model._init_weights(module)


def find_file(location: str, name: str, revision: str | None) -> Path | None:
    path = cached_file(location, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def stored_dtype(files: WeightFiles) -> torch.dtype | None:
    """Return the most frequent dtype of the tensors in the first weight file, not counting quantised weights.
    None if it is not a supported dtype."""
    first = next(iter(files.files))
    with open_safetensors(files.path(first)) as file:
        plain = [name for name in file.keys() if not is_stored_part(name, files.files)]  # noqa: SIM118
        found = Counter(str(file.get_slice(name).get_dtype()) for name in plain)
    if not found:
        return None
    return FILE_DTYPES.get(found.most_common(1)[0][0])


def write_wrapper(model: PreTrainedModel, spec: BaseSpec, source: str, target: Path) -> None:
    """Write a whole multimodal model to the folder `target`. `model` is its text tower; all other weights are
    read from `source`, one file at a time, and converted to the dtype of `model`."""
    files = weight_files(source, spec.revision)
    assert files is not None
    sizes = {file: _write_file(model, files, file, target) for file in sorted(set(files.files.values()))}
    if len(sizes) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(files.files)}
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    dtype = str(model.dtype).removeprefix("torch.")
    config = _config_with_dtype(read_config(spec), dtype)
    if spec.rope_scaling is not None:
        text, scaled = config["text_config"], model.config
        # Transformers would prefer the older key.
        own = text.pop("rope_scaling", None) or text.get("rope_parameters") or {}
        kept = {key: own[key] for key in IMAGE_ROPE_KEYS if key in own}
        text["rope_parameters"] = {**kept, **scaled.rope_parameters}
        text["max_position_embeddings"] = scaled.max_position_embeddings
    (target / CONFIG).write_text(json.dumps(config, indent=2))
    for name in EXTRA_FILES:
        path = find_file(files.location, name, spec.revision)
        if path is not None:
            shutil.copyfile(path, target / name)


def _write_file(model: PreTrainedModel, files: WeightFiles, file: str, target: Path) -> int:
    """Write one weight file of a multimodal model, with the weights of its text tower `model`. Return the
    size of the file's tensors in bytes."""
    names = stored_names(model, files)
    assert names is not None, "the tower was read from these files"
    found = [(name, parts, part) for name, parts in names.items() for part in parts]
    own = {part: view_part(model.get_parameter(name), parts, part) for name, parts, part in found}
    here = [stored for stored, location in files.files.items() if location == file]
    tensors: dict[str, Tensor] = {}
    with open_safetensors(files.path(here[0])) as opened:
        for stored in here:
            value = own[stored] if stored in own else opened.get_tensor(stored)
            value = value.detach()
            tensors[stored] = (value.to(model.dtype) if value.is_floating_point() else value).contiguous()
    save_file(tensors, target / file, metadata={"format": "pt"})
    return sum(value.nbytes for value in tensors.values())


def _config_with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with `dtype` set, also in nested configs, in place of the older key `torch_dtype`."""
    inner = {
        key: _config_with_dtype(value, dtype) for key, value in config.items() if key.endswith("_config")
    }
    return {key: value for key, value in config.items() if key != "torch_dtype"} | inner | {"dtype": dtype}
