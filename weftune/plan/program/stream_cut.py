"""How a base is streamed on one device: its stages, which of them stay, and where the others take turns."""

from __future__ import annotations

from dataclasses import dataclass

from weftune.core.shapes import LayerRange


@dataclass(frozen=True, slots=True)
class StreamStage:
    start: int
    stop: int
    resident: bool = False
    """True if its weights stay on the GPU from step to step."""


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
class StreamCut:
    stages: tuple[StreamStage, ...]
    slots: int
    """Places on the device, as large as the largest streamed stage; streamed stages take them in turn."""
    travels: bool = False
    """Whether adapters live in host memory, too, and come and go with their stage."""
    offloaded_rows: int = 0
    """Rows of a round for whose inputs host memory is reserved; 0: inputs stay on the device."""

    def __post_init__(self) -> None:
        assert self.slots >= 1 or not self.streamed, "a streamed stage needs a place to come to"

    @property
    def offloads(self) -> bool:
        """Whether what stages are given waits in host memory for the way back."""
        return self.offloaded_rows > 0

    @property
    def held_inputs(self) -> HeldInputs:
        return held_inputs(len(self.stages), self.offloads)

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    @property
    def streamed(self) -> tuple[int, ...]:
        """The stages that come and go."""
        return tuple(number for number, stage in enumerate(self.stages) if not stage.resident)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The streamed stages that lie in the slots between two windows: the first ones, needed next."""
        return self.streamed[: self.slots]

    def slot(self, stage: int) -> int:
        """Always the same for a stage, so that its weights have one address; neighbours never share it."""
        return self.streamed.index(stage) % self.slots

    def held(self, stage: int) -> LayerRange:
        found = self.stages[stage]
        return LayerRange(found.start, found.stop, self.layers)
