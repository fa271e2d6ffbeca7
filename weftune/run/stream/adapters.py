"""Adapters that live in host memory and travel with their stage.

On the device a job has room for the weights and the gradient of every resident stage and of every slot.
Weights are copied in with the stage; the gradient is copied out with the stage or when a Step needs it.
Master weights and moments are copied in only for their Steps (`adapter_steps.py`).

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.adapters.kind import Parameters
from weftune.adapters.vector import VectorLayout
from weftune.base.host.pinned import host_vectors
from weftune.core.shapes import layer_of
from weftune.ops.adamw import AdamState, gradient_norms, square_sums
from weftune.ops.triton import kernels_available, kernels_available_on
from weftune.plan.program.layout import OnWorker
from weftune.run.stream.adapter_steps import Pair, StagePart
from weftune.run.training.state import Training

OUTSIDE = -1
"""Stage number of sites before the first layer or after the last one, which stay on the device."""


@dataclass(frozen=True, slots=True)
class TravellingAdapter:
    """One job's travelling adapter. Stages that take turns in a slot share their room on the device."""

    training: Training
    parts: Mapping[int, StagePart]
    """Maps each stage to its part of the flat vector."""
    weights: Mapping[int, Tensor]
    """Maps each stage to the room for its weights."""
    gradient: Mapping[int, Tensor]

    def parameters(self) -> tuple[Parameters, Parameters]:
        """Return the parameters that passes read and the gradients that they add to."""
        return self._views(self.weights), self._views(self.gradient)

    def _views(self, rooms: Mapping[int, Tensor]) -> dict[tuple[str, str], Tensor]:
        found, at = {}, 0
        spans = iter(sorted(self.parts.items(), key=lambda one: one[1].start))
        stage, part = OUTSIDE, StagePart(0, 0)
        for parameter in self.training.layout.parameters:
            if at >= part.stop:
                stage, part = next(spans)
            inside = rooms[stage][at - part.start : at - part.start + parameter.size]
            found[parameter.site, parameter.name] = inside.view(parameter.shape)
            at += parameter.size
        return found


class AdapterPlaces:
    """All travelling adapters, and the stages that are on the device."""

    def __init__(self, part: OnWorker, device: torch.device, dtype: torch.dtype) -> None:
        self.part = part
        self.device, self.dtype = device, dtype
        self.travellers: dict[str, TravellingAdapter] = {}
        self._made: set[Pair] = set()
        """Jobs and stages of gradients that are on the device only."""
        self._squares: dict[str, list[Tensor]] = {}
        """Maps each job to the sums of squares of the parts of its gradient that have left the device."""
        self._there: dict[int, None] = {OUTSIDE: None}
        """Stages that are there, or will be after the work launched so far, in the order of their arrival."""
        self._there |= dict.fromkeys(stage for stage in part.own if part.stages[stage].resident)

    def board(self, training: Training) -> TravellingAdapter:
        """Allocate a job's room on the device, filled for the stages that are there."""
        # In page-locked host memory, which the device reads and writes directly.
        vectors = training.state.vectors
        found = host_vectors([(len(vector), vector.dtype) for vector in vectors], self.device)
        training.state = AdamState(*(to.copy_(vector) for to, vector in zip(found, vectors, strict=True)))
        parts = dict(_parts(training.layout, self.part))
        weights = self._rooms(parts, self.dtype)
        gradient = self._rooms(parts, training.gradient.dtype)
        traveller = TravellingAdapter(training, parts, weights, gradient)
        self.travellers[training.job] = traveller
        self._squares[training.job] = []
        self.bring_weights([training.job])
        return traveller

    def _rooms(self, parts: Mapping[int, StagePart], dtype: torch.dtype) -> dict[int, Tensor]:
        """Return room for each stage's part; stages that take turns in a slot share theirs."""
        shared: dict[tuple[str, int], list[int]] = {}
        for stage in parts:
            resident = stage == OUTSIDE or self.part.stages[stage].resident
            place = ("stage", stage) if resident else ("slot", self.part.slot(stage))
            shared.setdefault(place, []).append(stage)
        found = {}
        for stages in shared.values():
            size = max(parts[stage].size for stage in stages)
            room = torch.zeros(size, dtype=dtype, device=self.device)
            found.update({stage: room[: parts[stage].size] for stage in stages})
        return found

    def leave(self, job: str) -> None:
        self.forget([job])
        self.wait()  # for copies on streams other than the one on which its room was allocated
        del self.travellers[job], self._squares[job]

    # -- with a stage ------------------------------------------------------------------------------------

    def come(self, stage: int, unfinished: Callable[[str, int], bool]) -> None:
        """Load a stage's adapters: the weights of every job whose Steps there are finished."""
        self._there[stage] = None
        self.bring((job, stage) for job in self.travellers if not unfinished(job, stage))

    def measure(self, stage: int) -> None:
        """Sum the squares of gradients of a stage that is about to be evicted."""
        self._measure((job, stage) for job in self.travellers)

    def go(self, stage: int) -> None:
        """Evict a stage's adapters, with the gradients that were computed there."""
        self.send(stage)
        del self._there[stage]

    def send(self, stage: int) -> None:
        """Copy to the host only the gradients of a stage."""
        assert self.there(stage), f"stage {stage} is not in its place"
        self._take((job, stage) for job in self.travellers)

    def note_backward(self, stage: int, jobs: Iterable[str]) -> None:
        """Note that gradients of these jobs were added to in that stage."""
        self._made.update(self.pairs(stage, jobs))

    def pairs(self, stage: int, jobs: Iterable[str]) -> list[Pair]:
        """Return the parts that passes of these jobs over the stage read; at the first and last stage also
        those outside all layers."""
        stages = (stage, OUTSIDE) if stage in (0, len(self.part.stages) - 1) else (stage,)
        return [(job, one) for job in jobs for one in stages]

    def there(self, stage: int) -> bool:
        """Return whether the stage is on the device, or will be after the work launched so far."""
        return stage in self._there

    # -- for a Step --------------------------------------------------------------------------------------

    def take_gradients(self, jobs: Iterable[str]) -> None:
        """Copy the gradients of all stages that are there to the host."""
        pairs = [(job, stage) for job in jobs for stage in self._there]
        self._measure(pairs)
        self._take(pairs)

    def gradient_norms(self, jobs: Sequence[str]) -> Tensor:
        """Return the norms of gradients that are all on the host, in float64 [J]. If kernels are available,
        the device has summed the squares before they were copied."""
        states = [self.travellers[job].training.state for job in jobs]
        if not kernels_available_on(self.device, states[0].gradient.dtype):
            self.wait()
            return gradient_norms(states)
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        squares = [torch.stack([none, *self._squares[job]]).sum() for job in jobs]
        for job in jobs:
            self._squares[job] = []
        return torch.stack(squares).sqrt()

    def room(self, job: str, stage: int) -> Tensor | None:
        """Return the device's room for the job's weights of a stage, or None while it is not there."""
        return self.travellers[job].weights[stage] if self.there(stage) else None

    def bring_weights(self, jobs: Iterable[str]) -> None:
        """Copy these jobs' weights to every stage that is there."""
        self.bring((job, stage) for job in jobs for stage in self._there)

    def bring(self, pairs: Iterable[Pair]) -> None:
        """Copy weights from the host to stages that are there."""
        for job, stage in pairs:
            traveller = self.travellers[job]
            assert self.there(stage), f"stage {stage} is not in its place"
            if (part := traveller.parts.get(stage)) is not None:
                host = traveller.training.state.weights[part.start : part.stop]
                traveller.weights[stage].copy_(host, non_blocking=True)

    def forget(self, jobs: Iterable[str]) -> None:
        """Drop unfinished gradients."""
        for job in jobs:
            for room in self.travellers[job].gradient.values():
                room.zero_()
            self._squares[job] = []
            self._made = {(other, stage) for other, stage in self._made if other != job}

    def _made_in(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return those of the pairs that have a gradient on the device."""
        return [pair for pair in pairs if pair in self._made and pair[1] in self.travellers[pair[0]].parts]

    def _measure(self, pairs: Iterable[Pair]) -> None:
        made = self._made_in(pairs)
        rooms = [self.travellers[job].gradient[stage] for job, stage in made]
        if rooms and kernels_available(rooms[0]):
            for (job, _), squares in zip(made, square_sums(rooms), strict=True):
                self._squares[job].append(squares)

    def _take(self, pairs: Iterable[Pair]) -> None:
        """Copy gradients to the host. A stage has one backward per round, so this is the whole gradient."""
        pairs = list(pairs)
        for job, stage in self._made_in(pairs):
            traveller = self.travellers[job]
            part, room = traveller.parts[stage], traveller.gradient[stage]
            traveller.training.gradient[part.start : part.stop].copy_(room, non_blocking=True)
            room.zero_()
        self._made.difference_update(pairs)

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _parts(layout: VectorLayout, part: OnWorker) -> Iterator[tuple[int, StagePart]]:
    """Iterate over stages and their parts of the flat vector, whose sites are in the order of layers."""
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
