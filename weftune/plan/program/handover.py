"""The seam between two windows of a pipeline: the batches that one window leaves unfinished, and their
microbatches, which the next window inherits.

At a seam no message is in transit, and every Step that one device has made is made on all of them. So the
progress of a microbatch is two numbers: how many stages have run its forward, and how many its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.program.program import (
    NOTHING,
    Backward,
    Forward,
    GlobalBatch,
    Inherited,
    MicrobatchPlan,
    Program,
    Recompute,
    Step,
)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The unfinished batches of a window."""

    batches: tuple[GlobalBatch, ...] = ()
    microbatches: tuple[MicrobatchPlan, ...] = ()
    """All microbatches of the batches, in the order in which they began; the others follow."""
    progress: tuple[Inherited, ...] = ()
    """Progress of each of the microbatches."""
    capacity: int = 0
    recompute: Recompute = NOTHING

    @property
    def steps(self) -> dict[str, int]:
        """Return a map from each job to the step of its last unfinished batch."""
        return {batch.job: batch.step for batch in sorted(self.batches, key=lambda one: one.step)}

    def first_step(self, job: str) -> int | None:
        """Return the step of a job's first unfinished batch, or None if it has none."""
        return min((batch.step for batch in self.batches if batch.job == job), default=None)


FINISHED = Unfinished()
"""The state of a pipeline that is drained."""


def unfinished_work(program: Program) -> Unfinished:
    """Return the batches that a window leaves unfinished."""
    if not program.hands_over:
        return FINISHED
    closed = closed_batches(program)
    batches = tuple(one for one in program.batches if (one.job, one.step) not in closed)
    if not batches:
        return FINISHED
    forwards, backwards = pass_counts(program)
    keys = {(one.job, one.step) for one in batches}
    open_parts = {
        number: tuple(one for one in plan.segments if (one.job, one.step) in keys)
        for number, plan in enumerate(program.microbatches)
    }
    begun = [number for number, one in enumerate(program.inherited) if one.forwards]
    begun += [one.microbatch for one in program.devices[0] if isinstance(one, Forward)]
    order = list(dict.fromkeys([*begun, *range(len(program.microbatches))]))
    kept = [number for number in order if open_parts[number] and program.kind(number) is Forward]
    return Unfinished(
        batches,
        tuple(replace(program.microbatches[number], segments=open_parts[number]) for number in kept),
        tuple(Inherited(number, forwards[number], backwards[number]) for number in kept),
        program.capacity,
        program.recompute,
    )


def closed_batches(program: Program) -> set[tuple[str, int]]:
    """Return the (job, step) of all batches whose Steps are made in the window."""
    return {(one.job, one.step) for one in program.devices[0] if isinstance(one, Step)}


def pass_counts(program: Program) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of stages that have run the forward and the backward of each microbatch at the end
    of the window."""
    forwards, backwards = [0] * len(program.microbatches), [0] * len(program.microbatches)
    for number, one in enumerate(program.inherited):
        forwards[number], backwards[number] = one.forwards, one.backwards
    for actions in program.devices:
        for action in actions:
            if isinstance(action, Forward):
                forwards[action.microbatch] += 1
            elif isinstance(action, Backward):
                backwards[action.microbatch] += 1
    return forwards, backwards


def join_windows(programs: Sequence[Program]) -> Program:
    """Return one program that runs consecutive windows without a pause. Each inherits from the one before."""
    # From the last one: indices of inherited microbatches are those of the window before.
    joined = programs[-1]
    for program in reversed(programs[:-1]):
        joined = program.followed_by(joined)
    return joined
