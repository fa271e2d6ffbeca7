"""Partitions for streaming that are decided only up to some layer, and lower bounds on their cost.

Times follow the recurrence of `mobius_step`: forward from the first stage on; backward as tails (the longest
path from a stage's start to the end of the step), which also grow from the first stage on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from weftune.plan.cost.layers import LayerCost, StageCost
from weftune.plan.layout.mobius_step import Host, passing_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartialPlacement:
    """A decided stage. Its times are lower bounds, since undecided stages can only take memory."""

    stage: StageCost
    resident: bool
    first: float
    last: float
    """Start times of the forward of the first and the last microbatch."""
    first_tail: float
    last_tail: float
    """Seconds from the start of the first and the last microbatch's backward to the end of the step."""


@dataclass(frozen=True, slots=True)
class Prefix:
    cuts: tuple[int, ...]
    resident: tuple[bool, ...]
    recent: tuple[PartialPlacement | None, ...]
    """Latest stage on each GPU."""
    fixed: tuple[int, ...]
    """Bytes that each GPU holds all the time."""
    passing: tuple[int, ...]
    """Largest number of bytes that each GPU needs in addition."""
    seconds: float
    """Lower bound on the seconds of any partition that begins with this prefix."""

    @property
    def layers(self) -> int:
        return self.cuts[-1]


@dataclass(frozen=True, slots=True)
class Rest:
    """Totals over all layers from a given one on."""

    forward: float
    backward: float
    weight_bytes: int


class Bounds:
    def __init__(self, layers: Sequence[LayerCost], host: Host, microbatches: int) -> None:
        self.host = host
        self.microbatches = microbatches
        self.rests = [Rest(0.0, 0.0, 0)]
        for layer in reversed(layers):
            after = self.rests[-1]
            self.rests.append(
                Rest(
                    layer.forward + after.forward,
                    layer.backward + after.backward,
                    layer.weight_bytes + after.weight_bytes,
                )
            )
        self.rests.reverse()

    def nothing(self) -> Prefix:
        zeros, recent = (0,) * self.host.gpus, (None,) * self.host.gpus
        return Prefix((0,), (), recent, zeros, zeros, self._least_seconds(self.rests[0], recent, zeros, None))

    def extend(self, prefix: Prefix, stage: StageCost, resident: bool) -> Prefix | None:
        """Return the prefix with one more stage, or None if that does not fit."""
        number = len(prefix.resident)
        gpu = number % self.host.gpus
        held = self.host.stage_bytes + stage.state_bytes + (stage.weight_bytes if resident else 0)
        fixed = _replaced(prefix.fixed, gpu, prefix.fixed[gpu] + held)
        passing = _replaced(prefix.passing, gpu, max(prefix.passing[gpu], passing_bytes(stage, resident)))
        room = self.host.memory_bytes - fixed[gpu]
        if passing[gpu] > room:
            return None
        before = prefix.recent[(number - 1) % self.host.gpus]
        placement = self._placement(stage, resident, before, prefix.recent[gpu], room)
        recent = _replaced(prefix.recent, gpu, placement)
        seconds = self._least_seconds(self.rests[stage.stop], recent, fixed, placement)
        cuts, bits = (*prefix.cuts, stage.stop), (*prefix.resident, resident)
        return Prefix(cuts, bits, recent, fixed, passing, seconds)

    def _placement(
        self,
        stage: StageCost,
        resident: bool,
        before: PartialPlacement | None,
        above: PartialPlacement | None,
        room: int,
    ) -> PartialPlacement:
        """Return the placement of a stage. `before` is the stage before it, `above` the one before it on its
        GPU."""
        bandwidth, more = self.host.bandwidth, self.microbatches - 1
        first = last = 0.0
        last_tail = stage.backward
        first_tail = 0.0
        if before:
            alone = self.host.gpus == 1
            arrival = before.stage.forward + (0 if alone else before.stage.activation_bytes / bandwidth)
            first, last = before.first + arrival, before.last + arrival
            hop = stage.backward + (0 if alone else stage.gradient_bytes / bandwidth)
            last_tail, first_tail = hop + before.last_tail, hop + before.first_tail
        if above:
            weights = 0 if resident else stage.weight_bytes
            late = max(0, weights - room + passing_bytes(above.stage, above.resident))
            freed = above.last + above.stage.forward
            first = max(first, freed + late / bandwidth, above.first + weights / bandwidth)
            again = 0 if above.resident else above.stage.weight_bytes
            late = max(0, again - room + passing_bytes(stage, resident))
            last_tail = max(last_tail, stage.backward + late / bandwidth + above.first_tail)
            first_tail = max(first_tail, again / bandwidth + above.first_tail)
        last = max(last, first + more * stage.forward)
        first_tail = max(first_tail, more * stage.backward + last_tail)
        return PartialPlacement(stage, resident, first, last, first_tail, last_tail)

    def _least_seconds(
        self,
        rest: Rest,
        recent: Sequence[PartialPlacement | None],
        fixed: Sequence[int],
        newest: PartialPlacement | None,
    ) -> float:
        """Return a lower bound from three bounds per direction: the GPUs' work, the links' bytes, and the
        path of one microbatch."""
        gpus, work = self.host.gpus, self.microbatches
        placed = [one for one in recent if one]
        freed = sum(one.last + one.stage.forward for one in placed)
        begun = sum(one.first for one in placed)
        tails = sum(one.first_tail for one in placed)
        # A GPU's resident stages and the one it need not load again lie in its memory together.
        rooms = gpus * self.host.memory_bytes - sum(fixed)
        moved = max(0, rest.weight_bytes - rooms) / self.host.bandwidth
        forward = max(freed + work * rest.forward, begun + moved) / gpus
        backward = (tails + max(work * rest.backward, moved)) / gpus
        if newest:
            forward = max(forward, newest.last + newest.stage.forward + rest.forward)
            backward = max(backward, rest.backward + newest.first_tail)
        else:
            forward, backward = max(forward, rest.forward), max(backward, rest.backward)
        return forward + backward


def _replaced(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
