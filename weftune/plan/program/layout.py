"""Layouts of a base on devices: its stages, their workers, and which stages are resident or streamed.

Stage j belongs to worker j mod N. A stage that is not resident is streamed: its weights are in host memory
and are loaded into a slot of its worker's device when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.core.shapes import LayerRange


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Consecutive layers that are placed and moved together."""

    start: int
    stop: int
    resident: bool = False
    """Whether its weights stay on the device."""

    @property
    def count(self) -> int:
        return self.stop - self.start


OFFLOADED_ROUNDS = OFFLOADED_MICROBATCHES = 2
"""Whole rounds, and microbatches beyond them, whose rows are on the device at the peak if inputs are
offloaded: a backward holds the inputs of the current stage and, in their place, those of the previous stage
as they return, and the gradients; each takes one microbatch more than a round, since one arrives before
another leaves. A forward holds less."""
BUFFERED = 2
"""Microbatches of rows buffered to pass hidden states and gradients into and out of captured passes."""
RUNGS = 16
"""Number of sizes between two powers of two to which microbatches are padded if passes are captured."""


def padded_rows(tokens: int, captured: bool) -> int:
    """Return the most rows for a round of `tokens` tokens, except for the smallest microbatches."""
    return tokens + tokens // RUNGS if captured else tokens


def offloaded_inputs(stages: int) -> int:
    """Return the number of stages whose input can be offloaded: the first has none, and the last one's
    backward follows at once."""
    return max(0, stages - 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a base on the devices of its workers."""

    stages: tuple[StageLayers, ...]
    slots: tuple[int, ...] = (0,)
    """Number of slots on each worker's device, each as large as its largest streamed stage."""
    travels: bool = False
    """Whether adapters also live in host memory and are loaded and evicted with their stage."""
    offloaded_rows: int = 0
    """Rows per round for whose inputs host memory is reserved; 0 keeps inputs on the device."""
    replicas: int = 1
    """Number of copies of all stages, each on its own workers."""
    optimizer_offloaded: bool = False
    """Whether master weights and moments live in host memory and are copied to the device only for Steps,
    while compute copies and gradients of adapters stay on the device."""
    pipelined: bool = False
    """Whether every worker has one resident stage that keeps the activations of its forward for the backward.
    If stages take turns, forwards are recomputed from their inputs, whether the stages are resident or
    not."""

    def __post_init__(self) -> None:
        assert self.workers <= len(self.stages), "every worker has a stage"
        assert not self.pipelined or (len(self.stages) == self.workers and not any(self.slots)), (
            "a worker of a pipeline has one stage, which stays"
        )
        assert not self.optimizer_offloaded or (
            len(self.stages) * self.replicas == 1 and self.stages[0].resident and not self.travels
        ), "only beside a base that stays on one device"
        for worker, count in enumerate(self.slots):
            assert count >= 1 or not self.on(worker).streamed, "a streamed stage needs a place to come to"

    @property
    def workers(self) -> int:
        """Number of workers of one replica."""
        return len(self.slots)

    @property
    def homes(self) -> tuple[int, ...]:
        """Worker of each stage, in the first replica."""
        return tuple(stage % self.workers for stage in range(len(self.stages)))

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    @property
    def job_groups(self) -> int:
        """Groups of jobs that take turns in a round, to hide each other's Steps from host memory."""
        return 2 if self.optimizer_offloaded else 1

    @property
    def offloads(self) -> bool:
        """Whether inputs of stages are kept in host memory until their backward."""
        return self.offloaded_rows > 0

    def on(self, worker: int) -> OnWorker:
        return OnWorker(self, worker)


def one_device(layers: int = 1, optimizer_offloaded: bool = False) -> Layout:
    """Return a layout with the whole base as one resident stage on one device."""
    return Layout((StageLayers(0, layers, resident=True),), optimizer_offloaded=optimizer_offloaded)


def in_stages(layers: Sequence[LayerRange], replicas: int = 1) -> Layout:
    """Return a pipeline with one resident stage on each worker."""
    stages = tuple(StageLayers(one.start, one.stop, resident=True) for one in layers)
    return Layout(stages, (0,) * len(stages), replicas=replicas, pipelined=True)


@dataclass(frozen=True, slots=True)
class OnWorker:
    """One worker's part of a layout. Stages keep their global numbers."""

    layout: Layout
    worker: int = 0

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        """All stages of the base, on any worker."""
        return self.layout.stages

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(range(self.worker, len(self.stages), self.layout.workers))

    @property
    def slots(self) -> int:
        return self.layout.slots[self.worker]

    @property
    def streamed(self) -> tuple[int, ...]:
        """Own stages that are streamed."""
        return tuple(number for number in self.own if not self.stages[number].resident)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Streamed stages in the slots between two windows: the first ones, which are needed next."""
        return self.streamed[: self.slots]

    def slot(self, stage: int) -> int:
        """Return the fixed slot of a stage, so that its weights have one address; neighbours differ."""
        return self.streamed.index(stage) % self.slots

    def held(self, stage: int) -> LayerRange:
        found = self.stages[stage]
        return LayerRange(found.start, found.stop, self.layout.layers)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Own stages whose inputs are offloaded, if any are: the first stage of all has none, and the inputs
        of the last one here are needed first in the backward."""
        return tuple(number for number in self.own[:-1] if number > 0) if self.layout.offloads else ()

    @property
    def held_rounds(self) -> int:
        """Rounds whose rows are on the device at the peak: one per stage if inputs are kept there."""
        return OFFLOADED_ROUNDS if self.layout.offloads else len(self.own)

    @property
    def held_microbatches(self) -> int:
        """Number of microbatches whose rows are on the device at the peak besides `held_rounds`."""
        return OFFLOADED_MICROBATCHES if self.layout.offloads else 0
