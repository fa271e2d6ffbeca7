"""Check whether the Triton kernels can run on a tensor, and the memory layout that they read."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the kernels, which compute in float32; float64 is left to torch."""


def kernels_at_hand(x: Tensor) -> bool:
    """Return whether Triton can run on this tensor: compiled on a GPU, or by its interpreter if that is
    enabled."""
    return kernels_run(x.device, x.dtype)


def kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in DTYPES and (device.type == "cuda" or _interpreted()) and _installed()


def with_whole_rows(x: Tensor) -> Tensor:
    """Return x with its last dimension contiguous; kernels take the strides of the others into account."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
