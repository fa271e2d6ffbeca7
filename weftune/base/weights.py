"""Tensors out of a base's safetensors files, only those that are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from weftune.base.safe_files import weight_map

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""As safetensors names them."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which file of a folder, or of a Hub repository, holds which tensor."""

    where: str
    revision: str | None
    files: Mapping[str, str]
    """Tensor → file."""

    def path(self, name: str) -> Path:
        found = _found(self.where, self.files[name], self.revision)
        if found is None:
            raise OSError(f"{self.files[name]} is missing, which its index names")
        return found


def weight_files(where: str, revision: str | None) -> WeightFiles | None:
    """What the index says, or the one file there is; None where weights are not in safetensors files."""
    index = _found(where, SAFE_WEIGHTS_INDEX_NAME, revision)
    if index is not None:
        return WeightFiles(where, revision, weight_map(index))
    whole = _found(where, SAFE_WEIGHTS_NAME, revision)
    if whole is None:
        return None
    with safe_open(whole, framework="pt") as file:
        return WeightFiles(where, revision, dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME))


def file_reader(model: PreTrainedModel, files: WeightFiles) -> Callable[[str, Tensor], None] | None:
    """Writes a parameter of `model`, by its name, into a tensor; None if the files do not know them all."""
    known = stored_names(model, files)
    if known is None:
        return None

    def read(name: str, out: Tensor) -> None:
        stored = known[name]
        with safe_open(files.path(stored), framework="pt") as file:
            value = file.get_tensor(stored)
        refuse_other_shape(name, value.shape, out.shape)
        out.copy_(value)

    return read


def stored_names(model: PreTrainedModel, files: WeightFiles) -> dict[str, str] | None:
    """Parameter of `model` → what the files call it; None if they do not know them all."""
    wanted = {
        name: _name_in(files, model, name) for name, _ in model.named_parameters(remove_duplicate=False)
    }
    known = {name: stored for name, stored in wanted.items() if stored is not None}
    return known if len(known) == len(wanted) else None


def read_weights(model: PreTrainedModel, files: WeightFiles, device: torch.device) -> bool:
    """Bring the parameters of `model`, which is on the meta device, to `device`; False, and nothing is done,
    if the files do not know one of them by its name."""
    wanted = {name: _name_in(files, model, name) for name, _ in model.named_parameters()}
    by_file: dict[Path, dict[str, str]] = {}
    for name, stored in wanted.items():
        if stored is None:
            return False
        by_file.setdefault(files.path(stored), {})[name] = stored
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name, stored in names.items():
                _put(model, name, file.get_tensor(stored), device)
    make_buffers(model, device)
    return True


def _name_in(files: WeightFiles, model: PreTrainedModel, name: str) -> str | None:
    """A tied head is stored as the embedding, and some files leave out the name of the model inside."""
    tied = dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    for known in (name, tied.get(name)):
        for stored in (known, (known or "").removeprefix(f"{model.base_model_prefix}.")):
            if stored and stored in files.files:
                return stored
    return None


def _put(model: PreTrainedModel, name: str, value: Tensor, device: torch.device) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    before = getattr(module, last)
    refuse_other_shape(name, value.shape, before.shape)
    parameter = nn.Parameter(value.to(device, before.dtype), requires_grad=False)
    # Transformers' own mark: `_init_weights` leaves such a parameter alone.
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, last, parameter)


def refuse_other_shape(name: str, stored: torch.Size, wanted: torch.Size) -> None:
    if stored != wanted:
        raise ValueError(f"{name} is {list(stored)} in its file, but {list(wanted)} in the model")


def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Buffers that no file holds (rotary frequencies, a scale) are made as transformers makes them."""
    for module in model.modules():
        held = dict(module.named_buffers(recurse=False))
        if not held:
            continue
        for name, buffer in held.items():
            module.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
        model._init_weights(module)


def _found(where: str, name: str, revision: str | None) -> Path | None:
    path = cached_file(where, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def stored_dtype(files: WeightFiles) -> torch.dtype | None:
    """Of most tensors of the first file; None where that is none which models are trained in."""
    first = next(iter(files.files))
    with safe_open(files.path(first), framework="pt") as file:
        found = Counter(str(file.get_slice(name).get_dtype()) for name in file.keys())  # noqa: SIM118
    return STORED.get(found.most_common(1)[0][0])
