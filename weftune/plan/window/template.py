"""MuxTune's pipeline template (3.4.1): slowest bucket first, each bucket in one piece, eager launches.

Under its premises the last stage never waits between its first forward and its last backward (appendix A).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weftune.plan.program.prices import PassPrice, Prices
from weftune.plan.program.program import Program
from weftune.plan.window.dispatch import Dispatch, DispatchRules
from weftune.plan.window.orders import Passes, Work, assemble

EVEN = 1e-9
"""Relative difference below which times count as equal."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A bucket's microbatches, all alike, and what one of them costs on every stage."""

    microbatches: tuple[int, ...]
    passes: tuple[PassPrice, ...]

    @property
    def latency(self) -> float:
        """Seconds of one microbatch on the first stage, by which buckets are balanced."""
        return self.passes[0].forward + self.passes[0].backward


@dataclass(frozen=True, slots=True)
class PipelineTemplate:
    program: Program
    order: tuple[int, ...]
    """Queues in the order in which they run."""
    broken: tuple[str, ...]
    """Premises of the theorem that do not hold, one sentence each. If empty, the last stage never waits."""

    def why(self) -> str:
        """Return one sentence for a reader of the plan."""
        if not self.broken:
            return "the last stage is busy from its first forward to its last backward"
        return "the last stage may have to wait: " + "; ".join(self.broken)


def template(work: Work, queues: Sequence[Queue], room: Sequence[int] = ()) -> PipelineTemplate:
    """Return the template's order for `queues`, which together hold all microbatches of `work`.

    `room` is the bytes that microbatches in flight may keep on each stage; without it memory is unlimited.
    """
    assert queues, "there is a bucket to run"
    order = sorted(range(len(queues)), key=lambda index: -queues[index].latency)
    sorted_queues = [queues[index] for index in order]
    launches = [number for queue in sorted_queues for number in queue.microbatches]
    assert sorted(launches) == work.filled, "the queues do not hold every microbatch once"
    dispatch = _dispatch(work, launches, queue_prices(work, queues), room)
    program = assemble(work, dispatch.run())
    scarce = [f"stage {stage} has no memory for an earlier launch" for stage in sorted(dispatch.delayed)]
    return PipelineTemplate(program, tuple(order), (*_broken(work, sorted_queues), *scarce))


def eager_passes(work: Work, prices: Prices, room: Sequence[int]) -> Passes:
    """Return the template's passes for microbatches that are not alike, already sorted by slowest bucket."""
    return _dispatch(work, work.filled, prices, room).run()


def _dispatch(work: Work, launches: Sequence[int], prices: Prices, room: Sequence[int]) -> Dispatch:
    stages = len(prices.passes[0])
    rules = DispatchRules(
        flights=(len(launches),) * stages, forward_first=(False,) * stages, room=tuple(room)
    )
    return Dispatch(work.microbatches, [launches], prices, rules)


def queue_prices(work: Work, queues: Sequence[Queue]) -> Prices:
    by_number = {number: queue.passes for queue in queues for number in queue.microbatches}
    idle = (PassPrice(0.0, 0.0),) * len(queues[0].passes)
    return Prices(tuple(by_number.get(number, idle) for number in range(len(work.microbatches))))


def _broken(work: Work, queues: Sequence[Queue]) -> list[str]:
    """Return the theorem's premises on time that `queues`, in the order in which they run, do not meet."""
    broken: list[str] = []
    for place, queue in enumerate(queues, 1):
        if any(abs(one.forward - one.backward) > EVEN * one.forward for one in queue.passes):
            broken.append(f"the forward and the backward of bucket {place} take different times")
        paces = [one.forward for one in queue.passes]
        if max(paces) - min(paces) > EVEN * max(paces):
            broken.append(f"bucket {place} takes different times on different stages")
    steps = Counter(batch.job for batch in work.batches)
    again = [job for job, count in steps.items() if count > 1]
    if again:
        broken.append(f"{again[0]} has several global batches, and each waits for the Step before it")
    return broken
