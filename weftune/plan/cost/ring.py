"""Sizes of the device buffers for optimizer steps whose state is in host memory.

The buffers are used in turn as a ring: while one is updated, others are filled or copied back. If whole
adapters are in host memory, the gradient, master weight and two moments of every parameter are copied to the
device; the master weight, the moments and the new compute copy are copied back. If only the optimizer is
offloaded, master weight and moments are copied in both directions. Parameters of several jobs share a buffer,
so that one kernel launch updates all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from weftune.core.shapes import JobShape

PIECE = 1 << 22
"""Maximum number of parameters per device buffer for optimizer steps whose state is in host memory."""
PIECES = 3
"""Number of device buffers for optimizer steps whose state is in host memory. While one buffer is updated,
another is filled and a third is copied back."""
TRAVEL_ROUNDS = 8
"""Maximum number of rounds (one global batch of every job) per window, the part of a run that is planned at a
time, if optimizer state is in host memory. The number is large because no forward or backward overlaps with
the transfers after the last round of a window."""
MARGIN = 128
"""Maximum number of parameters by which each job's part of a buffer grows if it is rounded up to whole
blocks."""
_STATE = 4
"""Number of values per parameter that are copied to the device for an optimizer step: gradient, master weight
and two moments."""


def stage_parts(jobs: Iterable[JobShape], layers: int, base_layers: int) -> list[int]:
    """Return the number of adapter parameters of each job in a stage of `layers` layers. The base has
    `base_layers` layers, which are assumed equal."""
    return [-(-job.trainable_parameters // base_layers) * layers for job in jobs]


def ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Return the device bytes of all buffers for optimizer steps whose state is in host memory. `parts`
    contains the number of adapter parameters of each job in the largest stage."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * (step_bytes(bytes_per_value) + bytes_per_value)


def step_bytes(bytes_per_value: int) -> int:
    """Return the bytes per adapter parameter that are copied to the device for an optimizer step."""
    return _STATE * max(4, bytes_per_value)


def optimizer_bytes(bytes_per_value: int) -> int:
    """Return the bytes per adapter parameter of the master weight and two moments, which an optimizer step
    copies in both directions if only the optimizer is offloaded."""
    return (_STATE - 1) * max(4, bytes_per_value)


def optimizer_ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Return the device bytes of all buffers for optimizer steps if only the optimizer is offloaded. `parts`
    contains the number of adapter parameters of each job."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * optimizer_bytes(bytes_per_value)


def copied_back_bytes(bytes_per_value: int) -> int:
    """Return the bytes per adapter parameter that are copied back to the host after an optimizer step."""
    return (_STATE - 1) * max(4, bytes_per_value) + bytes_per_value
