"""What a round takes where master weights and moments are in host memory, and whether it is worth it: for
more jobs aboard, for larger microbatches, or for fewer layers that are recomputed.

Jobs pass in two groups that take turns, and the Steps of one come over the link while the other passes. So
Steps are hidden as far as passes are long: those of many adapters on few tokens would take several times as
long as their passes, and then jobs had better wait for their turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel, longest
from weftune.plan.cost.ring import TRAVEL_ROUNDS, optimizer_bytes
from weftune.plan.layout.need import StreamDevice, whole_seconds
from weftune.plan.layout.one_device import in_order, most_that_fit
from weftune.plan.window.rounds import even_groups

SLOWER = 0.05
"""By so much a step of all jobs may take longer for more of them to be aboard: times are estimates."""
FASTER = 0.03
"""By so much a step must be shorter where all jobs are aboard either way: page-locked memory takes its time
too, once."""


def offloading(memory: MemoryModel, host_budget: int) -> MemoryModel:
    """The same device with master weights and moments of all jobs in host memory."""
    return replace(memory, layout=replace(memory.layout, optimizer_offloaded=True), host_budget=host_budget)


@dataclass(frozen=True, slots=True)
class GroupRound:
    """A group of jobs in a round, in seconds."""

    passes: float = 0.0
    moved: float = 0.0
    """Of the link, either way at the same time."""


@dataclass(frozen=True, slots=True)
class OffloadedRound:
    """A round whose Steps come from host memory."""

    first: GroupRound
    second: GroupRound
    """Nothing where there is one job only: then no pass hides its Step."""

    @property
    def seconds(self) -> float:
        # Behind a window's last group nobody passes.
        bare = self.second.moved / TRAVEL_ROUNDS
        first, second = self.first, self.second
        return max(first.passes, second.moved) + max(second.passes, first.moved) + bare

    @property
    def unhidden(self) -> float:
        """Seconds in which the device waits for Steps."""
        return self.seconds - self.first.passes - self.second.passes


def offloaded_round(
    memory: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> OffloadedRound:
    recompute = memory.recompute(jobs, most)
    capacity = memory.capacity(jobs, most, recompute)
    bandwidth = device.both_ways or device.bandwidth
    each = optimizer_bytes(memory.shape.bytes_per_value) / bandwidth
    found = [GroupRound(), GroupRound()]
    groups = even_groups({job.name: job.batch_tokens for job in jobs}, memory.layout.job_groups)
    for number, names in enumerate(groups):
        group = [job for job in jobs if job.name in names]
        passes = whole_seconds(memory.shape, group, device, _tokens(group), capacity, recompute)
        found[number] = GroupRound(passes, each * sum(job.trainable for job in group))
    return OffloadedRound(*found)


def resident_seconds(memory: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int) -> float:
    """A round's passes, in microbatches of at most `most` tokens, as many as memory allows."""
    recompute = memory.recompute(jobs, most)
    capacity = memory.capacity(jobs, most, recompute)
    return whole_seconds(memory.shape, jobs, device, _tokens(jobs), capacity, recompute)


def _tokens(jobs: Sequence[JobShape]) -> int:
    return max(sum(job.batch_tokens for job in jobs), longest(jobs))


def is_worth(
    offloaded: MemoryModel, resident: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> bool:
    """Whether all of these jobs, each of which fits alone either way, take about as long for a step as if
    more of them waited for their turn."""
    together = sum(offloaded_round(offloaded, turn, device, most).seconds for turn in turns(jobs, offloaded))
    waiting = sum(resident_seconds(resident, turn, device, most) for turn in turns(jobs, resident))
    return together <= (1 + SLOWER) * waiting


def would_gain(resident: MemoryModel, jobs: Sequence[JobShape], most: int) -> bool:
    """Whether more memory could make passes of jobs that are all aboard cheaper: layers are recomputed, or
    weights dequantised for small microbatches."""
    recompute = resident.recompute(jobs, most)
    small = resident.capacity(jobs, most, recompute) < min(most, _tokens(jobs))
    return recompute.layers > 0 or (resident.shape.matrix_bytes > 0 and small)


def is_faster(
    offloaded: MemoryModel, resident: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> bool:
    """Whether these jobs, which are all aboard either way, take less time for a step."""
    before = resident_seconds(resident, jobs, device, most)
    return offloaded_round(offloaded, jobs, device, most).seconds <= (1 - FASTER) * before


def turns(jobs: Sequence[JobShape], memory: MemoryModel) -> Iterator[Sequence[JobShape]]:
    """Those that are aboard together, one group after another; each job fits alone."""
    left = in_order(jobs)
    while left:

        def fits(count: int, left: Sequence[JobShape] = left) -> bool:
            return memory.why_not(left[:count]) is None

        count = most_that_fit(fits, len(left))
        yield left[:count]
        left = left[count:]
