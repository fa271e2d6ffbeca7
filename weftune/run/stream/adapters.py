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
from weftune.plan.program.layout import WorkerLayout
from weftune.run.stream.adapter_steps import JobStage, StagePart
from weftune.run.training.state import Training

OUTSIDE_STAGE = -1
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

    def _views(self, vectors: Mapping[int, Tensor]) -> dict[tuple[str, str], Tensor]:
        found, at = {}, 0
        spans = iter(sorted(self.parts.items(), key=lambda one: one[1].start))
        stage, part = OUTSIDE_STAGE, StagePart(0, 0)
        for parameter in self.training.layout.parameters:
            if at >= part.stop:
                stage, part = next(spans)
            inside = vectors[stage][at - part.start : at - part.start + parameter.size]
            found[parameter.site, parameter.name] = inside.view(parameter.shape)
            at += parameter.size
        return found


class AdapterTransfers:
    """All travelling adapters, and the stages that are on the device."""

    def __init__(self, part: WorkerLayout, device: torch.device, dtype: torch.dtype) -> None:
        self.part = part
        self.device, self.dtype = device, dtype
        self.adapters: dict[str, TravellingAdapter] = {}
        self._device_gradients: set[JobStage] = set()
        """Jobs and stages of gradients that are on the device only."""
        self._squares: dict[str, list[Tensor]] = {}
        """Maps each job to the sums of squares of the parts of its gradient that have left the device."""
        self._loaded_stages: dict[int, None] = {OUTSIDE_STAGE: None}
        """Stages that are there, or will be after the work launched so far, in the order of their arrival."""
        self._loaded_stages |= dict.fromkeys(
            stage for stage in part.own_stages if part.stages[stage].is_resident
        )

    def attach(self, training: Training) -> TravellingAdapter:
        """Allocate a job's room on the device, filled for the stages that are there."""
        # In page-locked host memory, which the device reads and writes directly.
        vectors = training.state.vectors
        found = host_vectors([(len(vector), vector.dtype) for vector in vectors], self.device)
        training.state = AdamState(*(to.copy_(vector) for to, vector in zip(found, vectors, strict=True)))
        parts = dict(_stage_parts(training.layout, self.part))
        weights = self._allocate(parts, self.dtype)
        gradient = self._allocate(parts, training.gradient.dtype)
        adapter = TravellingAdapter(training, parts, weights, gradient)
        self.adapters[training.job] = adapter
        self._squares[training.job] = []
        self.copy_weights_in([training.job])
        return adapter

    def _allocate(self, parts: Mapping[int, StagePart], dtype: torch.dtype) -> dict[int, Tensor]:
        """Return room for each stage's part; stages that take turns in a slot share theirs."""
        shared: dict[tuple[str, int], list[int]] = {}
        for stage in parts:
            resident = stage == OUTSIDE_STAGE or self.part.stages[stage].is_resident
            slot = ("stage", stage) if resident else ("slot", self.part.slot_of_stage(stage))
            shared.setdefault(slot, []).append(stage)
        found = {}
        for stages in shared.values():
            size = max(parts[stage].size for stage in stages)
            buffer = torch.zeros(size, dtype=dtype, device=self.device)
            found.update({stage: buffer[: parts[stage].size] for stage in stages})
        return found

    def detach(self, job: str) -> None:
        self.drop_gradients([job])
        self.wait()  # for copies on streams other than the one on which its room was allocated
        del self.adapters[job], self._squares[job]

    # -- with a stage ------------------------------------------------------------------------------------

    def load_weights(self, stage: int, is_unfinished: Callable[[str, int], bool]) -> None:
        """Load a stage's adapters: the weights of every job whose Steps there are finished."""
        self._loaded_stages[stage] = None
        self.copy_parts_in((job, stage) for job in self.adapters if not is_unfinished(job, stage))

    def sum_squares(self, stage: int) -> None:
        """Sum the squares of gradients of a stage that is about to be evicted."""
        self._sum_squares((job, stage) for job in self.adapters)

    def evict(self, stage: int) -> None:
        """Evict a stage's adapters, with the gradients that were computed there."""
        self.copy_gradients_out(stage)
        del self._loaded_stages[stage]

    def copy_gradients_out(self, stage: int) -> None:
        """Copy to the host only the gradients of a stage."""
        assert self.is_loaded(stage), f"stage {stage} is not in its place"
        self._copy_gradients_out((job, stage) for job in self.adapters)

    def note_backward(self, stage: int, jobs: Iterable[str]) -> None:
        """Note that gradients of these jobs were added to in that stage."""
        self._device_gradients.update(self.pairs(stage, jobs))

    def pairs(self, stage: int, jobs: Iterable[str]) -> list[JobStage]:
        """Return the parts that passes of these jobs over the stage read; at the first and last stage also
        those outside all layers."""
        stages = (stage, OUTSIDE_STAGE) if stage in (0, len(self.part.stages) - 1) else (stage,)
        return [(job, one) for job in jobs for one in stages]

    def is_loaded(self, stage: int) -> bool:
        """Return whether the stage is on the device, or will be after the work launched so far."""
        return stage in self._loaded_stages

    # -- for a Step --------------------------------------------------------------------------------------

    def copy_all_gradients_out(self, jobs: Iterable[str]) -> None:
        """Copy the gradients of all stages that are there to the host."""
        pairs = [(job, stage) for job in jobs for stage in self._loaded_stages]
        self._sum_squares(pairs)
        self._copy_gradients_out(pairs)

    def gradient_norms(self, jobs: Sequence[str]) -> Tensor:
        """Return the norms of gradients that are all on the host, in float64 [J]. If kernels are available,
        the device has summed the squares before they were copied."""
        states = [self.adapters[job].training.state for job in jobs]
        if not kernels_available_on(self.device, states[0].gradient.dtype):
            self.wait()
            return gradient_norms(states)
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        squares = [torch.stack([none, *self._squares[job]]).sum() for job in jobs]
        for job in jobs:
            self._squares[job] = []
        return torch.stack(squares).sqrt()

    def device_weights(self, job: str, stage: int) -> Tensor | None:
        """Return the device's room for the job's weights of a stage, or None while it is not there."""
        return self.adapters[job].weights[stage] if self.is_loaded(stage) else None

    def copy_weights_in(self, jobs: Iterable[str]) -> None:
        """Copy these jobs' weights to every stage that is there."""
        self.copy_parts_in((job, stage) for job in jobs for stage in self._loaded_stages)

    def copy_parts_in(self, pairs: Iterable[JobStage]) -> None:
        """Copy weights from the host to stages that are there."""
        for job, stage in pairs:
            adapter = self.adapters[job]
            assert self.is_loaded(stage), f"stage {stage} is not in its place"
            if (part := adapter.parts.get(stage)) is not None:
                host = adapter.training.state.weights[part.start : part.stop]
                adapter.weights[stage].copy_(host, non_blocking=True)

    def drop_gradients(self, jobs: Iterable[str]) -> None:
        """Drop unfinished gradients."""
        for job in jobs:
            for gradient in self.adapters[job].gradient.values():
                gradient.zero_()
            self._squares[job] = []
            self._device_gradients = {
                (other, stage) for other, stage in self._device_gradients if other != job
            }

    def _with_gradient(self, pairs: Iterable[JobStage]) -> list[JobStage]:
        """Return those of the pairs that have a gradient on the device."""
        return [
            pair
            for pair in pairs
            if pair in self._device_gradients and pair[1] in self.adapters[pair[0]].parts
        ]

    def _sum_squares(self, pairs: Iterable[JobStage]) -> None:
        pairs_with_gradient = self._with_gradient(pairs)
        gradients = [self.adapters[job].gradient[stage] for job, stage in pairs_with_gradient]
        if gradients and kernels_available(gradients[0]):
            for (job, _), squares in zip(pairs_with_gradient, square_sums(gradients), strict=True):
                self._squares[job].append(squares)

    def _copy_gradients_out(self, pairs: Iterable[JobStage]) -> None:
        """Copy gradients to the host. A stage has one backward per round, so this is the whole gradient."""
        pairs = list(pairs)
        for job, stage in self._with_gradient(pairs):
            adapter = self.adapters[job]
            part, gradient = adapter.parts[stage], adapter.gradient[stage]
            adapter.training.gradient[part.start : part.stop].copy_(gradient, non_blocking=True)
            gradient.zero_()
        self._device_gradients.difference_update(pairs)

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _stage_parts(layout: VectorLayout, part: WorkerLayout) -> Iterator[tuple[int, StagePart]]:
    """Iterate over stages and their parts of the flat vector, whose sites are in the order of layers."""
    homes = [stage for stage, held in enumerate(part.stages) for _ in range(held.start, held.stop)]
    found: dict[int, StagePart] = {}
    at = 0
    for parameter in layout.parameters:
        layer = layer_of(parameter.site)
        stage = OUTSIDE_STAGE if layer is None else homes[layer]
        so_far = found.get(stage, StagePart(at, at))
        assert so_far.stop == at, f"{parameter.site} lies apart from its stage"
        found[stage] = StagePart(so_far.start, at + parameter.size)
        at += parameter.size
    return iter(found.items())
