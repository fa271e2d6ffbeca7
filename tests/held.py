"""What a process holds of tensors."""

from __future__ import annotations

import gc
import warnings

import torch


def storage_bytes() -> list[int]:
    """Of every tensor that anybody holds; those that share their memory count once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return list({one.data_ptr(): one.nbytes() for one in found}.values())


def tensor_bytes() -> int:
    """All of them together."""
    return sum(storage_bytes())
