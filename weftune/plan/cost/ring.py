"""Sizes of the ring of device buffers for optimizer steps whose state is in host memory.

If whole adapters are in host memory, the gradient, master and two moments of every parameter are copied to
the device; the last three and the new weights are copied back. If only the optimizer is offloaded, master and
moments are copied in both directions. A piece belongs to one job and one stage; pieces of several jobs share
a buffer, so that one launch updates them.
"""

from __future__ import annotations

from collections.abc import Iterable

from weftune.core.shapes import JobShape

PIECE = 1 << 22
"""Maximum number of parameters per buffer."""
PIECES = 3
"""Number of buffers: while one is updated, another is filled and a third is copied back."""
TRAVEL_ROUNDS = 8
"""Rounds per window if optimizer state is in host memory. Windows have several rounds, since no pass hides
the transfers after the last round."""
MARGIN = 128
"""Maximum number of parameters by which rounding up to whole blocks enlarges a job's part."""
_STATE = 4
"""Values per parameter that are copied to the device: gradient, master and two moments."""


def stage_parts(jobs: Iterable[JobShape], layers: int, base_layers: int) -> list[int]:
    """Return each job's parameters in a stage with `layers` of the base's `base_layers` equal layers."""
    return [-(-job.trainable_parameters // base_layers) * layers for job in jobs]


def ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Return the device bytes of all buffers. `parts` holds each job's parameters in the largest stage."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * (step_bytes(bytes_per_value) + bytes_per_value)


def step_bytes(bytes_per_value: int) -> int:
    """Return the bytes per parameter that are copied to the device for an optimizer step."""
    return _STATE * max(4, bytes_per_value)


def optimizer_bytes(bytes_per_value: int) -> int:
    """Return the bytes per parameter of master and two moments, which an optimizer step copies in both
    directions if only the optimizer is offloaded."""
    return (_STATE - 1) * max(4, bytes_per_value)


def optimizer_ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Return the device bytes of all buffers if only the optimizer state of the given parameters is
    offloaded."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * optimizer_bytes(bytes_per_value)


def back_bytes(bytes_per_value: int) -> int:
    """Return the bytes per parameter that are copied back to the host after an optimizer step."""
    return (_STATE - 1) * max(4, bytes_per_value) + bytes_per_value
