"""Functions that construct the executor of a worker from its parts. The worker's layout determines the parts,
for example resident or streamed weights."""

from __future__ import annotations

from collections.abc import Callable

from weftune.base.host.streamed import StreamedBase, make_stage_view
from weftune.base.model import Base
from weftune.core.shards import ShardTeam
from weftune.ops.adamw import update
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import WorkerLayout, one_device_layout
from weftune.run.alone import Alone
from weftune.run.executor import Executor
from weftune.run.measure.memory import release_cached_memory
from weftune.run.measure.timers import ActionTimer
from weftune.run.parts import AdapterState, Agreement
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graphs import CapturedPasses, GraphPool, Pool
from weftune.run.passes.plain import PlainPasses
from weftune.run.passes.stage_graphs import CapturedVisits
from weftune.run.resident_adapters import ResidentAdapters
from weftune.run.shards import Shards
from weftune.run.stream.activations import KeptActivations, OffloadedActivations
from weftune.run.stream.adapter_steps import ApplyUpdates
from weftune.run.stream.offloaded_optimizer import OffloadedOptimizer
from weftune.run.stream.travelling_adapters import TravellingAdapters
from weftune.run.stream.weights import ResidentWeights, StreamedWeights

Agrees = Callable[[AdapterState, ActionTimer, Shards | None], Agreement]
"""Function that returns the worker's `Agreement`, the part of an executor that decides which optimizer steps
are made and which events are reported."""


def resident_executor(
    base: Base,
    route: Route | None = None,
    graphs: bool = True,
    part: WorkerLayout | None = None,
    worker: int = 0,
    make_agreement: Agrees | None = None,
    captures_early: bool = True,
    apply_updates: ApplyUpdates = update,
    team: ShardTeam | None = None,
    fuses_layers: bool | None = None,
) -> Executor:
    """Return an executor for a base that stays on its device, or for this worker's one stage or shard of the
    base. `team` describes the workers among which every layer is divided into shards; None if layers are not
    divided. With `graphs`, passes are captured as CUDA graphs where possible: immediately with
    `captures_early`, and otherwise only where a capture saves time. `apply_updates` is the function that
    updates adapters whose master weights and moments are in host memory. `fuses_layers` says whether layers
    run as fused ops; None fuses them where kernels make that faster."""
    part = part or one_device_layout(base.shape.layers).for_worker(0)
    shards = None if team is None else Shards(base, team)
    adapted = AdaptedBase(base, route, fuses_layers, team)
    stages = {part.own_stages[0]: base}
    captures = graphs and adapted.can_capture
    timer = ActionTimer(base.device)
    offloads = part.layout.offloads_optimizer
    adapters = OffloadedOptimizer(adapted, apply_updates) if offloads else ResidentAdapters(adapted, shards)
    return Executor(
        adapted,
        part,
        weights=ResidentWeights(),
        activations=KeptActivations(part.own_stages),
        passes=CapturedPasses(adapted, stages, captures_early) if captures else PlainPasses(adapted, stages),
        adapters=adapters,
        agreement=(make_agreement or _make_alone)(adapters, timer, shards),
        timer=timer,
        worker=worker,
    )


def streamed_executor(
    streamed: StreamedBase,
    route: Route | None = None,
    graphs: bool = True,
    worker: int = 0,
    make_agreement: Agrees | None = None,
    apply_updates: ApplyUpdates = update,
    pool: Pool | None = None,
    team: ShardTeam | None = None,
) -> Executor:
    """Return an executor for a streamed base, whose stages take turns on one device. `apply_updates` is the
    function that updates adapters in host memory. If `graphs`, passes are captured as CUDA graphs where
    possible, in the memory of `pool` if it is given. `team` describes the workers among which every layer is
    divided into shards; None if layers are not divided."""
    base, part = streamed.whole, streamed.part
    shards = None if team is None else Shards(base, team)
    adapted = AdaptedBase(base, route, team=team)
    streamed.refuse_copies()
    # Loading and adapting leave fragmented memory; long-lived tensors must not be placed in the gaps.
    release_cached_memory(base.device)
    stages = {stage: make_stage_view(base, part.stage_range(stage)) for stage in part.own_stages}
    weights, timer = StreamedWeights(streamed), ActionTimer(base.device)
    travels = part.layout.adapters_travel
    adapters = (
        TravellingAdapters(adapted, weights, apply_updates) if travels else ResidentAdapters(adapted, shards)
    )
    # Whether a pass is captured depends on memory and time, but all shards must run the same passes.
    if pool is None and graphs and adapted.can_capture and team is None:
        pool = GraphPool(base.device)
    offloads = bool(part.offloaded_stages)
    return Executor(
        adapted,
        part,
        weights=weights,
        activations=OffloadedActivations(streamed, weights.wait_time)
        if offloads
        else KeptActivations(part.own_stages),
        passes=CapturedVisits(adapted, stages, pool) if pool else PlainPasses(adapted, stages),
        adapters=adapters,
        agreement=(make_agreement or _make_alone)(adapters, timer, shards),
        timer=timer,
        worker=worker,
    )


def _make_alone(adapters: AdapterState, timer: ActionTimer, shards: Shards | None) -> Agreement:
    assert shards is None, "shards agree with one another"
    return Alone(adapters, timer.is_asynchronous)
