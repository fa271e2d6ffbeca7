"""One way of streaming the base from host memory, simulated: its seconds, and what of the uploads is bare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.layers import LayerCost, StageCost
from weftune.plan.cost.memory import ON_THE_WAY
from weftune.plan.layout.mobius_step import StreamPartition
from weftune.plan.outlook.fit import Ground, Placement, frugal, full_rows
from weftune.plan.outlook.forecast import ForecastRun, forecast_of
from weftune.plan.outlook.priced import make_work, price_all, stage_rates
from weftune.plan.outlook.scheme import SEARCHED
from weftune.plan.outlook.streamed_program import Streams, stream_program
from weftune.plan.pack.merge import BatchSample, Merged, MergeRules, merge
from weftune.plan.program.prices import Link, PricedCluster, Prices
from weftune.plan.program.program import Load
from weftune.plan.program.simulate import simulate
from weftune.plan.window.orders import Work, rounds


@dataclass(frozen=True, slots=True)
class Bed:
    """The jobs' batches in microbatches of one capacity, before the base is cut."""

    ground: Ground
    jobs: tuple[JobOutline, ...]
    capacity: int
    costs: tuple[LayerCost, ...]
    """Of a full microbatch."""
    merged: Merged
    work: Work

    @property
    def beside_bytes(self) -> int:
        """On every device, whatever the cut: slack, and the layer that is just being made again."""
        return self.ground.slack + self.ground.held_bytes * self.capacity

    @property
    def taken_bytes(self) -> int:
        """The same and what is on its way to and from other devices."""
        return self.beside_bytes + ON_THE_WAY * self.ground.layers[0].handed_bytes * self.capacity

    @property
    def microbatches(self) -> int:
        """Of a round, on average."""
        return math.ceil(len(self.work.filled) / len(rounds(self.work)))

    @property
    def input_bytes(self) -> int:
        """What a stage keeps of all microbatches of the largest round: their rows as they came in."""
        sizes = (sum(self.work.microbatches[one].tokens for one in each) for each in rounds(self.work))
        return max(sizes) * self.ground.layers[0].handed_bytes


@dataclass(frozen=True, slots=True)
class StreamedForecast:
    """A cut and its mapping, simulated."""

    cut: str
    mapping: str
    streams: Streams
    layout: Placement
    run: ForecastRun
    unhidden: float
    """Seconds of the window that uploads add to what it would take if they took no time."""

    @property
    def seconds(self) -> float:
        return self.run.forecast.seconds

    @property
    def uploaded_bytes(self) -> int:
        """In the whole window, to all devices."""
        loads = (one for actions in self.run.program.devices for one in actions if isinstance(one, Load))
        return sum(self.streams.stages[one.stage].weight_bytes for one in loads)


def make_bed(ground: Ground, jobs: Sequence[JobOutline], capacity: int) -> Bed:
    """Every layer is made again in the backward: what a stage keeps of a microbatch is its input."""
    ground = frugal(ground)[-1]
    samples = [
        [
            BatchSample(job.name, step + 1, number, length)
            for job in jobs
            if step < len(job.batches)
            for number, length in enumerate(job.batches[step])
        ]
        for step in range(max(len(job.batches) for job in jobs))
    ]
    merged = merge([one for one in samples if one], MergeRules(capacity, limits=SEARCHED), shift=False)
    costs = ground.costs(jobs, full_rows(jobs, capacity))
    return Bed(ground, tuple(jobs), capacity, costs, merged, make_work(merged, jobs, capacity))


def make_streams(bed: Bed, partition: StreamPartition, order: tuple[int, ...]) -> Streams:
    stages, gpus = partition.costs(bed.costs), len(order)
    room = list(bed.ground.budgets)
    for place, device in enumerate(order):
        own = range(place, len(stages), gpus)
        fixed = sum(
            bed.input_bytes + stages[one].state_bytes + partition.resident[one] * stages[one].weight_bytes
            for one in own
        )
        passing = max((stages[one].kept_bytes for one in own), default=0)
        room[device] -= bed.taken_bytes + fixed + passing
    return Streams(stages, partition.resident, order, tuple(room))


def run_streams(bed: Bed, streams: Streams, cut: str, mapping: str, queued: bool = True) -> StreamedForecast:
    """`queued`: uploads under one root complex go one after another instead of in equal shares."""
    ground = bed.ground
    program = stream_program(bed.work, streams)
    prices, cluster = _prices(bed, streams), replace(ground.cluster.priced(), queued=queued)
    timeline = simulate(program, prices, cluster)
    free = simulate(program, prices, _free_uploads(cluster)).makespan
    devices = range(len(streams.order))
    state = [sum(stage.state_bytes for stage in owned(streams, device)) for device in devices]
    beside = bed.beside_bytes
    needs = tuple(peak + held + beside for peak, held in zip(timeline.peaks, state, strict=True))
    layout = Placement(bed.capacity, streams.stages, needs, ground.budgets, beside)
    forecast = forecast_of("weftune", timeline, bed.jobs, layout, state, len(bed.work.filled))
    run = ForecastRun(forecast, program, timeline, bed.merged)
    return StreamedForecast(cut, mapping, streams, layout, run, timeline.makespan - free)


def _prices(bed: Bed, streams: Streams) -> Prices:
    rates = []
    for stage, home in zip(streams.stages, streams.homes, strict=True):
        rate = stage_rates(stage, bed.jobs, bed.ground, bed.ground.speeds[home])
        rates.append(replace(rate, kept_bytes=rate.handed_bytes, working_bytes=rate.kept_bytes))
    return price_all(bed.work.microbatches, rates, streams.stages)


def _free_uploads(cluster: PricedCluster) -> PricedCluster:
    return replace(
        cluster,
        devices=tuple(replace(device, host=Link()) for device in cluster.devices),
        roots=(math.inf,) * len(cluster.roots),
    )


def owned(streams: Streams, device: int) -> list[StageCost]:
    return [stage for stage, home in zip(streams.stages, streams.homes, strict=True) if home == device]
