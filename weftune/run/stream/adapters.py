"""Adapters that live in host memory and travel with their stage.

On the device a job has, for every place that a stage can be in, room for that stage's part of its weights and
of its gradient. Weights are copied in with the stage; the gradient is copied out with the stage or when a
Step needs it. Master weights and moments are copied in only for their Steps (`adapter_steps.py`).

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from weftune.adapters.kind import Parameters
from weftune.adapters.vector import VectorLayout
from weftune.base.host.pinned import host_vectors
from weftune.core.shapes import layer_of
from weftune.ops.adamw import AdamState, gradient_norms, square_sums
from weftune.ops.triton.at_hand import kernels_at_hand, kernels_run
from weftune.plan.program.layout import OnWorker
from weftune.run.training.state import Training

Place = tuple[str, int]
"""A slot, a resident stage, or the sites outside all layers."""
ENDS: Place = ("ends", 0)
Pair = tuple[str, int]
"""A job, and a stage in which it has parameters."""
OUTSIDE = -1
"""Placeholder for a stage's number: sites before the first layer or after the last one, which stay on the
device."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The parameters `start` to `stop` of an adapter's flat vector, which are those of one stage."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        """Iterate over start and stop, for unpacking."""
        return iter((self.start, self.stop))


@dataclass(frozen=True, slots=True)
class TravellingAdapter:
    """One job's travelling adapter: its parts by place and stage, and its room on the device."""

    training: Training
    parts: Mapping[Place, Mapping[int, StagePart]]
    weights: Mapping[Place, Tensor]
    gradient: Mapping[Place, Tensor]

    @property
    def by_stage(self) -> dict[int, StagePart]:
        return {stage: part for parts in self.parts.values() for stage, part in parts.items()}

    def parameters(self) -> tuple[Parameters, Parameters]:
        """Return the parameters that passes read and the gradients that they add to, in the rooms of the
        stages' places."""
        return self._views(self.weights), self._views(self.gradient)

    def _views(self, rooms: Mapping[Place, Tensor]) -> dict[tuple[str, str], Tensor]:
        found, at = {}, 0
        by_start = sorted(
            ((part, rooms[place]) for place, parts in self.parts.items() for part in parts.values()),
            key=lambda pair: pair[0].start,
        )
        spans = iter(by_start)
        part, room = next(spans, (StagePart(0, 0), None))
        for parameter in self.training.layout.parameters:
            if at >= part.stop:
                part, room = next(spans)
            assert room is not None
            inside = room[at - part.start : at - part.start + parameter.size]
            found[parameter.site, parameter.name] = inside.view(parameter.shape)
            at += parameter.size
        return found


class AdapterPlaces:
    """All travelling adapters, and which stage is in which place."""

    def __init__(self, part: OnWorker, device: torch.device, dtype: torch.dtype) -> None:
        self.part = part
        self.device, self.dtype = device, dtype
        self.travellers: dict[str, TravellingAdapter] = {}
        self._made: set[Pair] = set()
        """Jobs and stages of gradients that are on the device only."""
        self._squares: dict[str, list[Tensor]] = {}
        """Maps each job to the sums of squares of the parts of its gradient that have left the device."""
        self._in: dict[Place, int] = {ENDS: OUTSIDE}
        for number in part.own:
            if part.stages[number].resident:
                self._in["stage", number] = number

    def board(self, training: Training) -> TravellingAdapter:
        """Allocate a job's room on the device, filled for the stages that are there."""
        parts: dict[Place, dict[int, StagePart]] = {}
        for stage, part in _parts(training.layout, self.part):
            parts.setdefault(self._place(stage), {})[stage] = part
        rooms = {place: max(part.size for part in held.values()) for place, held in parts.items()}
        training.state = _on_the_host(training.state, self.device)
        dtype = training.gradient.dtype
        traveller = TravellingAdapter(
            training,
            parts,
            {place: torch.zeros(n, dtype=self.dtype, device=self.device) for place, n in rooms.items()},
            {place: torch.zeros(n, dtype=dtype, device=self.device) for place, n in rooms.items()},
        )
        self.travellers[training.job] = traveller
        self._squares[training.job] = []
        self.bring_weights([training.job])
        return traveller

    def leave(self, job: str) -> None:
        self.forget([job])
        self.wait()  # for copies on streams other than the one on which its room was allocated
        del self.travellers[job], self._squares[job]

    # -- with a stage ------------------------------------------------------------------------------------

    def come(self, stage: int, unfinished: Callable[[str, int], bool]) -> None:
        """Load a stage's adapters into its place: the weights of every job whose Steps there are finished."""
        self._in[self._place(stage)] = stage
        self.bring((job, stage) for job in self.travellers if not unfinished(job, stage))

    def measure(self, stage: int) -> None:
        """Sum the squares of gradients in the place of a stage that is about to be evicted."""
        self._measure((traveller, self._place(stage)) for traveller in self.travellers.values())

    def go(self, stage: int) -> None:
        """Evict a stage's adapters from its place, with the gradients that were computed there."""
        self.send(stage)
        del self._in[self._place(stage)]

    def send(self, stage: int) -> None:
        """Copy to the host only the gradients of a stage."""
        assert self.there(stage), f"stage {stage} is not in its place"
        place = self._place(stage)
        self._take((traveller, place) for traveller in self.travellers.values())

    def note_backward(self, stage: int, jobs: Iterable[str]) -> None:
        """Note that gradients of these jobs were added to in the place of that stage."""
        for job in jobs:
            self._made.add((job, stage))
            if stage in (0, len(self.part.stages) - 1):
                self._made.add((job, OUTSIDE))

    def there(self, stage: int) -> bool:
        """Return whether the stage is in its place, or will be once the device has finished the work launched
        so far."""
        return self._in.get(self._place(stage)) == stage

    # -- for a Step --------------------------------------------------------------------------------------

    def take_gradients(self, jobs: Iterable[str]) -> None:
        """Copy the gradients in all places to the host."""
        places = [(self.travellers[job], place) for job in jobs for place in self._in]
        self._measure(places)
        self._take(places)

    def gradient_norms(self, jobs: Sequence[str]) -> Tensor:
        """Return the norms of gradients that are all on the host, in float64 [J]. If kernels are available,
        the device has summed the squares before they were copied."""
        states = [self.travellers[job].training.state for job in jobs]
        if not kernels_run(self.device, states[0].gradient.dtype):
            self.wait()
            return gradient_norms(states)
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        squares = [torch.stack([none, *self._squares[job]]).sum() for job in jobs]
        for job in jobs:
            self._squares[job] = []
        return torch.stack(squares).sqrt()

    def room(self, job: str, stage: int) -> Tensor | None:
        """Return the room for the job's weights of a stage on the device, or None while the stage is not
        there."""
        if not self.there(stage):
            return None
        traveller, place = self.travellers[job], self._place(stage)
        return traveller.weights[place][: traveller.parts[place][stage].size]

    def bring_weights(self, jobs: Iterable[str]) -> None:
        """Copy these jobs' weights to every place that holds a stage."""
        self.bring((job, stage) for job in jobs for stage in self._in.values())

    def bring(self, pairs: Iterable[Pair]) -> None:
        """Copy weights from the host to the places where their stages are."""
        for job, stage in pairs:
            self._bring(self.travellers[job], stage)

    def forget(self, jobs: Iterable[str]) -> None:
        """Drop unfinished gradients."""
        for job in jobs:
            for room in self.travellers[job].gradient.values():
                room.zero_()
            self._squares[job] = []
            self._made = {(other, stage) for other, stage in self._made if other != job}

    def _bring(self, traveller: TravellingAdapter, stage: int) -> None:
        place = self._place(stage)
        assert self.there(stage), f"stage {stage} is not in its place"
        if (part := traveller.parts.get(place, {}).get(stage)) is not None:
            host = traveller.training.state.weights[part.start : part.stop]
            traveller.weights[place][: part.size].copy_(host, non_blocking=True)

    def _made_in(
        self, places: Iterable[tuple[TravellingAdapter, Place]]
    ) -> list[tuple[TravellingAdapter, StagePart, Tensor]]:
        """Return the adapter, its part and its room for each of these places that has a gradient."""
        found = []
        for traveller, place in places:
            stage = self._in[place]
            part = traveller.parts.get(place, {}).get(stage)
            if part is not None and (traveller.training.job, stage) in self._made:
                found.append((traveller, part, traveller.gradient[place][: part.size]))
        return found

    def _measure(self, places: Iterable[tuple[TravellingAdapter, Place]]) -> None:
        made = self._made_in(places)
        if made and kernels_at_hand(made[0][2]):
            squares_J = square_sums([room for _, _, room in made])
            for (traveller, _, _), squares in zip(made, squares_J, strict=True):
                self._squares[traveller.training.job].append(squares)

    def _take(self, places: Iterable[tuple[TravellingAdapter, Place]]) -> None:
        """Copy gradients to the host. A stage has one backward per round, so this is the whole gradient."""
        places = list(places)
        for traveller, part, room in self._made_in(places):
            traveller.training.gradient[part.start : part.stop].copy_(room, non_blocking=True)
            room.zero_()
        self._made -= {(traveller.training.job, self._in[place]) for traveller, place in places}

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _place(self, stage: int) -> Place:
        if stage == OUTSIDE:
            return ENDS
        return ("stage", stage) if self.part.stages[stage].resident else ("slot", self.part.slot(stage))


def _on_the_host(state: AdamState, device: torch.device) -> AdamState:
    """Return a copy in page-locked host memory, which the device reads and writes directly."""
    vectors = [getattr(state, one.name) for one in fields(state)]
    found = host_vectors([(len(vector), vector.dtype) for vector in vectors], device)
    return AdamState(*(here.copy_(vector) for here, vector in zip(found, vectors, strict=True)))


def _parts(layout: VectorLayout, part: OnWorker) -> Iterator[tuple[int, StagePart]]:
    """Iterate over stages and their parts of the flat vector, which holds the sites in the order of
    layers."""
    homes = [stage for stage, held in enumerate(part.stages) for _ in range(held.start, held.stop)]
    found: dict[int, StagePart] = {}
    at = 0
    for parameter in layout.parameters:
        layer = layer_of(parameter.site)
        stage = OUTSIDE if layer is None else homes[layer]
        so_far = found.get(stage, StagePart(at, at))
        assert so_far.stop == at, f"{parameter.site} lies apart from its stage"
        found[stage] = StagePart(so_far.start, at + parameter.size)
        at += parameter.size
    return iter(found.items())
