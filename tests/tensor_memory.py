"""Memory of all tensors that live in a process."""

from __future__ import annotations

import gc
import warnings

import torch


def storage_bytes() -> list[int]:
    """Return the bytes of the memory of every tensor; tensors that share memory count once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return list({one.data_ptr(): one.nbytes() for one in found}.values())


def tensor_bytes() -> int:
    """Return the bytes of all tensors together."""
    return sum(storage_bytes())
