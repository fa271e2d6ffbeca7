"""Adapters that live in host memory and travel with their stage.

On the device a job has, for every place that a stage can be in, room for the stage's part of its weights and
of its gradient. The weights come with the stage, the gradient leaves when the stage does or a Step wants it;
masters and moments never leave the host, where the Steps are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.adapters.kind import Parameters
from weft.adapters.layout import Layout
from weft.base.host import host_vectors
from weft.plan.stream_cut import StreamCut
from weft.run.training import Training
from weft.shapes import layer_of

Place = tuple[str, int]
"""A slot, a resident stage, or what is outside all layers."""
ENDS: Place = ("ends", 0)
Pair = tuple[str, int]
"""A job, and a stage in which it has parameters."""
OUTSIDE = -1
"""In the place of a stage's number: sites before the first layer or behind the last, which stay."""


@dataclass(frozen=True, slots=True)
class Part:
    """The parameters `start` to `stop` of an adapter's flat vector, which are those of one stage."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Traveller:
    """One job: its parts by place and stage, and its room on the device."""

    training: Training
    parts: Mapping[Place, Mapping[int, Part]]
    weights: Mapping[Place, Tensor]
    gradient: Mapping[Place, Tensor]

    @property
    def by_stage(self) -> dict[int, Part]:
        return {stage: part for parts in self.parts.values() for stage, part in parts.items()}

    def parameters(self) -> tuple[Parameters, Parameters]:
        """What passes read and what they add to, in the rooms of the places that the stages come to."""
        return self._views(self.weights), self._views(self.gradient)

    def _views(self, rooms: Mapping[Place, Tensor]) -> dict[tuple[str, str], Tensor]:
        found, at = {}, 0
        by_start = sorted(
            ((part, rooms[place]) for place, parts in self.parts.items() for part in parts.values()),
            key=lambda pair: pair[0].start,
        )
        spans = iter(by_start)
        part, room = next(spans, (Part(0, 0), None))
        for parameter in self.training.layout.parameters:
            if at >= part.stop:
                part, room = next(spans)
            assert room is not None
            inside = room[at - part.start : at - part.start + parameter.size]
            found[parameter.site, parameter.name] = inside.view(parameter.shape)
            at += parameter.size
        return found


class Travel:
    """All travellers, and which stage is in which place."""

    def __init__(self, cut: StreamCut, device: torch.device, dtype: torch.dtype) -> None:
        self.cut = cut
        self.device, self.dtype = device, dtype
        self.travellers: dict[str, Traveller] = {}
        self._made: set[Pair] = set()
        """Whose gradient of which stage is on the device only."""
        self._old: set[Pair] = set()
        """Whose weights of which stage were stepped since they last came to the device."""
        self._in: dict[Place, int] = {ENDS: OUTSIDE}
        for number, stage in enumerate(cut.stages):
            if stage.resident:
                self._in["stage", number] = number

    def board(self, training: Training) -> Traveller:
        """Room on the device for a job, filled for the stages that are there."""
        parts: dict[Place, dict[int, Part]] = {}
        for stage, part in _parts(training.layout, self.cut):
            parts.setdefault(self._place(stage), {})[stage] = part
        rooms = {place: max(part.size for part in held.values()) for place, held in parts.items()}
        state = training.state
        weights, gradient = host_vectors(
            [(training.layout.size, self.dtype), (training.layout.size, state.gradient.dtype)], self.device
        )
        weights.copy_(state.weights)
        training.state = replace(state, weights=weights, gradient=gradient)
        traveller = Traveller(
            training,
            parts,
            {place: torch.zeros(n, dtype=self.dtype, device=self.device) for place, n in rooms.items()},
            {place: torch.zeros(n, dtype=gradient.dtype, device=self.device) for place, n in rooms.items()},
        )
        self.travellers[training.job] = traveller
        self.bring_weights([training.job])
        return traveller

    def leave(self, job: str) -> None:
        self.forget([job])
        self._old = {pair for pair in self._old if pair[0] != job}
        self.wait()  # for copies on other streams than the one that its room was taken on
        del self.travellers[job]

    # -- with a stage ------------------------------------------------------------------------------------

    def come(self, stage: int, unfinished: Callable[[str, int], bool]) -> None:
        """A stage comes to its place: so do the weights there of everybody for whom they are finished."""
        self._in[self._place(stage)] = stage
        self.bring((job, stage) for job in self.travellers if not unfinished(job, stage))

    def go(self, stage: int) -> None:
        """A stage leaves its place: so do the gradients that were made there."""
        place = self._place(stage)
        for traveller in self.travellers.values():
            self._take(traveller, place)
        del self._in[place]

    def note_backward(self, stage: int, jobs: Iterable[str]) -> None:
        """Gradients of these jobs were added to in the place of that stage."""
        for job in jobs:
            self._made.add((job, stage))
            if stage in (0, len(self.cut.stages) - 1):
                self._made.add((job, OUTSIDE))

    # -- for a Step --------------------------------------------------------------------------------------

    def take_gradients(self, jobs: Iterable[str]) -> None:
        """Send what the places hold to the host."""
        for job in jobs:
            for place in list(self._in):
                self._take(self.travellers[job], place)

    def note_steps(self, jobs: Iterable[str]) -> None:
        """These jobs' weights are about to change."""
        self._old |= {(job, stage) for job in jobs for stage in self.travellers[job].by_stage}

    def old(self, stage: int, jobs: Iterable[str]) -> list[Pair]:
        """What a pass of these jobs over a stage would find there from before their last Step."""
        stages = (stage, OUTSIDE) if stage in (0, len(self.cut.stages) - 1) else (stage,)
        return sorted(self._old & {(job, one) for job in jobs for one in stages})

    def bring_weights(self, jobs: Iterable[str]) -> None:
        """To every place that holds a stage."""
        self.bring((job, stage) for job in jobs for stage in self._in.values())

    def bring(self, pairs: Iterable[Pair]) -> None:
        """Weights, from the host to the places where their stages are."""
        for job, stage in pairs:
            self._bring(self.travellers[job], stage)
            self._old.discard((job, stage))

    def forget(self, jobs: Iterable[str]) -> None:
        """Drop gradients in the making."""
        for job in jobs:
            for room in self.travellers[job].gradient.values():
                room.zero_()
            self._made = {(other, stage) for other, stage in self._made if other != job}

    def _bring(self, traveller: Traveller, stage: int) -> None:
        place = self._place(stage)
        assert self._in.get(place) == stage, f"stage {stage} is not in its place"
        if (part := traveller.parts.get(place, {}).get(stage)) is not None:
            host = traveller.training.state.weights[part.start : part.stop]
            traveller.weights[place][: part.size].copy_(host, non_blocking=True)

    def _take(self, traveller: Traveller, place: Place) -> None:
        """A stage is gone back through once a round, so that what leaves is all there is."""
        stage = self._in[place]
        part = traveller.parts.get(place, {}).get(stage)
        if part is not None and (traveller.training.job, stage) in self._made:
            self._made.remove((traveller.training.job, stage))
            room = traveller.gradient[place][: part.size]
            traveller.training.gradient[part.start : part.stop].copy_(room, non_blocking=True)
            room.zero_()

    def wait(self) -> None:
        """Until the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _place(self, stage: int) -> Place:
        if stage == OUTSIDE:
            return ENDS
        return ("stage", stage) if self.cut.stages[stage].resident else ("slot", self.cut.slot(stage))


def _parts(layout: Layout, cut: StreamCut) -> Iterator[tuple[int, Part]]:
    """Stage → its part; a flat vector holds the sites in the order of the layers."""
    homes = [stage for stage, held in enumerate(cut.stages) for _ in range(held.start, held.stop)]
    found: dict[int, Part] = {}
    at = 0
    for parameter in layout.parameters:
        layer = layer_of(parameter.site)
        stage = OUTSIDE if layer is None else homes[layer]
        part = found.get(stage, Part(at, at))
        assert part.stop == at, f"{parameter.site} lies apart from its stage"
        found[stage] = Part(part.start, at + parameter.size)
        at += parameter.size
    return iter(found.items())
