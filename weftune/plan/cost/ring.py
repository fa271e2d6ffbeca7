"""Sizes of the ring of buffers through which Steps of state in host memory pass on the device.

If adapters travel, the gradient, master and two moments of every parameter are copied to the device; the last
three and the new weights are copied back. If only the optimizer is offloaded, just master and moments are
copied, in both directions. A piece belongs to one job and one stage; pieces of several jobs share a buffer,
so that one launch updates them.
"""

from __future__ import annotations

from collections.abc import Iterable

from weftune.core.shapes import JobShape

PIECE = 1 << 22
"""Maximum number of parameters per buffer."""
PIECES = 3
"""Number of buffers: while one is stepped, another is filled and a third is copied back."""
TRAVEL_ROUNDS = 8
"""Rounds per window if state is in host memory: nothing hides the Steps after the last round."""
MARGIN = 128
"""Parameters by which a job's part may grow, since it is cut at multiples of the number stepped at a time."""
_STATE = 4
"""Values per parameter that are copied to the device: gradient (one way), master and two moments."""


def stage_parts(jobs: Iterable[JobShape], layers: int, of: int) -> list[int]:
    """Return the parameters of each job in a stage with `layers` of the base's `of` equal layers."""
    return [-(-job.trainable // of) * layers for job in jobs]


def ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Return the device bytes of all buffers for the jobs' parameters in their largest stage."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * (step_bytes(bytes_per_value) + bytes_per_value)


def step_bytes(bytes_per_value: int) -> int:
    """Return the bytes per parameter that are copied to the device for a Step."""
    return _STATE * max(4, bytes_per_value)


def optimizer_bytes(bytes_per_value: int) -> int:
    """Return the bytes per parameter of master and two moments, which are copied to the device for a Step and
    back if only the optimizer is offloaded."""
    return (_STATE - 1) * max(4, bytes_per_value)


def optimizer_ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Return the device bytes of all buffers if only the optimizer of these parameters is offloaded."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * optimizer_bytes(bytes_per_value)


def back_bytes(bytes_per_value: int) -> int:
    """Return the bytes per parameter that are copied back to the host after a Step."""
    return (_STATE - 1) * max(4, bytes_per_value) + bytes_per_value
