"""Tensor parallelism: devices that share every layer, and how much of it MuxTune's order of subgraphs hides.

Each layer then has two collectives per pass, during which the stage could compute for another fusion group.
Two groups are interleaved; the saving is computed for microbatches of the average size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.cost.cluster import Cluster, Device
from weftune.plan.cost.estimate import JobOutline, Speed
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.program.prices import Link, PassPrice
from weftune.plan.studies.fit import ClusterCase, Placement, lay_out, make_ground
from weftune.plan.studies.forecast import ForecastRun, run_passes
from weftune.plan.studies.ordering import passes_in
from weftune.plan.studies.overlap import Graph, Operator, OperatorKind, overlap
from weftune.plan.studies.priced import PricedWork, lay
from weftune.plan.studies.scheme import Scheme

COLLECTIVES = 2
"""Collectives per layer and pass: after attention and after the feed-forward part."""
ADAPTERS = 0.1
"""Share of a layer's compute that its adapters take, if they are separate operators."""


@dataclass(frozen=True, slots=True)
class Shards:
    """A base on fewer, wider stages."""

    count: int
    ground: ClusterCase
    layout: Placement


def make_shards(ground: ClusterCase, jobs: Sequence[JobOutline], capacity: int, count: int = 2) -> Shards:
    """Combine every `count` consecutive devices into one; raise PlanError if that does not fit."""
    cluster = ground.cluster
    firsts = range(0, len(cluster.devices), count)
    wide = Cluster(
        tuple(_wide(cluster.devices[number], count) for number in firsts),
        cluster.link,
        cluster.link_name,
        (len(firsts),),
    )
    speeds = [_faster(ground.speeds[number], count) for number in firsts]
    together = make_ground(ground.shape, wide, speeds, ground.recompute)
    return Shards(count, together, lay_out(together, jobs, capacity))


def sharded_forecast(shards: Shards, scheme: Scheme, jobs: Sequence[JobOutline], hidden: bool) -> Forecast:
    """Predict a sharded run. `hidden` interleaves the groups' passes in pairs, each at half the capacity."""
    layout = shards.layout
    if hidden:
        layout = replace(layout, capacity=max(layout.capacity // 2, max(job.shape.longest for job in jobs)))
    laid = lay(scheme, jobs, shards.ground, layout)
    laid = _priced(laid, shards, hidden)
    passes = passes_in(scheme.order, laid, layout)
    run: ForecastRun = run_passes(passes, laid, scheme, jobs, shards.ground, layout)
    # Each stage stands for `count` devices, all equally busy.
    forecast = run.forecast
    return replace(forecast, busy=forecast.busy * shards.count, devices=forecast.devices * shards.count)


def _wide(device: Device, count: int) -> Device:
    return replace(
        device,
        memory_bytes=count * device.memory_bytes,
        peak=count * device.peak,
        bandwidth=count * device.bandwidth,
    )


def _faster(speed: Speed, count: int) -> Speed:
    return replace(
        speed,
        flops=count * speed.flops,
        adapter_flops=count * speed.adapter_flops,
        bandwidth=count * speed.bandwidth,
    )


def _priced(laid: PricedWork, shards: Shards, hidden: bool) -> PricedWork:
    filled = laid.work.filled
    tokens = sum(laid.work.microbatches[number].tokens for number in filled) / len(filled)
    stages = len(shards.layout.stages)
    saved = [1.0] * stages
    if hidden:
        typical = [
            sum(laid.prices.passes[number][stage].forward for number in filled) / len(filled)
            for stage in range(stages)
        ]
        saved = [_saved(shards, stage, typical[stage], int(tokens)) for stage in range(stages)]
    passes = tuple(
        tuple(_dearer(price, shards, stage, saved[stage]) for stage, price in enumerate(one))
        for one in laid.prices.passes
    )
    return replace(laid, prices=replace(laid.prices, passes=passes))


def _dearer(price: PassPrice, shards: Shards, stage: int, saved: float) -> PassPrice:
    """Return the cost of a pass with its collectives; those of a recomputed forward are repeated."""
    collectives = _layers(shards, stage) * COLLECTIVES * _all_reduce(price.activation_bytes, shards)
    again = 2 if shards.ground.recompute.layers else 1
    return replace(
        price,
        forward=saved * (price.forward + collectives),
        backward=saved * (price.backward + again * collectives),
    )


def _layers(shards: Shards, stage: int) -> int:
    cut = shards.layout.stages[stage]
    return sum(layer.kind == "layer" for layer in shards.ground.layers[cut.start : cut.stop])


def _all_reduce(size: int, shards: Shards) -> float:
    """Return the seconds of a ring all-reduce: every device sends all but its own part twice."""
    others, link = shards.count - 1, shards.ground.cluster.link
    return 2 * others * Link(link.bandwidth, link.latency).seconds(size // shards.count)


def _saved(shards: Shards, stage: int, forward: float, tokens: int) -> float:
    """Return the time of two interleaved passes relative to running them one after another."""
    layers = _layers(shards, stage)
    if not layers:
        return 1.0
    size = tokens * shards.ground.layers[0].handed_bytes
    graph = _graph(layers, forward / layers, _all_reduce(size, shards))
    found = overlap([graph, graph])
    return found.best.seconds / found.one_by_one.seconds


def _graph(layers: int, compute: float, collective: float) -> Graph:
    """Return the operators of a pass: two halves per layer, each with products, an adapter in parallel, and a
    collective."""
    made: list[Operator] = []
    before: tuple[str, ...] = ()
    for number in range(layers * COLLECTIVES):
        share = compute / COLLECTIVES
        base, adapter, sent = f"base{number}", f"adapter{number}", f"reduce{number}"
        made.append(Operator(base, OperatorKind.compute, (1 - ADAPTERS) * share, before))
        made.append(Operator(adapter, OperatorKind.adapter, ADAPTERS * share, before))
        made.append(Operator(sent, OperatorKind.communication, collective, (base, adapter)))
        before = (sent,)
    return tuple(made)
