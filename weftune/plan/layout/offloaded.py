"""What a round takes where master weights and moments are in host memory, and whether it is worth it.

A job's next pass waits for its Step, so what hides one are passes of microbatches without that job. Where a
round is a single microbatch nothing does, and a step of many adapters on few tokens would take several times
as long: then jobs had better wait for their turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel, longest
from weftune.plan.cost.ring import TRAVEL_ROUNDS, optimizer_bytes
from weftune.plan.layout.need import StreamDevice, WholeRound, whole_round
from weftune.plan.layout.one_device import in_order, most_that_fit

SLOWER = 0.05
"""By so much a step of all jobs may take longer for more of them to be aboard: times are estimates."""


def offloading(memory: MemoryModel, host_budget: int) -> MemoryModel:
    """The same device with master weights and moments of all jobs in host memory."""
    return replace(memory, layout=replace(memory.layout, optimizer_offloaded=True), host_budget=host_budget)


@dataclass(frozen=True, slots=True)
class OffloadedRound:
    """A round whose Steps come from host memory."""

    passes: WholeRound
    moved: float
    """Seconds of the link, either way at the same time."""

    @property
    def seconds(self) -> float:
        count, both = self.passes.microbatches, self.passes.seconds + self.moved
        if count == 1:
            return both
        # Behind a window's last microbatch there is no other pass.
        bare = self.moved / count / TRAVEL_ROUNDS
        return max(self.passes.seconds, self.moved, both / count) + bare

    @property
    def unhidden(self) -> float:
        """Seconds in which the device waits for Steps."""
        return self.seconds - self.passes.seconds


def resident_round(
    memory: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> WholeRound:
    """A round's passes, in microbatches of at most `most` tokens, as many as memory allows."""
    tokens = max(sum(job.batch_tokens for job in jobs), longest(jobs))
    recompute = memory.recompute(jobs, most)
    return whole_round(memory.shape, jobs, device, tokens, memory.capacity(jobs, most, recompute), recompute)


def offloaded_round(
    memory: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> OffloadedRound:
    bandwidth = device.both_ways or device.bandwidth
    moved = sum(job.trainable for job in jobs) * optimizer_bytes(memory.shape.bytes_per_value) / bandwidth
    return OffloadedRound(resident_round(memory, jobs, device, most), moved)


def is_worth(
    offloaded: MemoryModel, resident: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> bool:
    """Whether all of these jobs, each of which fits alone either way, take about as long for a step as if
    more of them waited for their turn."""
    together = sum(offloaded_round(offloaded, turn, device, most).seconds for turn in turns(jobs, offloaded))
    waiting = sum(resident_round(resident, turn, device, most).seconds for turn in turns(jobs, resident))
    return together <= (1 + SLOWER) * waiting


def turns(jobs: Sequence[JobShape], memory: MemoryModel) -> Iterator[Sequence[JobShape]]:
    """Those that are aboard together, one group after another; each job fits alone."""
    left = in_order(jobs)
    while left:

        def fits(count: int, left: Sequence[JobShape] = left) -> bool:
            return memory.why_not(left[:count]) is None

        count = most_that_fit(fits, len(left))
        yield left[:count]
        left = left[count:]
