"""Time of a round with master weights and moments in host memory, and whether it pays off: for more running
jobs, for larger microbatches, or for fewer recomputed layers.

Jobs run in two groups that take turns, and the Steps of one group use the link during the passes of the
other. Steps are hidden only as far as passes are long: those of many adapters on few tokens would take
several times as long as their passes, and then it is better for jobs to wait for their turn.
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
"""Share by which a step of all jobs may be longer so that more of them run together: times are estimates."""
FASTER = 0.03
"""Share by which a step must be shorter if all jobs run together either way: page-locked memory costs time
too, once."""


def offloading(memory: MemoryModel, host_budget: int) -> MemoryModel:
    """Return the memory model with master weights and moments of all jobs in host memory."""
    return replace(memory, layout=replace(memory.layout, optimizer_offloaded=True), host_budget=host_budget)


@dataclass(frozen=True, slots=True)
class GroupRound:
    """Times of a group of jobs in a round, in seconds."""

    passes: float = 0.0
    moved: float = 0.0
    """Seconds of transfers over the link, in both directions at the same time."""


@dataclass(frozen=True, slots=True)
class OffloadedRound:
    """A round whose Steps transfer state from host memory."""

    first: GroupRound
    second: GroupRound
    """Times of the second group; zero if there is only one job: then no pass hides its Step."""

    @property
    def seconds(self) -> float:
        # No pass hides the Steps of a window's last group.
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
    """Return the seconds of a round's passes, in microbatches as large as memory and `most` tokens allow."""
    recompute = memory.recompute(jobs, most)
    capacity = memory.capacity(jobs, most, recompute)
    return whole_seconds(memory.shape, jobs, device, _tokens(jobs), capacity, recompute)


def _tokens(jobs: Sequence[JobShape]) -> int:
    return max(sum(job.batch_tokens for job in jobs), longest(jobs))


def is_worth(
    offloaded: MemoryModel, resident: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> bool:
    """Return whether a step of all these jobs, each of which fits alone either way, takes about as long as if
    more of them waited for their turn."""
    together = sum(offloaded_round(offloaded, turn, device, most).seconds for turn in turns(jobs, offloaded))
    waiting = sum(resident_seconds(resident, turn, device, most) for turn in turns(jobs, resident))
    return together <= (1 + SLOWER) * waiting


def would_gain(resident: MemoryModel, jobs: Sequence[JobShape], most: int) -> bool:
    """Return whether more memory could make passes of jobs that all run together cheaper: layers are
    recomputed, or weights are dequantised for small microbatches."""
    recompute = resident.recompute(jobs, most)
    small = resident.capacity(jobs, most, recompute) < min(most, _tokens(jobs))
    return recompute.layers > 0 or (resident.shape.matrix_bytes > 0 and small)


def is_faster(
    offloaded: MemoryModel, resident: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, most: int
) -> bool:
    """Return whether a step of these jobs, which all run together either way, takes less time offloaded."""
    before = resident_seconds(resident, jobs, device, most)
    return offloaded_round(offloaded, jobs, device, most).seconds <= (1 - FASTER) * before


def turns(jobs: Sequence[JobShape], memory: MemoryModel) -> Iterator[Sequence[JobShape]]:
    """Yield the groups of jobs that run together, one after another. Each job fits alone."""
    left = in_order(jobs)
    while left:

        def fits(count: int, left: Sequence[JobShape] = left) -> bool:
            return memory.why_not(left[:count]) is None

        count = most_that_fit(fits, len(left))
        yield left[:count]
        left = left[count:]
