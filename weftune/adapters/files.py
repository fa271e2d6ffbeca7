"""Reading and writing of PEFT adapter folders: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weftune.adapters.folder import CONFIG, WEIGHTS, missing_weights_message
from weftune.adapters.target import ALL_LINEAR, TargetSpec, layer_numbers
from weftune.core.shapes import SiteShape, is_name_in_wrapper, layer_number
from weftune.core.tensor_file import write_tensors
from weftune.errors import AdapterError, MissingPackage


def peft_config(name: str, base: str | None, **keys: Any) -> Any:
    """Return an instance of PEFT's config class `name`, by default for a causal language model."""
    try:
        import peft
    except ImportError as error:
        raise MissingPackage("Writing an adapter folder needs PEFT: pip install peft") from error
    common = {"task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": base}
    return getattr(peft, name)(**(common | keys))


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Any) -> None:
    """Write an adapter folder. `tensors` maps names in the file to tensors, and `config` is PEFT's config
    object, or a mapping for a kind that PEFT does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    # A tensor that is contiguous on the host already is not copied.
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_tensors(partial, plain, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    if isinstance(config, Mapping):
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    else:
        config.save_pretrained(str(folder))


def read_tensors(folder: Path, integer_suffix: str | None = None) -> dict[str, Tensor]:
    """Return all tensors of an adapter folder. Raise AdapterError unless all values are finite floats, or
    int64 in tensors whose names end in `integer_suffix`."""
    path = folder / WEIGHTS
    if not path.exists():
        raise AdapterError(missing_weights_message(folder))
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, MemoryError) as error:
        raise AdapterError(f"{path} is damaged: {error}") from error
    for name, value in tensors.items():
        counts = integer_suffix is not None and name.endswith(integer_suffix)
        fits = value.dtype is torch.int64 if counts else value.is_floating_point()
        if not fits or not bool(value.isfinite().all()):
            raise AdapterError(f"{folder} is damaged: {name} holds values that are no finite numbers")
    return tensors


def is_transposed(adapted_sites: Sequence[str], sites: Sequence[SiteShape]) -> bool:
    """Return whether the adapted linears store their weights as [inputs, outputs]."""
    adapted = set(adapted_sites)
    return any(site.fan_in_fan_out for site in sites if site.name in adapted)


def target_modules(
    spec: TargetSpec, adapted_sites: Sequence[str], sites: Sequence[SiteShape]
) -> str | list[str]:
    """Return the user's target modules in a form that PEFT interprets in the same way. `all-linear` is
    replaced by the shortest equivalent list of names. A regular expression is replaced too if the base has
    experts, since PEFT would match it against experts and routers, or if only some layers are adapted, since
    PEFT selects layers only for lists. In a multimodal wrapper every module is named, since a shorter name
    could match modules of its vision tower."""
    if any(is_name_in_wrapper(name) for name in adapted_sites):
        return sorted(adapted_sites)
    if not isinstance(spec.targets, str):
        return list(spec.targets)
    can_be_written_as_is = spec.layers is None and not any(site.experts for site in sites)
    if spec.targets.lower() != ALL_LINEAR and can_be_written_as_is:
        return spec.targets
    linears = {site.name for site in sites if not site.experts}
    own = sorted(linears.intersection(adapted_sites))
    endings = sorted({name.rsplit(".", 1)[-1] for name in own})
    short = replace(spec, targets=tuple(endings))
    return endings if sorted(filter(short.targets_site, linears)) == own else own


def layers_to_transform(spec: TargetSpec, modules: str | Sequence[str]) -> list[int] | None:
    """Return the value of PEFT's config key `layers_to_transform`. None if all layers are adapted, or if the
    module names contain layer numbers."""
    if spec.layers is None or any(layer_number(name) is not None for name in modules):
        return None
    return sorted(layer_numbers(spec.layers))
