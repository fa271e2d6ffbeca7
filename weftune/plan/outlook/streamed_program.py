"""A Program for stages that are streamed from host memory: who computes, loads and gives up what, and when.

Each round passes all its microbatches through every stage in turn, then back. A stage's weights come while
the stage before it on that device computes, if there is room for both, else once that one is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from weftune.plan.cost.layers import StageCost
from weftune.plan.program.program import Action, Backward, Evict, Forward, Load, Program
from weftune.plan.window.orders import Passes, Work, assemble, rounds


@dataclass(frozen=True, slots=True)
class Streams:
    """Stages on devices: which stay, and what a device has room for beside its adapters."""

    stages: tuple[StageCost, ...]
    resident: tuple[bool, ...]
    order: tuple[int, ...]
    """Stage j lives on the device at place j mod N of it."""
    room: tuple[int, ...]
    """Bytes on each device for weights that pass through."""
    prefetch: bool = True

    @property
    def homes(self) -> tuple[int, ...]:
        return tuple(self.order[stage % len(self.order)] for stage in range(len(self.stages)))

    def together(self, device: int, one: int, other: int) -> bool:
        """Whether the weights of two stages may be there at once."""
        passing = [stage for stage in (one, other) if not self.resident[stage]]
        return (
            self.prefetch and sum(self.stages[stage].weight_bytes for stage in passing) <= self.room[device]
        )


@dataclass(frozen=True, slots=True)
class _Visit:
    """One stage in one direction, with the passes of a round."""

    stage: int
    passes: tuple[Action, ...]


def stream_program(work: Work, streams: Streams) -> Program:
    homes = streams.homes
    lists: Passes = [list(_actions(work, streams, device)) for device in range(len(streams.order))]
    return assemble(work, lists, homes)


def _actions(work: Work, streams: Streams, device: int) -> Iterator[Action]:
    """The stage that ends a round on a device begins the next one there: it is not loaded again."""
    visits = list(_visits(work, streams, device))
    for here, after in pairwise([*visits, None]):
        assert here is not None
        yield here.passes[0]
        moving = after is not None and after.stage != here.stage
        early = after is not None and moving and streams.together(device, here.stage, after.stage)
        if after is not None and early and not streams.resident[after.stage]:
            yield Load(after.stage)
        yield from here.passes[1:]
        if moving and not streams.resident[here.stage]:
            yield Evict(here.stage)
        if after is not None and moving and not early and not streams.resident[after.stage]:
            yield Load(after.stage)


def _visits(work: Work, streams: Streams, device: int) -> Iterator[_Visit]:
    own = [stage for stage, home in enumerate(streams.homes) if home == device]
    for numbers in rounds(work):
        for stage in own:
            yield _Visit(stage, tuple(Forward(number, stage) for number in numbers))
        for stage in reversed(own):
            yield _Visit(stage, tuple(Backward(number, stage) for number in numbers))
