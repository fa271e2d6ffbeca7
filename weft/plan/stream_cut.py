"""How a base is streamed on one device: its stages, which of them stay, and where the others take turns."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.stream_step import StreamStage
from weft.shapes import LayerRange


@dataclass(frozen=True, slots=True)
class StreamCut:
    stages: tuple[StreamStage, ...]
    slots: int
    """Places on the device, as large as the largest streamed stage; streamed stages take them in turn."""
    travels: bool = False
    """Whether adapters live in host memory, too, and come and go with their stage."""

    def __post_init__(self) -> None:
        assert self.slots >= 1 or not self.streamed, "a streamed stage needs a place to come to"

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
