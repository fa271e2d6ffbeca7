"""GPU classes: for each compute capability, the features of GPUs that determine which kernels and launch
parameters are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

from weftune.errors import UserError

TEST_COMMAND = "make smoke-gpu"
"""Command that tests all kernels on a machine's GPUs. It must be run in a clone of the repository."""
VARIABLE = "WEFTUNE_DEVICE_CLASS"
"""Environment variable with a compute capability. All GPUs of the process are treated as GPUs of this
capability."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """The features of GPUs with one compute capability that kernels depend on."""

    capability: tuple[int, int]
    name: str
    example_gpus: str
    """Names of a few GPUs that belong to the class."""
    shared_memory: int
    """Bytes of shared memory that one program of a kernel may use."""
    multiprocessors: int
    """Number of multiprocessors of the device. If the machine has no such device, the number of the first GPU
    in `example_gpus`."""
    has_copy_engines: bool = False
    """Whether tensor descriptors are copied by hardware (TMA)."""
    has_fp8: bool = False
    """Whether tensor cores multiply 8-bit floats."""
    has_grouped_mm: bool = False
    """Whether torch's `grouped_mm` is one kernel, not a loop that reads the groups' sizes on the host."""
    has_kernels: bool = True
    """Whether Triton compiles kernels for these GPUs."""
    is_tested: bool = False
    """Whether Weftune's tests have run on a GPU of this class."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, such as "sm_86"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


CLASSES = (
    DeviceClass((8, 0), "Ampere, data centre", "A100, A30", 163 << 10, 108),
    DeviceClass((8, 6), "Ampere", "RTX 3090, A10, A40", 99 << 10, 82),
    DeviceClass((8, 9), "Ada", "RTX 4090, L4, L40S", 99 << 10, 128, has_fp8=True),
    DeviceClass(
        (9, 0),
        "Hopper",
        "H100, H200",
        227 << 10,
        132,
        has_copy_engines=True,
        has_fp8=True,
        has_grouped_mm=True,
        is_tested=True,
    ),
    DeviceClass(
        (10, 0),
        "Blackwell, data centre",
        "B200",
        227 << 10,
        148,
        has_copy_engines=True,
        has_fp8=True,
        has_grouped_mm=True,
    ),
    DeviceClass(
        (12, 0), "Blackwell", "RTX 5090, RTX PRO 6000", 99 << 10, 170, has_copy_engines=True, has_fp8=True
    ),
)
"""Known GPU classes, by increasing compute capability."""
OLDER = DeviceClass((0, 0), "before Ampere", "V100, T4", 48 << 10, 40, has_kernels=False)
"""Features of GPUs that are too old for Triton, on which plain torch is used instead of kernels."""
INTERPRETER = DeviceClass((0, 0), "CPU", "Triton's interpreter", 160 << 10, 3, has_kernels=False)
"""Features that kernels assume when they run on a CPU in Triton's interpreter. The number of multiprocessors
is small, so that tests cover loops over tiles."""

_pretended: DeviceClass | None = None


def get_device_class(device: torch.device) -> DeviceClass:
    """Return the features of a device that kernels depend on, with the shared memory and multiprocessors that
    the device has.

    A GPU of unknown compute capability gets the features of the nearest lower capability, but counts as
    untested.
    """
    return _pretended_class(device, _pretended or _class_from_environment())


@contextmanager
def pretend_device_class(device_class: DeviceClass) -> Iterator[None]:
    """Return a context manager in which kernels and launch parameters are selected as on a GPU of another
    class, in all threads.

    The number of multiprocessors stays that of the device, and shared memory is limited to what the device
    has.
    """
    global _pretended
    before, _pretended = _pretended, device_class
    try:
        yield
    finally:
        _pretended = before


def class_for_capability(capability: tuple[int, int]) -> DeviceClass:
    """Return the GPU class of a compute capability, or the nearest lower class if the capability is not
    known."""
    below = [one for one in CLASSES if one.capability <= capability]
    found = below[-1] if below else OLDER
    return found if found.capability == capability else replace(found, is_tested=False)


@cache
def _pretended_class(device: torch.device, pretended_class: DeviceClass | None) -> DeviceClass:
    if device.type != "cuda":
        return pretended_class or INTERPRETER
    if pretended_class is not None and not torch.cuda.is_available():
        return pretended_class
    card = torch.cuda.get_device_properties(device)
    shared: int = card.shared_memory_per_block_optin  # type: ignore[attr-defined]
    found = pretended_class or class_for_capability(torch.cuda.get_device_capability(device))
    if pretended_class is not None:
        shared = min(shared, pretended_class.shared_memory)
    return replace(found, shared_memory=shared, multiprocessors=card.multi_processor_count)


@cache
def _class_from_environment() -> DeviceClass | None:
    if not (given := os.environ.get(VARIABLE)):
        return None
    known = {f"{one.capability[0]}.{one.capability[1]}": one for one in CLASSES}
    if given not in known:
        raise UserError(f"{VARIABLE} is {given!r}, which is no known class: write one of {', '.join(known)}.")
    return known[given]
