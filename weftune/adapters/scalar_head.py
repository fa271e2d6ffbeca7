"""A job's scalar head: the vector of a reward model that maps the last hidden state of a sample to its
reward. In transformers' models for sequence classification this vector is the module `score`, and PEFT stores
it as one of `modules_to_save`.

Shapes: D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from weftune.adapters.files import read_tensors
from weftune.adapters.folder import CONFIG, has_scalar_head, read_config
from weftune.adapters.kind import NewAdapter, Parameters
from weftune.adapters.target import HEAD
from weftune.core.shapes import SCORE, SiteShape
from weftune.errors import AdapterError
from weftune.ops.draw import fill_normal

STORED_HEAD = f"base_model.model.{SCORE}.weight"
"""Name of the scalar head, a tensor [1, D], in PEFT's adapter files."""


def fill_head(new_adapter: NewAdapter) -> None:
    """Draw the scalar head, if the adapter has one, from the normal distribution that transformers uses for
    it."""
    if (head_D := new_adapter.parameters.get((SCORE, HEAD))) is not None:
        fill_normal(head_D, new_adapter.key(SCORE, HEAD))
        head_D.mul_(new_adapter.weight_at(SCORE).to(head_D))


def stored_head(parameters: Parameters) -> dict[str, Tensor]:
    """Return the scalar head as a dict from its name in PEFT's files to the tensor; empty if the adapter has
    none."""
    return {STORED_HEAD: parameters[SCORE, HEAD][None]} if (SCORE, HEAD) in parameters else {}


def read_head(folder: Path, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
    """Return the scalar head in an adapter folder, by (module, name); empty if the folder has none. Raise
    AdapterError if it does not fit the spec."""
    if not has_scalar_head(read_config(folder)):
        return {}
    if not spec.scalar_head:
        raise AdapterError(
            f"{folder} holds a reward model, which only objective: reward continues; write that, or name "
            "another adapter"
        )
    tensors: Mapping[str, Tensor] = read_tensors(folder)
    if STORED_HEAD not in tensors:
        raise AdapterError(f"{folder} is damaged: its {CONFIG} names a head, and it has no {STORED_HEAD}")
    value, (shape,) = tensors[STORED_HEAD], spec.scalar_head_shapes(sites)[SCORE].values()
    if value.shape != (1, *shape):
        raise AdapterError(
            f"{folder} does not fit: {STORED_HEAD} is {list(value.shape)}, and the base needs {[1, *shape]}"
        )
    return {(SCORE, HEAD): value[0]}
