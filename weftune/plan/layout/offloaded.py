"""The decision whether to offload the optimizer, which keeps master weights and moments in host memory.

Offloading makes room for more running jobs, for larger microbatches or for fewer recomputed layers. Jobs run
in two alternating groups: the optimizer steps of one group use the link to the host during the forwards and
backwards of the other. With many adapters and few tokens, the transfers take several times as long as these
passes. In this case, it is better to run fewer jobs at a time without offloading. A round is one global batch
of every job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel, max_sample_tokens
from weftune.plan.cost.ring import TRAVEL_ROUNDS, optimizer_bytes
from weftune.plan.layout.need import StreamDevice, resident_round_seconds
from weftune.plan.layout.seats import largest_fitting_count, order_for_seats
from weftune.plan.window.rounds import even_groups

SLOWER = 0.05
"""Relative slowdown of a round (one global batch of every job) that is accepted if offloading the optimizer
lets more jobs run together."""
FASTER = 0.03
"""Minimum relative reduction of the time of a round (one global batch of every job) for which the optimizer
is offloaded although no more jobs run together. The gain must be considerable, since allocating page-locked
memory takes time."""


def offload_optimizer(memory: MemoryModel, host_budget: int) -> MemoryModel:
    """Return the memory model of a run that keeps master weights and moments of all jobs in host memory."""
    return replace(
        memory, layout=replace(memory.layout, offloads_optimizer=True), host_budget_bytes=host_budget
    )


@dataclass(frozen=True, slots=True)
class OffloadedRound:
    """Predicted seconds of a round (one global batch of every job) in which two groups of jobs alternate and
    optimizer state is in host memory. With one job, the second group is empty, and nothing overlaps with the
    optimizer step."""

    pass_seconds: tuple[float, float]
    transfer_seconds: tuple[float, float]
    """Seconds of the transfers for the optimizer steps of each of the two groups of jobs, in both directions
    at the same time."""

    @property
    def seconds(self) -> float:
        (first, second), (first_moved, second_moved) = self.pass_seconds, self.transfer_seconds
        # No pass hides the Steps of a window's last group.
        bare = second_moved / TRAVEL_ROUNDS
        return max(first, second_moved) + max(second, first_moved) + bare

    @property
    def exposed_seconds(self) -> float:
        """Seconds per round (one global batch of every job) in which the device waits for the transfers of
        optimizer steps."""
        return self.seconds - self.pass_seconds[0] - self.pass_seconds[1]


def offloaded_round(
    memory: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, max_tokens: int
) -> OffloadedRound:
    recompute = memory.choose_recompute(jobs, max_tokens)
    capacity = memory.choose_capacity(jobs, max_tokens, recompute)
    bandwidth = device.duplex_bandwidth or device.bandwidth
    each = optimizer_bytes(memory.shape.bytes_per_value) / bandwidth
    passes, moved = [0.0, 0.0], [0.0, 0.0]
    groups = even_groups({job.name: job.batch_tokens for job in jobs}, memory.layout.job_group_count)
    for number, names in enumerate(groups):
        group = [job for job in jobs if job.name in names]
        passes[number] = resident_round_seconds(
            memory.shape, group, device, _total_tokens(group), capacity, recompute
        )
        moved[number] = each * sum(job.trainable_parameters for job in group)
    return OffloadedRound((passes[0], passes[1]), (moved[0], moved[1]))


def resident_seconds(
    memory: MemoryModel, jobs: Sequence[JobShape], device: StreamDevice, max_tokens: int
) -> float:
    """Return the predicted seconds of the forwards and backwards of a round (one global batch of every job),
    with microbatches as large as memory and `max_tokens` allow."""
    recompute = memory.choose_recompute(jobs, max_tokens)
    capacity = memory.choose_capacity(jobs, max_tokens, recompute)
    return resident_round_seconds(memory.shape, jobs, device, _total_tokens(jobs), capacity, recompute)


def _total_tokens(jobs: Sequence[JobShape]) -> int:
    return max(sum(job.batch_tokens for job in jobs), max_sample_tokens(jobs))


def is_offloading_worthwhile(
    memory: MemoryModel,
    resident_memory: MemoryModel,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    tokens: int,
) -> bool:
    """Return whether it pays to offload the optimizer in order to run more jobs together.

    `memory` is the memory model with the optimizer offloaded, `resident_memory` the model without offloading.
    The time of one step of all jobs, which run in as few groups as memory allows, is compared with and
    without offloading. The result is True if offloading is not much slower. Microbatches have at most
    `tokens` tokens. Each job must fit alone.
    """
    together = sum(offloaded_round(memory, turn, device, tokens).seconds for turn in job_groups(jobs, memory))
    waiting = sum(
        resident_seconds(resident_memory, turn, device, tokens) for turn in job_groups(jobs, resident_memory)
    )
    return together <= (1 + SLOWER) * waiting


def would_more_memory_help(resident_memory: MemoryModel, jobs: Sequence[JobShape], max_tokens: int) -> bool:
    """Return whether more memory could make the forwards and backwards of these jobs faster. More memory can
    help if layers are recomputed now, or if weights are dequantised for small microbatches."""
    recompute = resident_memory.choose_recompute(jobs, max_tokens)
    small = resident_memory.choose_capacity(jobs, max_tokens, recompute) < min(
        max_tokens, _total_tokens(jobs)
    )
    return recompute.recomputed_layers > 0 or (resident_memory.shape.matrix_bytes > 0 and small)


def is_offloading_faster(
    memory: MemoryModel,
    resident_memory: MemoryModel,
    jobs: Sequence[JobShape],
    device: StreamDevice,
    tokens: int,
) -> bool:
    """Return whether a step of these jobs takes less time with the optimizer offloaded. All jobs must fit in
    memory together, both with and without offloading."""
    before = resident_seconds(resident_memory, jobs, device, tokens)
    return offloaded_round(memory, jobs, device, tokens).seconds <= (1 - FASTER) * before


def job_groups(jobs: Sequence[JobShape], memory: MemoryModel) -> Iterator[Sequence[JobShape]]:
    """Yield groups of jobs, each with as many jobs as fit in memory together. Each job must fit alone."""
    remaining_jobs = order_for_seats(jobs)
    while remaining_jobs:

        def fits(count: int, remaining_jobs: Sequence[JobShape] = remaining_jobs) -> bool:
            return memory.misfit_reason(remaining_jobs[:count]) is None

        count = largest_fitting_count(fits, len(remaining_jobs))
        yield remaining_jobs[:count]
        remaining_jobs = remaining_jobs[count:]
