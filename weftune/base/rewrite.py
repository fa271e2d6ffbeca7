"""Writing of a wrapper's folder with a changed text tower."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from weftune.base.config import CONFIG, read_config
from weftune.base.load import Tower, model_source
from weftune.base.safe_files import open_safetensors
from weftune.base.spec import BaseSpec
from weftune.base.weights import WeightFiles, found_file, part_of, stored_names, weight_files

BESIDE = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that a wrapper has beside its weights, its config and its tokenizer."""


def is_tower(model: PreTrainedModel) -> bool:
    return isinstance(model.base_model, Tower)


def write_wrapper(model: PreTrainedModel, spec: BaseSpec, target: Path) -> None:
    """Write the base's whole wrapper in the dtype of `model`, its text tower, one file at a time."""
    files = weight_files(model_source(spec), spec.revision)
    assert files is not None
    sizes = {file: _write_file(model, files, file, target) for file in sorted(set(files.files.values()))}
    if len(sizes) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(files.files)}
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    dtype = str(model.dtype).removeprefix("torch.")
    (target / CONFIG).write_text(json.dumps(_in_dtype(read_config(spec), dtype), indent=2))
    for name in BESIDE:
        path = found_file(files.where, name, spec.revision)
        if path is not None:
            shutil.copyfile(path, target / name)


def _write_file(model: PreTrainedModel, files: WeightFiles, file: str, target: Path) -> int:
    """Write one file with the tower's own weights in their places, and return the bytes of its tensors."""
    names = stored_names(model, files)
    assert names is not None, "the tower was read from these files"
    found = [(name, parts, part) for name, parts in names.items() for part in parts]
    own = {part: part_of(model.get_parameter(name), parts, part) for name, parts, part in found}
    here = [stored for stored, where in files.files.items() if where == file]
    tensors: dict[str, Tensor] = {}
    with open_safetensors(files.path(here[0])) as opened:
        for stored in here:
            value = own[stored] if stored in own else opened.get_tensor(stored)
            value = value.detach()
            tensors[stored] = (value.to(model.dtype) if value.is_floating_point() else value).contiguous()
    save_file(tensors, target / file, metadata={"format": "pt"})
    return sum(value.nbytes for value in tensors.values())


def _in_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype of the config and of the configs in it; older files have another key for it."""
    inner = {key: _in_dtype(value, dtype) for key, value in config.items() if key.endswith("_config")}
    return {key: value for key, value in config.items() if key != "torch_dtype"} | inner | {"dtype": dtype}
