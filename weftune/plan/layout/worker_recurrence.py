"""How long a round takes where several workers stream a base together.

A worker makes its visits in their order; a microbatch goes on when the stage before has computed it and it
has been sent to the next worker. Each has its own link to the host: a Load begins when the visit before
it in its slot has ended and the link is free. The next round begins with the Steps of this one.

Microbatches are alike, so a stage's starts are convex in their number, and the first and the last say it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weftune.plan.program.layout import Layout, OnWorker
from weftune.plan.program.program import Load
from weftune.plan.window.rounds import Visit, moves


@dataclass(frozen=True, slots=True)
class StagePasses:
    """One microbatch on one stage."""

    forward: float
    backward: float
    """With what is recomputed of the forward."""
    load_bytes: int


@dataclass(frozen=True, slots=True)
class Hops:
    """What a microbatch and a stage take on their ways."""

    hop: float = 0.0
    """Seconds to the next worker."""
    bandwidth: float = float("inf")
    """Bytes per second from the host, of each worker's link."""


def round_seconds(stages: Sequence[StagePasses], cut: Layout, microbatches: int, hops: Hops) -> float:
    """Of one round among many."""
    first, second = round_ends(stages, cut, microbatches, hops, 2)
    return second - first


def round_ends(
    stages: Sequence[StagePasses], cut: Layout, microbatches: int, hops: Hops, rounds: int
) -> list[float]:
    """When each of so many rounds ends, the first beginning at 0."""
    run = _Run(stages, cut, microbatches, hops, rounds)
    ends = []
    for _ in range(rounds):
        last = len(stages) - 1
        for stage in range(last):
            run.visit(stage, stages[stage].forward)
        run.visit(last, stages[last].forward + stages[last].backward)
        for stage in reversed(range(last)):
            run.visit(stage, stages[stage].backward)
        ends.append(run.rest())
    return ends


class _Run:
    def __init__(
        self, stages: Sequence[StagePasses], cut: Layout, microbatches: int, hops: Hops, rounds: int
    ) -> None:
        self.stages, self.cut, self.hops = stages, cut, hops
        self.more = microbatches - 1
        self.first = self.last = 0.0
        """When the first and the last microbatch are ready for their next visit."""
        self.free = [0.0] * cut.workers
        self.link = [0.0] * cut.workers
        self.there = [0.0] * len(stages)
        self.loads = [_loads(cut.on(worker), rounds) for worker in range(cut.workers)]

    def visit(self, stage: int, seconds: float) -> None:
        worker = stage % self.cut.workers
        start = max(self.free[worker], self.there[stage], self.first)
        final = max(self.last, start + self.more * seconds)
        self.first, self.last = (begin + seconds + self.hops.hop for begin in (start, final))
        self.free[worker] = final + seconds
        if (coming := next(self.loads[worker])) is not None:
            begins = max(self.link[worker], self.free[worker])
            self.link[worker] = begins + self.stages[coming].load_bytes / self.hops.bandwidth
            self.there[coming] = self.link[worker]

    def rest(self) -> float:
        """All Steps are made; from here on the next round's microbatches are ready."""
        self.first = self.last = self.free[0]
        return self.free[0]


def _loads(cut: OnWorker, rounds: int) -> Iterator[int | None]:
    """The stage that is loaded behind each visit of a worker, if there is one."""
    last = len(cut.stages) - 1
    forward = [stage for stage in cut.own if stage < last]
    visits = [Visit(stage, ()) for stage in [*forward, *reversed(cut.own)] * rounds]
    for moved in moves(visits, cut):
        yield next((action.stage for action in moved if isinstance(action, Load)), None)
