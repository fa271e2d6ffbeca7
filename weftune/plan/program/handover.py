"""The handover between two windows of a pipeline: the global batches that one window leaves unfinished, and
their microbatches, which the next window inherits.

Between two windows no message is in transit, and every optimizer step (Step) that one device has executed has
been executed by all devices. The progress of a microbatch is therefore given by two numbers: how many stages
have run its forward, and how many its backward.
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
    """The global batches that a window (a few global batches of every job) leaves unfinished, with their
    microbatches."""

    batches: tuple[GlobalBatch, ...] = ()
    microbatches: tuple[MicrobatchPlan, ...] = ()
    """All microbatches of the unfinished batches. Microbatches that have begun come first, replica by
    replica, in the order in which they began."""
    progress: tuple[Inherited, ...] = ()
    """Progress of each unfinished microbatch through the stages."""
    capacity: int = 0
    recompute: Recompute = NOTHING

    @property
    def steps(self) -> dict[str, int]:
        """Maps each job to the step of its last unfinished global batch."""
        return {batch.job: batch.step for batch in sorted(self.batches, key=lambda one: one.step)}


FINISHED = Unfinished()
"""Empty record of unfinished work, for a pipeline in which no microbatch is in flight."""


def unfinished_work(program: Program) -> Unfinished:
    """Return the global batches that a program leaves unfinished, with their microbatches and the progress of
    each."""
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
    homes = {
        action.microbatch: replica
        for replica in range(program.replicas)
        for action, _ in program.replica_passes(replica)
    }
    order = list(dict.fromkeys([*homes, *range(len(program.microbatches))]))
    kept = [number for number in order if open_parts[number] and program.kind(number) is Forward]
    return Unfinished(
        batches,
        tuple(replace(program.microbatches[number], segments=open_parts[number]) for number in kept),
        tuple(
            Inherited(number, forwards[number], backwards[number], homes.get(number, 0)) for number in kept
        ),
        program.capacity,
        program.recompute,
    )


def closed_batches(program: Program) -> set[tuple[str, int]]:
    """Return the (job, step) pairs of all global batches whose optimizer step the program executes."""
    return {(one.job, one.step) for one in program.devices[0] if isinstance(one, Step)}


def pass_counts(program: Program) -> tuple[Sequence[int], Sequence[int]]:
    """Return, for each microbatch, how many stages have run its forward by the end of the program, and how
    many its backward."""
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
    """Return one program that runs the given consecutive windows without a pause. Each window (a few global
    batches of every job) inherits the unfinished microbatches of the previous window."""
    # From the last one: indices of inherited microbatches are those of the window before.
    joined = programs[-1]
    for program in reversed(programs[:-1]):
        joined = program.followed_by(joined)
    return joined
