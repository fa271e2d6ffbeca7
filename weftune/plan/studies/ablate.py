"""Value of each mechanism: the plan with one switched off, or with one added that is normally left out."""

from __future__ import annotations

from dataclasses import replace

from weftune.errors import PlanError
from weftune.plan.outlook.forecast import Ablation, Forecast
from weftune.plan.studies.candidates import alone, candidates, left_out
from weftune.plan.studies.chunked import chunked_forecast
from weftune.plan.studies.fit import Placement, lay_out
from weftune.plan.studies.forecast import run_scheme
from weftune.plan.studies.priced import lay, slowest_first
from weftune.plan.studies.scheme import GREEDY, Scheme, SchemeOrder
from weftune.plan.studies.search import PIPELINE_ORDERS
from weftune.plan.studies.sharded import make_shards, sharded_forecast
from weftune.plan.studies.simulated import Outlook

CHUNKS = (64, 128, 256, 512, 1024)
MOST_CHUNKS = 8
"""Maximum chunks per full microbatch: smaller chunks cost more in passes than they save in waits."""
SHARDS = 2


def ablate(found: Outlook) -> tuple[Ablation, ...]:
    """Return the cost of switching off each mechanism, others as chosen; then of adding those left out."""
    scheme, jobs = found.scheme, found.jobs
    switched = [
        ("packing", "best fit only", replace(scheme, limits=GREEDY)),
        ("merging", "every round by itself", replace(scheme, shift=False)),
        ("sharing", "no job shares a microbatch", replace(scheme, groups=alone(jobs), shift=False)),
    ]
    rows = [row(found, mechanism, instead, _whole(found, other)) for mechanism, instead, other in switched]
    others = (*_order_rows(found), *_partition_row(found), *_group_rows(found))
    return (*rows, *others, *_chunk_rows(found), *_shard_rows(found))


def row(found: Outlook, mechanism: str, instead: str, forecast: Forecast, added: bool = False) -> Ablation:
    return Ablation(mechanism, instead, forecast, forecast.seconds / found.forecast.seconds - 1.0, added)


def _chunk_rows(found: Outlook) -> list[Ablation]:
    """Return the result for the best chunk size; one device has no waits that chunks could shorten."""
    if len(found.layout.stages) == 1:
        return []
    capacity = found.layout.capacity
    sizes = [size for size in CHUNKS if capacity % size == 0 and size < capacity <= MOST_CHUNKS * size]
    made = {
        size: chunked_forecast(found.jobs, found.scheme.groups, size, found.ground, found.layout)
        for size in sizes
    }
    if not made:
        return []
    size = min(made, key=lambda one: made[one].seconds)
    return [row(found, "chunks", f"samples cut into chunks of {size} rows", made[size], added=True)]


def _shard_rows(found: Outlook) -> list[Ablation]:
    """Return results for two devices per stage, without and with overlap of compute and communication."""
    if len(found.layout.stages) % SHARDS or len(found.layout.stages) != len(found.ground.cluster.devices):
        return []
    try:
        shards = make_shards(found.ground, found.jobs, found.layout.capacity, SHARDS)
    except PlanError:
        return []
    scheme = _in_order(found, replace(found.scheme, shift=True), SchemeOrder.alternating)
    plain, hidden = (sharded_forecast(shards, scheme, found.jobs, hidden) for hidden in (False, True))
    return [
        row(found, "tensor parallelism", f"{SHARDS} devices share each layer", plain, added=True),
        row(found, "subgraph order", "the same, collectives behind another group", hidden, added=True),
    ]


def _whole(found: Outlook, scheme: Scheme, layout: Placement | None = None) -> Forecast:
    return run_scheme(scheme, found.jobs, found.ground, layout or found.layout).forecast


def _order_rows(found: Outlook) -> list[Ablation]:
    """Return results for the chosen groups in every other order."""
    if len(found.layout.stages) == 1:
        return []
    rows = []
    for order in (SchemeOrder.gpipe, *PIPELINE_ORDERS):
        if order is not found.scheme.order:
            rows.append(row(found, "order", str(order), _whole(found, _in_order(found, found.scheme, order))))
    return rows


def _in_order(found: Outlook, scheme: Scheme, order: SchemeOrder) -> Scheme:
    scheme = replace(scheme, order=order)
    if order is not SchemeOrder.template:
        return scheme
    laid = lay(scheme, found.jobs, found.ground, found.layout)
    return replace(scheme, groups=slowest_first(laid, scheme.groups))


def _partition_row(found: Outlook) -> list[Ablation]:
    try:
        blind = lay_out(found.ground, found.jobs, found.layout.capacity, ends=False)
    except PlanError:
        return []
    return [row(found, "partition", "embedding and head not counted", _whole(found, found.scheme, blind))]


def _group_rows(found: Outlook) -> list[Ablation]:
    """Return results for the groupings that did not win and those left out, in the chosen order."""
    chosen = found.candidate.mechanism
    added = left_out(found.ground, found.jobs, found.layout)
    rows = []
    for candidate in (*candidates(found.jobs, found.layout), *added):
        if candidate.mechanism != chosen:
            scheme = replace(found.scheme, groups=candidate.groups, shift=True)
            forecast = _whole(found, _in_order(found, scheme, scheme.order))
            name = candidate.mechanism if candidate in added else f"groups by {chosen}"
            instead = f"groups by {candidate.mechanism}"
            rows.append(row(found, name, instead, forecast, candidate in added))
    return rows
