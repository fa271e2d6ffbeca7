"""How a base lies on devices: its stages, their workers, which stay there, and where the others take turns.

Stage j belongs to worker j mod N. A stage that does not stay is streamed: its weights wait in host memory and
come to a slot of its worker's device when their turn has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.core.shapes import LayerRange


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Consecutive layers that live and move together."""

    start: int
    stop: int
    resident: bool = False
    """True if its weights stay on the device."""

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class HeldInputs:
    """Rows on the device at the peak: what stages were given, and the gradients that go back."""

    rounds: int
    """Whole rounds of rows."""
    microbatches: int


def held_inputs(stages: int, offloads: bool) -> HeldInputs:
    """Kept, one round for every stage. Offloaded, what a visit goes through: in a backward the inputs of the
    stage at work and, in their place, those of the stage before as they come back, and the gradients; of
    either one microbatch more than a round, since one comes before another goes. A forward holds less."""
    return HeldInputs(2, 2) if offloads else HeldInputs(stages, 0)


BUFFERED = 2
"""Microbatches of rows through which captured passes are given hidden states and gradients, and give them."""
RUNGS = 16
"""Where passes are captured, a microbatch is padded to one of so many sizes between two powers of two."""


def padded_rows(tokens: int, captured: bool) -> int:
    """What a round of so many tokens takes at the most, but for the smallest microbatches."""
    return tokens + tokens // RUNGS if captured else tokens


def offloaded_inputs(stages: int) -> int:
    """Stages whose input can wait in host memory: the first has none, the last turns round at once."""
    return max(0, stages - 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a base lies on the devices of its workers."""

    stages: tuple[StageLayers, ...]
    slots: tuple[int, ...] = (0,)
    """For each worker the places on its device, as large as its largest streamed stage."""
    travels: bool = False
    """Whether adapters live in host memory, too, and come and go with their stage."""
    offloaded_rows: int = 0
    """Rows of a round for whose inputs host memory is reserved; 0: inputs stay on the device."""
    replicas: int = 1
    """Copies of all stages, each on workers of its own."""
    optimizer_offloaded: bool = False
    """Whether master weights and moments live in host memory and come to the device for Steps only, while
    what passes read of adapters and their gradients stay there."""
    pipelined: bool = False
    """Whether every worker has one stage, which stays, and keeps what its forward made for the backward.
    Where stages take turns, a forward is recomputed from its input, whether they stay or not."""

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
        """Of one replica."""
        return len(self.slots)

    @property
    def homes(self) -> tuple[int, ...]:
        """For each stage its worker, in the first replica."""
        return tuple(stage % self.workers for stage in range(len(self.stages)))

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    @property
    def job_groups(self) -> int:
        """Groups of jobs that take turns in a round: Steps from host memory are hidden behind passes of
        others."""
        return 2 if self.optimizer_offloaded else 1

    @property
    def offloads(self) -> bool:
        """Whether what stages are given waits in host memory for the way back."""
        return self.offloaded_rows > 0

    def on(self, worker: int) -> OnWorker:
        return OnWorker(self, worker)


def one_device(layers: int = 1, optimizer_offloaded: bool = False) -> Layout:
    """All of a base as one stage that stays on one device."""
    return Layout((StageLayers(0, layers, resident=True),), optimizer_offloaded=optimizer_offloaded)


def in_stages(layers: Sequence[LayerRange], replicas: int = 1) -> Layout:
    """A pipeline: one stage that stays on each worker."""
    stages = tuple(StageLayers(one.start, one.stop, resident=True) for one in layers)
    return Layout(stages, (0,) * len(stages), replicas=replicas, pipelined=True)


@dataclass(frozen=True, slots=True)
class OnWorker:
    """What one worker has of a layout. Stages keep their numbers."""

    layout: Layout
    worker: int = 0

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        """All of the base, whoever has them."""
        return self.layout.stages

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(range(self.worker, len(self.stages), self.layout.workers))

    @property
    def slots(self) -> int:
        return self.layout.slots[self.worker]

    @property
    def streamed(self) -> tuple[int, ...]:
        """Of its own stages those that come and go."""
        return tuple(number for number in self.own if not self.stages[number].resident)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The streamed stages that lie in the slots between two windows: the first ones, needed next."""
        return self.streamed[: self.slots]

    def slot(self, stage: int) -> int:
        """Always the same for a stage, so that its weights have one address; neighbours never share it."""
        return self.streamed.index(stage) % self.slots

    def held(self, stage: int) -> LayerRange:
        found = self.stages[stage]
        return LayerRange(found.start, found.stop, self.layout.layers)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Of its own stages those whose inputs wait in host memory, if any do: the first stage of all has
        none, and those of the last one here are wanted first on the way back."""
        return tuple(number for number in self.own[:-1] if number > 0) if self.layout.offloads else ()

    @property
    def held_inputs(self) -> HeldInputs:
        return held_inputs(len(self.own), self.layout.offloads)
