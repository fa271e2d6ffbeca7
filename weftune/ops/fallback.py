"""Plain torch as a substitute for kernels that do not compile or launch on the device. The kernels are tested
on GPUs of one compute capability only (`core.device_class`).

Triton compiles and loads a kernel at its first launch, before it runs. If this fails in an op that launches
one kernel, nothing has been written yet, and torch computes the op instead. An op of several kernels that add
to gradients rehearses its kernels first: it launches them once on rows that belong to no job.
"""

from __future__ import annotations

import re
import subprocess
import traceback
import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from weftune.core.device_class import TEST_COMMAND, get_device_class

REHEARSING = ("cuda",)
"""Device types on which kernels are rehearsed: launched once without effect, to find out whether they
compile. A CPU is not included, since Triton's interpreter has nothing to compile."""
REFUSALS = (
    *(
        "no kernel image",
        "device kernel image is invalid",
        "invalid device function",
        "named symbol not found",
    ),
    *("too many resources", "PTX was compiled with an unsupported toolchain", "PTX JIT compil"),
    *("PassManager::run failed", "Failed to find C compiler", "Failed to compile"),
)
"""Substrings of the RuntimeErrors that Triton or the driver raises when it cannot launch a kernel."""

Result = TypeVar("Result")


class KernelWarning(UserWarning):
    """The warning that plain torch computes an op, because the op's own kernels do not run on the device."""


class KernelsFailed(Exception):
    """Raised if an op's kernels do not run on the device, after the user has been warned and before any
    tensor has been written."""


_failed_ops: set[str] = set()
_rehearsal_results: dict[Hashable, bool] = {}


def has_failed(op: str) -> bool:
    """Return whether a kernel of the named op has failed in this process."""
    return op in _failed_ops


def run_with_fallback(
    op: str,
    device: torch.device,
    kernel_function: Callable[..., Result],
    torch_function: Callable[..., Result],
    *arguments: Any,
) -> Result:
    """Return the result of `kernel_function`, or of `torch_function` if a kernel of the op fails now or has
    failed before. Both functions are called with `arguments`.

    `kernel_function` must have written nothing but new tensors when its kernel is launched.
    """
    if op not in _failed_ops:
        try:
            return kernel_function(*arguments)
        except Exception as error:
            if not is_kernel_failure(error):
                raise
            _log_fallback(op, device, error)
    return torch_function(*arguments)


def rehearse_kernels(
    op: str, key: Hashable, device: torch.device, launch_kernels: Callable[[], object]
) -> None:
    """Find out whether an op's kernels run with the launch parameters in `key`, before these parameters are
    first used: call `launch_kernels`, which launches the kernels without any effect, once per key.

    Raise KernelsFailed if a kernel fails, and at every later call with this key. Do nothing during the
    capture of a CUDA graph: a pass is captured only after it has run uncaptured.
    """
    if key not in _rehearsal_results:
        if device.type not in REHEARSING:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        try:
            launch_kernels()
            _rehearsal_results[key] = True
        except Exception as error:
            if not is_kernel_failure(error):
                raise
            _log_fallback(op, device, error)
            _rehearsal_results[key] = False
    if not _rehearsal_results[key]:
        raise KernelsFailed(op)


def is_kernel_failure(error: Exception) -> bool:
    """Return whether the error says that a kernel could not be compiled, loaded or launched. False for a
    shortage of memory and for an error of a kernel that was launched earlier."""
    from triton.errors import TritonError

    if isinstance(error, TritonError | subprocess.CalledProcessError):
        return True
    message = str(error)
    return type(error) is RuntimeError and any(words in message for words in REFUSALS)


def _log_fallback(op: str, device: torch.device, error: Exception) -> None:
    """Warn the user, once for each op, that torch computes the op from now on."""
    if op in _failed_ops:
        return
    _failed_ops.add(op)
    where = device.type.upper()
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)} ({get_device_class(device).architecture})"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    warnings.warn(
        f"The kernel {_failed_kernel(error) or op} does not run on {where}: "
        f"{reason.rstrip('.')}. From here on, {op} is computed by plain torch, which is slower. Run "
        f"`{TEST_COMMAND}` in a clone of Weftune to test all kernels on this GPU.",
        KernelWarning,
        stacklevel=2,
    )


def _failed_kernel(error: Exception) -> str | None:
    """Return the name "module.kernel" of the launch that raised the error, or None if it is not found."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if found := re.search(r"kernels\.(\w+\.\w+)", frame.line or ""):
            return found[1]
    return None
