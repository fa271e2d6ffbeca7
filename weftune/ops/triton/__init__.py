"""Triton kernels. A module of kernels is imported when one of its kernels is first launched, so that the
launchers can be imported without Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from weftune.core.clock import Phase, reassign_seconds
from weftune.core.device_class import get_device_class

MODULES = (
    *("adamw", "computed", "dequantise", "experts", "few_rows", "fp8", "large", "logprobs", "norm"),
    *("paged", "product", "rotary", "sampling", "scales", "site", "site_gradients", "slots", "swiglu"),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that the kernels support. The kernels compute in float32. For float64, plain torch is used
instead."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(name)
    return import_module(f"{__name__}.{name}")


def kernels_available(x: Tensor) -> bool:
    """Return whether kernels can run on this tensor: on a GPU with Triton, or in Triton's interpreter."""
    return kernels_available_on(x.device, x.dtype)


def kernels_available_on(device: torch.device, dtype: torch.dtype) -> bool:
    compiles = device.type == "cuda" and get_device_class(device).has_kernels
    return dtype in DTYPES and (compiles or os.environ.get("TRITON_INTERPRET") == "1") and _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension. Kernels support any strides of the other dimensions."""
    return x if x.stride(-1) == 1 else x.contiguous()


def count_compilation() -> None:
    """Make Triton report each compilation, so that its seconds are counted as the run's compilation time
    (`core.clock`). Do nothing if another listener is installed."""
    from triton import knobs

    def listen(*, times: Any, **_: Any) -> None:
        # Triton calls this in the thread that compiles; kernels from its cache take almost no time.
        reassign_seconds(Phase.COMPILING, times.total / 1e6)

    if knobs.compilation.listener is None:
        knobs.compilation.listener = listen
