"""What a cut for streaming over several workers needs of each device and of the host, and what a round takes.

Every worker has what belongs to its own stages: layers, their adapters' state and their inputs. Adapters are
taken to be spread evenly over the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weftune.plan.cost.memory import ON_THE_WAY, UNFITTED, Need
from weftune.plan.layout.need import StreamCase
from weftune.plan.layout.worker_recurrence import Hops, StagePasses, round_seconds
from weftune.plan.program.layout import Layout, OnWorker


@dataclass(frozen=True)
class WorkersCase:
    """A base, its jobs and devices that are alike, one for each worker."""

    one: StreamCase
    """The same on one device; adapters and inputs stay there."""
    workers: int
    alone: StreamCase | None = None
    """The largest that may have to fit by itself, when these jobs have gone."""

    def __post_init__(self) -> None:
        assert not self.one.travels, "adapters of a worker stay on its device"
        assert not self.one.offloads, "what a worker's stages were given stays on its device"

    # -- bytes -------------------------------------------------------------------------------------------

    def need(self, cut: Layout) -> Need:
        """Of the worker that needs most."""
        return max((self.worker_need(cut.on(worker)) for worker in range(self.workers)), key=_total)

    def worker_need(self, cut: OnWorker) -> Need:
        one = self.one
        sizes = {stage: cut.stages[stage].stop - cut.stages[stage].start for stage in cut.own}
        streamed = [sizes[stage] for stage in cut.streamed]
        slots = min(cut.slots, len(streamed))
        layers = sum(sizes.values()) - sum(streamed) + slots * max(streamed, default=0)
        # Beside what its stages keep, as much as one of them makes may still be on its way onwards.
        inputs = (len(cut.own) + 1) * one.input_bytes
        moving = ON_THE_WAY * one.capacity * one.shape.hidden * one.shape.bytes_per_value
        return Need(
            resident=one.device.taken + self._ends_bytes(cut) + layers * one.layer_bytes,
            state=math.ceil(one.state_bytes * sum(sizes.values()) / one.shape.layers),
            activations=inputs + moving + max(sizes.values()) * one.kept_bytes,
            slack=one.device.slack,
        )

    def _ends_bytes(self, cut: OnWorker) -> int:
        """Embedding and head, where they are; norms and biases, which may be anywhere."""
        shape = self.one.shape
        matrix = shape.hidden * shape.vocabulary * shape.bytes_per_value
        tied = self.one.ends_bytes < 2 * matrix
        beside = max(0, self.one.ends_bytes - (matrix if tied else 2 * matrix))
        first, last = cut.worker == 0, cut.own[-1] == len(cut.stages) - 1
        return beside + matrix * (1 if first and last and tied else first + last)

    def worker_bytes(self, cut: OnWorker) -> int:
        """With these jobs, or with the one that must fit alone."""
        alone = 0 if self.alone is None else WorkersCase(self.alone, self.workers).worker_bytes(cut)
        return max(_total(self.worker_need(cut)), alone)

    def most_bytes(self, cut: Layout) -> int:
        """The same, on the fullest device."""
        return max(self.worker_bytes(cut.on(worker)) for worker in range(self.workers))

    def device_bytes(self, cut: Layout) -> int:
        """On the fullest device at the peak, with these jobs."""
        return _total(self.need(cut))

    def host_bytes(self, cut: Layout) -> int:
        """Of all workers: layers that come and go."""
        streamed = sum(stage.stop - stage.start for stage in cut.stages if not stage.resident)
        return streamed * self.one.layer_bytes

    def excess(self, cut: Layout) -> int:
        """Bytes that are needed, on the fullest device or on the host, and are not there."""
        device = self.one.device
        lacking = self.most_bytes(cut) - device.budget, self.host_bytes(cut) - device.host_budget
        return sum(max(0, count) for count in lacking)

    # -- seconds -----------------------------------------------------------------------------------------

    @property
    def microbatches(self) -> int:
        return math.ceil(self.one.round_tokens / self.one.capacity)

    def seconds(self, cut: Layout, bandwidth: float | None = None) -> float:
        """Of a round; `bandwidth` in the place of the device's own."""
        rounds = self.one.rounds([stage.stop - stage.start for stage in cut.stages])
        passes = [
            StagePasses(one.forward / self.microbatches, one.backward / self.microbatches, one.load_bytes)
            for one in rounds
        ]
        # As if it went by way of the host: between GPUs it is never slower.
        hop = self.one.input_bytes / self.microbatches / self.one.device.bandwidth
        hops = Hops(hop, bandwidth or self.one.device.bandwidth)
        return round_seconds(passes, cut, self.microbatches, hops)

    def unhidden(self, cut: Layout) -> float:
        """The share of a round that Loads add to it."""
        seconds = self.seconds(cut)
        return max(0.0, seconds - self.seconds(cut, math.inf)) / seconds


def _total(need: Need) -> int:
    return need.total(UNFITTED)
