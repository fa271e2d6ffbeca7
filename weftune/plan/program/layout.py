"""Layouts of a base on devices: its stages, their workers, and which stages are resident or streamed.

With N workers, stage j belongs to worker j mod N. A stage that is not resident is streamed: its weights are
in host memory and are loaded into a slot (a place for one stage) on its worker's device when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.core.shapes import LayerRange


@dataclass(frozen=True, slots=True)
class StageLayers:
    """A stage: consecutive layers that are placed on a device and loaded together."""

    start: int
    stop: int
    is_resident: bool = False
    """Whether the stage's weights stay on the device."""

    @property
    def layer_count(self) -> int:
        return self.stop - self.start


OFFLOADED_ROUNDS = OFFLOADED_MICROBATCHES = 2
"""Number of rounds (one global batch of every job) and of additional microbatches whose rows are on the
device at the memory peak, if inputs of stages are kept in host memory. The peak is in a backward: the device
then holds gradients and stage inputs, each of a round and of one more microbatch, which arrives before
another one leaves."""
BUFFERED = 2
"""Number of microbatches whose hidden states are buffered as inputs and outputs of CUDA graphs."""
RUNGS = 16
"""Number of allowed microbatch sizes per power of two, to which rows are padded for CUDA graphs."""


def padded_rows(tokens: int, captures_graphs: bool) -> int:
    """Return the maximum number of rows that `tokens` tokens have after padding for CUDA graphs. Microbatches
    of the smallest sizes may be padded to more rows."""
    return tokens + tokens // RUNGS if captures_graphs else tokens


def offloaded_inputs(stages: int) -> int:
    """Return the number of stages whose input can be offloaded: all but the first, which has no input, and
    the last, whose backward follows at once."""
    return max(0, stages - 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a base runs on the devices of its workers: its stages and their workers, replicas and shards, and
    what is kept in host memory."""

    stages: tuple[StageLayers, ...]
    slot_counts: tuple[int, ...] = (0,)
    """Number of slots, the places for streamed stages, on each worker's device. A slot has room for the
    largest streamed stage of the worker."""
    adapters_travel: bool = False
    """Whether adapters are kept in host memory like the streamed stages, and loaded and evicted with their
    stage."""
    offloaded_rows: int = 0
    """Number of rows (tokens) per round (one global batch of every job) whose stage inputs are kept in host
    memory. 0 means that inputs stay on the device."""
    replicas: int = 1
    """Number of copies of all stages, each on its own workers."""
    offloads_optimizer: bool = False
    """Whether master weights and optimizer moments are in host memory and copied to the device only for
    optimizer steps. Compute copies and gradients of adapters stay on the device."""
    shards: int = 1
    """Number of processes that hold each layer together (tensor parallelism). All of these processes run the
    same actions."""
    is_pipeline: bool = False
    """Whether every worker has one resident stage, which keeps the activations of a forward for its backward.
    Otherwise stages run one after another, and forwards are recomputed from their inputs, even if the stages
    are resident."""
    overlaps: bool = False
    """Whether two microbatches alternate after every half layer (attention or feed-forward), so that the
    all-reduces over shards of one overlap with the computation of the other."""

    def __post_init__(self) -> None:
        assert self.workers <= len(self.stages), "every worker has a stage"
        assert not self.is_pipeline or (len(self.stages) == self.workers and not any(self.slot_counts)), (
            "a worker of a pipeline has one stage, which stays"
        )
        assert not self.offloads_optimizer or (
            len(self.stages) * self.replicas == 1 and self.stages[0].is_resident and not self.adapters_travel
        ), "only beside a base that stays on one device"
        assert self.shards == 1 or not self.adapters_travel, "adapters of shards stay on their devices"
        assert not self.overlaps or self.may_overlap, "only shards of one resident stage can overlap"
        assert self.replicas == 1 or self.is_pipeline, "replicas hold stages that stay on their devices"
        for worker, count in enumerate(self.slot_counts):
            assert count >= 1 or not self.for_worker(worker).streamed_stages, (
                "a streamed stage needs a place to come to"
            )

    @property
    def workers(self) -> int:
        """Number of workers of one replica."""
        return len(self.slot_counts)

    @property
    def stage_workers(self) -> tuple[int, ...]:
        """Index of the worker of each stage, in the first replica."""
        return tuple(stage % self.workers for stage in range(len(self.stages)))

    @property
    def may_overlap(self) -> bool:
        """Whether the all-reduces over shards of one microbatch can overlap with the computation of another
        in this layout."""
        return self.is_pipeline and self.shards > 1 and len(self.stages) == self.replicas == 1

    @property
    def layers(self) -> int:
        return self.stages[-1].stop

    @property
    def job_group_count(self) -> int:
        """Number of groups of jobs that alternate in a round (one global batch of every job). If the
        optimizer is offloaded, there are two groups: the transfers for the optimizer steps of one group
        overlap with the forwards and backwards of the other."""
        return 2 if self.offloads_optimizer else 1

    @property
    def offloads_inputs(self) -> bool:
        """Whether inputs of stages are kept in host memory between the forward and the backward of the
        stage."""
        return self.offloaded_rows > 0

    def for_worker(self, worker: int) -> WorkerLayout:
        return WorkerLayout(self, worker)


def one_device_layout(layers: int = 1, offloads_optimizer: bool = False) -> Layout:
    """Return a layout with the whole base as one resident stage on one device."""
    return Layout((StageLayers(0, layers, is_resident=True),), offloads_optimizer=offloads_optimizer)


def pipeline_layout(
    layers: Sequence[LayerRange], replicas: int = 1, shards: int = 1, overlaps: bool = False
) -> Layout:
    """Return the layout of a pipeline, in which each worker has one stage that stays on its device. With
    `shards` above 1, each stage is divided among that many workers."""
    stages = tuple(StageLayers(one.start, one.stop, is_resident=True) for one in layers)
    slots = (0,) * len(stages)
    return Layout(stages, slots, replicas=replicas, shards=shards, is_pipeline=True, overlaps=overlaps)


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """The part of a layout that one worker holds. Stages keep their numbers in the whole layout."""

    layout: Layout
    worker: int = 0

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        """All stages of the base, on any worker."""
        return self.layout.stages

    @property
    def own_stages(self) -> tuple[int, ...]:
        return tuple(range(self.worker, len(self.stages), self.layout.workers))

    @property
    def slot_count(self) -> int:
        return self.layout.slot_counts[self.worker]

    @property
    def streamed_stages(self) -> tuple[int, ...]:
        """Indices of the worker's stages that are streamed."""
        return tuple(number for number in self.own_stages if not self.stages[number].is_resident)

    @property
    def initial_stages(self) -> tuple[int, ...]:
        """Indices of the streamed stages that are in the slots (places in device memory) between two windows:
        the first streamed stages of this worker."""
        return self.streamed_stages[: self.slot_count]

    def slot_of_stage(self, stage: int) -> int:
        """Return the index of a streamed stage's slot, its place in device memory. A stage is always loaded
        into the same slot, so its weights keep their address."""
        return self.streamed_stages.index(stage) % self.slot_count

    def stage_range(self, stage: int) -> LayerRange:
        found = self.stages[stage]
        return LayerRange(found.start, found.stop, self.layout.layers)

    @property
    def offloaded_stages(self) -> tuple[int, ...]:
        """Indices of this worker's stages whose inputs are kept in host memory: all but the base's first
        stage, which has no input, and this worker's last stage, whose backward runs first."""
        return (
            tuple(number for number in self.own_stages[:-1] if number > 0)
            if self.layout.offloads_inputs
            else ()
        )

    @property
    def rounds_on_device(self) -> int:
        """Number of times that the stage inputs of a whole round (one global batch of every job) are on the
        device at the memory peak. Without offloading, it is the number of the worker's stages, since each
        keeps its inputs."""
        return OFFLOADED_ROUNDS if self.layout.offloads_inputs else len(self.own_stages)

    @property
    def extra_microbatches_on_device(self) -> int:
        """Number of microbatches whose rows are on the device at the memory peak, in addition to those of
        whole rounds (one global batch of every job each)."""
        return OFFLOADED_MICROBATCHES if self.layout.offloads_inputs else 0
