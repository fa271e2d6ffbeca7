"""What a cluster makes of jobs whose base it cannot hold: layers streamed in stages, and where to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from weftune.errors import Mistake, PlanError
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.layers import stage_cost
from weftune.plan.cost.memory import gib
from weftune.plan.layout.mapping import Topology, cross_order, sequential_order
from weftune.plan.layout.mobius_partition import largest_stages, smallest_stages, stream
from weftune.plan.layout.mobius_step import Host, StreamPartition, free_bytes, visits
from weftune.plan.outlook.ablate import Ablation
from weftune.plan.outlook.fit import Ground, capacities, why_not
from weftune.plan.outlook.forecast import Forecast, ForecastRun, in_turn
from weftune.plan.outlook.outlook import refuse_empty
from weftune.plan.outlook.places import ALIKE
from weftune.plan.outlook.streamed_forecast import Bed, StreamedForecast, make_bed, make_streams, run_streams
from weftune.plan.studies.contention import Root, fastest_order

PREFIXES = 4000
"""How many prefixes a search for a cut looks at: several searches must be done in seconds."""
CUT_STARTS = 2
"""From how many partitions each of them sets out."""
CAPACITIES = 3
"""So many token capacities are tried."""
SEARCHED, LARGEST, SMALLEST = "searched", "largest stages", "smallest stages"
SEQUENTIAL, CROSS, FASTEST = "sequential", "cross mapping", "fastest order"


@dataclass(frozen=True, slots=True)
class StreamOutlook:
    ground: Ground
    jobs: tuple[JobOutline, ...]
    chosen: StreamedForecast
    tried: tuple[StreamedForecast, ...]
    """Every cut in every mapping, at the capacity that was chosen."""
    unfetched: StreamedForecast
    """The chosen one, were nothing loaded ahead."""
    shared: StreamedForecast
    """The chosen one, were uploads under one root complex to share it equally."""
    alternatives: tuple[Forecast, ...]
    source: str

    @property
    def forecast(self) -> Forecast:
        return self.chosen.run.forecast

    @property
    def run(self) -> ForecastRun:
        return self.chosen.run


def stream_outlook(ground: Ground, jobs: Sequence[JobOutline]) -> StreamOutlook:
    """The fastest that is found; PlanError says what does not fit even so."""
    refuse_streamed(ground, jobs)
    found: list[list[StreamedForecast]] = []
    beds: list[Bed] = []
    for capacity in capacities(jobs, ground.most):
        bed = make_bed(ground, jobs, capacity)
        fitting = [one for one in _every_way(bed) if one.run.forecast.fits]
        if fitting:
            found.append(fitting)
            beds.append(bed)
        if len(found) == CAPACITIES:
            break
    if not found:
        reason = why_not_streamed(ground, jobs) or "needs more memory than there is in every cut"
        raise PlanError(f"the jobs do not fit together: the company {reason}")
    number = min(range(len(found)), key=lambda one: min(way.seconds for way in found[one]))
    best = min(way.seconds for way in found[number])
    chosen = next(way for way in found[number] if way.seconds <= best * (1 + ALIKE))
    bed = beds[number]
    bare = run_streams(bed, replace(chosen.streams, prefetch=False), chosen.cut, chosen.mapping)
    return StreamOutlook(
        ground=bed.ground,
        jobs=tuple(jobs),
        chosen=chosen,
        tried=tuple(found[number]),
        unfetched=bare,
        shared=run_streams(bed, chosen.streams, chosen.cut, chosen.mapping, queued=False),
        alternatives=_alternatives(bed, found[number], chosen),
        source=ground.speeds[0].source,
    )


def must_stream(ground: Ground, jobs: Sequence[JobOutline]) -> bool:
    """Whether a job does not fit even alone with the base resident: only a GPU has memory behind its own."""
    return ground.is_gpu and any(why_not(ground, [job]) for job in jobs)


def refuse_streamed(ground: Ground, jobs: Sequence[JobOutline]) -> None:
    """PlanError for every job that does not fit even alone and with its base streamed."""
    refuse_empty(ground, jobs)
    mistakes = []
    for job in jobs:
        if sentence := why_not_streamed(ground, [job]):
            mistakes.append(Mistake(f"job {job.name}", f"even alone, with the base streamed, it {sentence}"))
    if mistakes:
        raise PlanError(mistakes)


def why_not_streamed(ground: Ground, jobs: Sequence[JobOutline]) -> str | None:
    """A sentence that says why these jobs do not fit together although the base is streamed, or None."""
    assert ground.is_gpu, "only a GPU has memory behind its own"
    bed = make_bed(ground, jobs, capacities(jobs, ground.most)[-1])
    needs = _even_needs(bed)
    stages = min(needs, key=needs.__getitem__)
    if needs[stages] <= min(ground.budgets):
        return None
    others = len(jobs) - 1
    company = f"with {others} other job{'s' if others > 1 else ''} aboard and " if others else ""
    state = sum(cost.state_bytes for cost in bed.costs) // len(ground.cluster.devices)
    return (
        f"needs {gib(needs[stages])} on a device {company}with {bed.capacity} tokens in a microbatch, even "
        f"in {stages} stages ({gib(state)} for adapters, {gib(bed.input_bytes)} for each stage's inputs), "
        f"but {gib(min(ground.budgets))} are available"
    )


def _even_needs(bed: Bed) -> dict[int, int]:
    """For each number of stages, all streamed: what the fullest device needs."""
    host, count = _host(bed), len(bed.costs)
    needs = {}
    for stages in range(1, count + 1):
        cuts = [round(count * number / stages) for number in range(stages + 1)]
        held = [stage_cost(bed.costs, start, stop) for start, stop in pairwise(cuts)]
        free = min(free_bytes(held, (False,) * stages, host))
        needs[stages] = bed.taken_bytes + host.memory_bytes - free
    return needs


def ablate_streams(found: StreamOutlook) -> tuple[Ablation, ...]:
    """The other cuts and mappings, and nothing loaded ahead; all else as it was chosen."""
    chosen = found.chosen
    rows = []
    for one in found.tried:
        if one.mapping == chosen.mapping and one.cut != chosen.cut:
            rows.append(_row(found, "streamed stages", one.cut, one))
    for one in found.tried:
        if one.cut == chosen.cut and one.mapping != chosen.mapping:
            rows.append(_row(found, f"mapping: {chosen.mapping}", one.mapping, one))
    rows.append(_row(found, "prefetch", "each stage loaded when the one before is given up", found.unfetched))
    if max(found.ground.cluster.roots) > 1:
        rows.append(_row(found, "queue of uploads", "equal shares of a root complex", found.shared))
    return tuple(rows)


def _row(found: StreamOutlook, mechanism: str, instead: str, one: StreamedForecast) -> Ablation:
    return Ablation(mechanism, instead, one.run.forecast, one.seconds / found.chosen.seconds - 1.0)


def _every_way(bed: Bed) -> Iterator[StreamedForecast]:
    topology = Topology(bed.ground.cluster.roots)
    for cut, partition in _cuts(bed):
        orders = {SEQUENTIAL: sequential_order(topology)}
        if len(topology.roots) > 1:
            orders |= _mapped(bed, partition, topology)
        seen: list[tuple[int, ...]] = []
        for mapping, order in orders.items():
            if order not in seen:
                seen.append(order)
                yield run_streams(bed, make_streams(bed, partition, order), cut, mapping)


def _mapped(bed: Bed, partition: StreamPartition, topology: Topology) -> dict[str, tuple[int, ...]]:
    host, count = _host(bed), bed.microbatches
    moved = visits(partition, bed.costs, host)
    root = Root(bed.ground.cluster.priced().roots[0], ordered=True)
    return {
        CROSS: cross_order(topology, len(partition.stages)),
        FASTEST: fastest_order(moved, topology, host, count, root),
    }


def _cuts(bed: Bed) -> Iterator[tuple[str, StreamPartition]]:
    for name in (SEARCHED, LARGEST, SMALLEST):
        with suppress(PlanError):
            yield name, _cut(name, bed)


def _cut(name: str, bed: Bed) -> StreamPartition:
    host = _host(bed)
    if name == LARGEST:
        return largest_stages(bed.costs, host)
    if name == SMALLEST:
        return smallest_stages(bed.costs, host)
    return stream(bed.costs, host, bed.microbatches, PREFIXES, CUT_STARTS).partition


def _host(bed: Bed) -> Host:
    """The cluster as the partition takes it."""
    cluster = bed.ground.cluster
    link = cluster.priced().devices[0].host
    room = min(bed.ground.budgets) - bed.taken_bytes
    return Host(len(cluster.devices), max(0, room), link.bandwidth, bed.input_bytes)


def _alternatives(
    bed: Bed, tried: Sequence[StreamedForecast], chosen: StreamedForecast
) -> tuple[Forecast, ...]:
    """Each job with the base streamed for it alone, and Mobius's two plain cuts."""
    parts = []
    for job in bed.jobs:
        own = make_bed(bed.ground, [job], bed.capacity)
        parts.append(run_streams(own, chosen.streams, chosen.cut, chosen.mapping).run.forecast)
    plain = [one for one in tried if one.mapping == SEQUENTIAL and one.cut != SEARCHED]
    named = [replace(one.run.forecast, name=f"{one.cut}, in sequence") for one in plain]
    return (replace(in_turn(parts), name="one after another"), *named)
