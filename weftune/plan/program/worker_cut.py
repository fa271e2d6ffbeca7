"""How a base is streamed over several ranks: rank j mod N has stage j, and keeps it or has it come."""

from __future__ import annotations

from dataclasses import dataclass

from weftune.plan.program.stream_cut import StreamCut, StreamStage


@dataclass(frozen=True, slots=True)
class RankCut(StreamCut):
    """What one rank has of it. Stages keep their numbers; `slots` are those of its own device."""

    rank: int = 0
    ranks: int = 1

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(range(self.rank, len(self.stages), self.ranks))

    @property
    def streamed(self) -> tuple[int, ...]:
        """Of its own stages those that come and go."""
        return tuple(number for number in self.own if not self.stages[number].resident)


@dataclass(frozen=True, slots=True)
class RanksCut:
    """Adapters and the inputs of stages stay on the device of their rank."""

    stages: tuple[StreamStage, ...]
    slots: tuple[int, ...]
    """For each rank."""

    def __post_init__(self) -> None:
        assert self.ranks <= len(self.stages), "every rank has a stage"

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def homes(self) -> tuple[int, ...]:
        """For each stage its rank."""
        return tuple(stage % self.ranks for stage in range(len(self.stages)))

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    def of(self, rank: int) -> RankCut:
        return RankCut(self.stages, self.slots[rank], rank=rank, ranks=self.ranks)
