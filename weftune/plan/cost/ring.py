"""How Steps of state in host memory pass through the device: in pieces, through a ring of a few buffers.

Of adapters that travel, for every parameter its gradient, master and two moments come up; the last three and
the new weights go back. Where only the optimizer is offloaded, master and moments come and go, and nothing
else. A piece is of one job and one stage; pieces of several jobs share a buffer, so that one launch updates
them.
"""

from __future__ import annotations

from collections.abc import Iterable

from weftune.core.shapes import JobShape

PIECE = 1 << 22
"""Parameters that a buffer holds at the most."""
PIECES = 3
"""Buffers: while one is stepped another fills, and a third goes back."""
TRAVEL_ROUNDS = 8
"""Of a window where state is in host memory: behind its last one nothing hides the Steps, so it is long."""
MARGIN = 128
"""Parameters by which a job's part may grow, since it is cut at multiples of what is stepped at a time."""
_STATE = 4
"""Values of a parameter that come: gradient, master and two moments. The first of them does not go back."""


def stage_parts(jobs: Iterable[JobShape], layers: int, of: int) -> list[int]:
    """The parameters of each job in a stage of so many layers, of all of them, which are alike."""
    return [-(-job.trainable // of) * layers for job in jobs]


def ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Of all buffers, on the device, where jobs have these parts of the stage in which they have the most."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * (step_bytes(bytes_per_value) + bytes_per_value)


def step_bytes(bytes_per_value: int) -> int:
    """Of one parameter, what comes for its Step."""
    return _STATE * max(4, bytes_per_value)


def optimizer_bytes(bytes_per_value: int) -> int:
    """Of one parameter, its master and two moments: what comes for its Step where only the optimizer is
    offloaded, and as much goes back."""
    return (_STATE - 1) * max(4, bytes_per_value)


def optimizer_ring_bytes(parts: Iterable[int], bytes_per_value: int) -> int:
    """Of all buffers, on the device, where jobs have so many parameters."""
    together = sum(part + MARGIN for part in parts if part)
    return PIECES * min(PIECE, together) * optimizer_bytes(bytes_per_value)


def back_bytes(bytes_per_value: int) -> int:
    """Of one parameter, what goes back of it."""
    return (_STATE - 1) * max(4, bytes_per_value) + bytes_per_value
