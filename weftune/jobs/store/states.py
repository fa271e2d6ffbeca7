"""The states of a job, and the transitions between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    """Stopped at its current step, by Ctrl-C or by a file that could not be written; --resume continues
    it."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether only the user (--restart, --retry) can make the job continue."""
        return not MOVES[self]


MOVES: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.PAUSED, State.FAILED, State.CANCELLED}),
    # Back to queued is preemption: the job leaves its slot and keeps its cursor.
    State.RUNNING: frozenset({State.QUEUED, State.PAUSED, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    # Back to queued is a resumption.
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


def move(old: State, new: State) -> State:
    """Return `new` if a job may change to it from `old`; any other transition is a bug in the caller."""
    if new not in MOVES[old]:
        raise ValueError(f"a job cannot go from {old} to {new}")
    return new
