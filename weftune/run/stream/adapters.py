"""Adapters that live in host memory and are copied to the device and back with their stage (travelling
adapters).

On the device a job has memory for the weights and the gradient of every resident stage and of every slot. A
slot is the device memory in which streamed stages take turns. Weights are copied in with the stage; the
gradient is copied out with the stage or when an optimizer step (Step) needs it. Master weights and moments
are copied in only for Steps (`adapter_steps.py`).

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
from weftune.core.shapes import layer_number
from weftune.ops.adamw import AdamState, gradient_norms, square_sums
from weftune.ops.triton import kernels_available, kernels_available_on
from weftune.plan.program.layout import WorkerLayout
from weftune.run.stream.adapter_steps import JobStage, StagePart
from weftune.run.training.state import Training

OUTSIDE_STAGE = -1
"""Stage number of the adapted modules before the first layer and after the last layer, which stay on the
device."""


@dataclass(frozen=True, slots=True)
class TravellingAdapter:
    """The device memory of an adapter whose parts are copied to the device with their stages. Stages that
    take turns in the same slot of device memory also share memory for their parts of the adapter."""

    training: Training
    parts: Mapping[int, StagePart]
    """Maps each stage to the range of the adapter's flat vector that holds the stage's parameters."""
    weights: Mapping[int, Tensor]
    """Maps each stage to the device memory for the adapter's weights in that stage."""
    gradient: Mapping[int, Tensor]

    def parameters(self) -> tuple[Parameters, Parameters]:
        """Return views of the adapter's device memory: the parameters that passes read, and the gradients to
        which passes add."""
        return self._parameter_views(self.weights), self._parameter_views(self.gradient)

    def _parameter_views(self, vectors: Mapping[int, Tensor]) -> dict[tuple[str, str], Tensor]:
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
    """The copies of adapters between host and device together with their stages, and the record of which
    stages and gradients are on the device."""

    def __init__(self, part: WorkerLayout, device: torch.device, dtype: torch.dtype) -> None:
        self.part = part
        self.device, self.dtype = device, dtype
        self.adapters: dict[str, TravellingAdapter] = {}
        self._device_gradients: set[JobStage] = set()
        """Pairs (job, stage) whose gradient is on the device and has not been copied to the host."""
        self._squares: dict[str, list[Tensor]] = {}
        """Maps each job to the sums of squares that have been computed for parts of its gradient before their
        copy to the host."""
        self._loaded_stages: dict[int, None] = {OUTSIDE_STAGE: None}
        """Stages that are on the device, or will be once all launched work is done, in the order of their
        arrival. The dict is used as an ordered set."""
        self._loaded_stages |= dict.fromkeys(
            stage for stage in part.own_stages if part.stages[stage].is_resident
        )

    def attach(self, training: Training) -> TravellingAdapter:
        """Allocate device memory for a job's adapter, and copy in its weights for the stages that are on the
        device."""
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
        """Allocate device memory for each stage's part of an adapter. Streamed stages that take turns in the
        same slot share memory."""
        stages_by_memory: dict[tuple[str, int], list[int]] = {}
        for stage in parts:
            resident = stage == OUTSIDE_STAGE or self.part.stages[stage].is_resident
            slot = ("stage", stage) if resident else ("slot", self.part.slot_of_stage(stage))
            stages_by_memory.setdefault(slot, []).append(stage)
        found = {}
        for stages in stages_by_memory.values():
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
        """Copy the adapter weights of a stage to the device, except those of jobs whose optimizer step in
        this stage is unfinished."""
        self._loaded_stages[stage] = None
        self.copy_parts_in((job, stage) for job in self.adapters if not is_unfinished(job, stage))

    def sum_squares(self, stage: int) -> None:
        """Compute the sums of squares of the gradients in a stage before they are copied to the host."""
        self._sum_squares((job, stage) for job in self.adapters)

    def evict(self, stage: int) -> None:
        """Copy the adapters' gradients in a stage to the host, and mark the stage as evicted."""
        self.copy_gradients_out(stage)
        del self._loaded_stages[stage]

    def copy_gradients_out(self, stage: int) -> None:
        """Copy the adapters' gradients in a stage to the host. The stage stays on the device."""
        assert self.is_loaded(stage), f"stage {stage} is not in its place"
        self._copy_gradients_out((job, stage) for job in self.adapters)

    def record_backward(self, stage: int, jobs: Iterable[str]) -> None:
        """Record that a backward has added to the gradients of these jobs in this stage."""
        self._device_gradients.update(self.pairs(stage, jobs))

    def pairs(self, stage: int, jobs: Iterable[str]) -> list[JobStage]:
        """Return the pairs (job, stage) whose adapter weights are read by passes of these jobs over the
        stage. At the first and the last stage they include the modules outside all layers, with the stage
        number `OUTSIDE_STAGE`."""
        stages = (stage, OUTSIDE_STAGE) if stage in (0, len(self.part.stages) - 1) else (stage,)
        return [(job, one) for job in jobs for one in stages]

    def is_loaded(self, stage: int) -> bool:
        """Return whether the stage is on the device, or will be once all work launched so far is done."""
        return stage in self._loaded_stages

    # -- for a Step --------------------------------------------------------------------------------------

    def copy_all_gradients_out(self, jobs: Iterable[str]) -> None:
        """Copy the gradients of these jobs to the host, for all stages that are on the device."""
        pairs = [(job, stage) for job in jobs for stage in self._loaded_stages]
        self._sum_squares(pairs)
        self._copy_gradients_out(pairs)

    def gradient_norms(self, jobs: Sequence[str]) -> Tensor:
        """Return the norms of the jobs' gradients, in float64 [J]. All gradients must have been copied to the
        host. If kernels are available, the norms are taken from sums of squares that the device computed
        before the copies."""
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
        """Return the device memory for the job's weights in a stage, or None if the stage is not on the
        device."""
        return self.adapters[job].weights[stage] if self.is_loaded(stage) else None

    def copy_weights_in(self, jobs: Iterable[str]) -> None:
        """Copy these jobs' weights from the host to the device, for every stage that is on the device."""
        self.copy_parts_in((job, stage) for job in jobs for stage in self._loaded_stages)

    def copy_parts_in(self, pairs: Iterable[JobStage]) -> None:
        """Copy the weights of the pairs (job, stage) from the host to the device. The stages must be on the
        device."""
        for job, stage in pairs:
            adapter = self.adapters[job]
            assert self.is_loaded(stage), f"stage {stage} is not in its place"
            if (part := adapter.parts.get(stage)) is not None:
                host = adapter.training.state.weights[part.start : part.stop]
                adapter.weights[stage].copy_(host, non_blocking=True)

    def drop_gradients(self, jobs: Iterable[str]) -> None:
        """Set the gradients of these jobs to zero, because their global batches are dropped."""
        for job in jobs:
            for gradient in self.adapters[job].gradient.values():
                gradient.zero_()
            self._squares[job] = []
            self._device_gradients = {
                (other, stage) for other, stage in self._device_gradients if other != job
            }

    def _find_gradients(self, pairs: Iterable[JobStage]) -> list[JobStage]:
        """Return the pairs (job, stage) among `pairs` that have a gradient on the device."""
        return [
            pair
            for pair in pairs
            if pair in self._device_gradients and pair[1] in self.adapters[pair[0]].parts
        ]

    def _sum_squares(self, pairs: Iterable[JobStage]) -> None:
        pairs_with_gradient = self._find_gradients(pairs)
        gradients = [self.adapters[job].gradient[stage] for job, stage in pairs_with_gradient]
        if gradients and kernels_available(gradients[0]):
            for (job, _), squares in zip(pairs_with_gradient, square_sums(gradients), strict=True):
                self._squares[job].append(squares)

    def _copy_gradients_out(self, pairs: Iterable[JobStage]) -> None:
        """Copy the gradients of the pairs (job, stage) to the host and set them to zero on the device. A
        stage has a single backward in every round (one global batch of every job), so a copied gradient is
        complete."""
        pairs = list(pairs)
        for job, stage in self._find_gradients(pairs):
            adapter = self.adapters[job]
            part, gradient = adapter.parts[stage], adapter.gradient[stage]
            adapter.training.gradient[part.start : part.stop].copy_(gradient, non_blocking=True)
            gradient.zero_()
        self._device_gradients.difference_update(pairs)

    def wait(self) -> None:
        """Block until the device has finished all launched work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _stage_parts(layout: VectorLayout, part: WorkerLayout) -> Iterator[tuple[int, StagePart]]:
    """Return pairs of a stage and the range of an adapter's flat vector that holds the stage's parameters.
    The range is contiguous, since the vector is in the order of layers."""
    homes = [stage for stage, layers in enumerate(part.stages) for _ in range(layers.start, layers.stop)]
    parts: dict[int, StagePart] = {}
    at = 0
    for parameter in layout.parameters:
        layer = layer_number(parameter.site)
        stage = OUTSIDE_STAGE if layer is None else homes[layer]
        so_far = parts.get(stage, StagePart(at, at))
        assert so_far.stop == at, f"{parameter.site} lies apart from its stage"
        parts[stage] = StagePart(so_far.start, at + parameter.size)
        at += parameter.size
    return iter(parts.items())
