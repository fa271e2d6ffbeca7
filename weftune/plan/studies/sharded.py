"""Devices that share every layer (tensor parallelism), and what MuxTune's order of subgraphs hides of it.

Each layer then has two collectives a pass, during which the stage could compute for another fusion group.
Two groups are interleaved; how much that saves is worked out for microbatches of the average size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.cost.cluster import Cluster, Device
from weftune.plan.cost.estimate import JobOutline, Speed
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.program.prices import Link, PassPrice
from weftune.plan.studies.fit import Ground, Placement, lay_out, make_ground
from weftune.plan.studies.forecast import ForecastRun, run_passes
from weftune.plan.studies.ordering import passes_in
from weftune.plan.studies.overlap import Graph, Operator, OperatorKind, overlap
from weftune.plan.studies.priced import PricedWork, lay
from weftune.plan.studies.scheme import Scheme

COLLECTIVES = 2
"""Of a layer in one pass: after attention and after the feed-forward part."""
ADAPTERS = 0.1
"""The share of a layer's compute that its adapters take, where they are operators of their own."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The same base on fewer, wider stages."""

    count: int
    ground: Ground
    layout: Placement


def make_shards(ground: Ground, jobs: Sequence[JobOutline], capacity: int, count: int = 2) -> Shards:
    """Every `count` devices in a row as one; PlanError where that does not fit."""
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
    """`hidden`: the groups' passes are interleaved two by two, at half the capacity each."""
    layout = shards.layout
    if hidden:
        layout = replace(layout, capacity=max(layout.capacity // 2, max(job.shape.longest for job in jobs)))
    laid = lay(scheme, jobs, shards.ground, layout)
    laid = _priced(laid, shards, hidden)
    passes = passes_in(scheme.order, laid, layout)
    run: ForecastRun = run_passes(passes, laid, scheme, jobs, shards.ground, layout)
    # Each stage is so many devices, all as busy as the one that stands for them.
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
    """A pass with its collectives; those of a forward that is recomputed come once more."""
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
    """A ring: every device sends all but its own part twice."""
    others, link = shards.count - 1, shards.ground.cluster.link
    return 2 * others * Link(link.bandwidth, link.latency).seconds(size // shards.count)


def _saved(shards: Shards, stage: int, forward: float, tokens: int) -> float:
    """What two interleaved passes take, over what they take one by one."""
    layers = _layers(shards, stage)
    if not layers:
        return 1.0
    size = tokens * shards.ground.layers[0].handed_bytes
    graph = _graph(layers, forward / layers, _all_reduce(size, shards))
    found = overlap([graph, graph])
    return found.best.seconds / found.one_by_one.seconds


def _graph(layers: int, compute: float, collective: float) -> Graph:
    """Of each layer two halves: products with an adapter beside them, then a collective."""
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
