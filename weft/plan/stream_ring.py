"""How Steps of adapters that travel pass through the device: in pieces, through a ring of a few buffers.

For every parameter its gradient, master and two moments come up; the last three and the new weights go back.
A piece is of one job and one stage.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.shapes import JobShape

PIECE = 1 << 21
"""Parameters that a buffer holds at the most."""
PIECES = 3
"""Buffers: while one is stepped another fills, and a third goes back."""
ROUNDS = 8
"""Of a window where adapters travel: behind its last one nothing hides the Steps, so it is a long one."""
MARGIN = 128
"""Parameters by which a part may grow, since it is cut at multiples of what is stepped at a time."""
_STATE = 4
"""Values of a parameter that come: gradient, master and two moments. The first of them does not go back."""


def layer_part(jobs: Iterable[JobShape], layers: int) -> int:
    """The most parameters that a job has in one of so many layers, which are alike."""
    return -(-max((job.trainable for job in jobs), default=0) // layers)


def piece_parameters(part: int) -> int:
    """What a buffer holds where the largest part, of all jobs and stages, has so many parameters."""
    return min(PIECE, part + MARGIN) if part else 0


def ring_bytes(part: int, bytes_per_value: int) -> int:
    """Of all buffers, on the device."""
    return PIECES * piece_parameters(part) * (step_bytes(bytes_per_value) + bytes_per_value)


def step_bytes(bytes_per_value: int) -> int:
    """Of one parameter, what comes for its Step."""
    return _STATE * max(4, bytes_per_value)


def back_bytes(bytes_per_value: int) -> int:
    """Of one parameter, what goes back of it."""
    return (_STATE - 1) * max(4, bytes_per_value) + bytes_per_value
