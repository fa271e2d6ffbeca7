"""What a process holds of tensors."""

from __future__ import annotations

import gc
import warnings

import torch


def tensor_bytes() -> int:
    """Of all tensors that anybody holds."""
    return _bytes(_tensors())


def float_bytes() -> int:
    """The same without rows of data, which differ from window to window."""
    return _bytes([one for one in _tensors() if one.is_floating_point()])


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())
