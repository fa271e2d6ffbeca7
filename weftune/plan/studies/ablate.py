"""Ablation of planner mechanisms: the forecast with one switched off, or with one that is off by default."""

from __future__ import annotations

from dataclasses import replace

from weftune.errors import PlanError
from weftune.plan.outlook.forecast import Ablation, Forecast
from weftune.plan.studies.chunks import chunked_forecast
from weftune.plan.studies.fusion import fused_groups
from weftune.plan.studies.placement import Placement, lay_out
from weftune.plan.studies.scheme import GREEDY, Scheme, SchemeOrder, alone, run_scheme
from weftune.plan.studies.search import PIPELINE_ORDERS, Outlook, Search, candidates
from weftune.plan.studies.shards import sharded_forecast, sharded_placement

CHUNKS = (64, 128, 256, 512, 1024)
MOST_CHUNKS = 8
"""Maximum chunks per full microbatch: smaller chunks cost more in passes than they save in waits."""
SHARDS = 2


def ablate(found: Outlook) -> tuple[Ablation, ...]:
    """Return the cost of switching off each mechanism, then of adding each that is off by default."""
    scheme, jobs = found.scheme, found.jobs
    switched = [
        ("packing", "best fit only", replace(scheme, limits=GREEDY)),
        ("merging", "every round by itself", replace(scheme, shift=False)),
        ("sharing", "no job shares a microbatch", replace(scheme, groups=alone(jobs), shift=False)),
    ]
    rows = [_row(found, mechanism, instead, _whole(found, other)) for mechanism, instead, other in switched]
    others = (*_order_rows(found), *_partition_row(found), *_group_rows(found))
    return (*rows, *others, *_chunk_rows(found), *_shard_rows(found))


def _row(found: Outlook, mechanism: str, instead: str, forecast: Forecast, added: bool = False) -> Ablation:
    return Ablation(mechanism, instead, forecast, forecast.seconds / found.forecast.seconds - 1.0, added)


def _whole(found: Outlook, scheme: Scheme, placement: Placement | None = None) -> Forecast:
    return run_scheme(scheme, found.jobs, placement or found.placement).forecast


def _chunk_rows(found: Outlook) -> list[Ablation]:
    """Return the result for the best chunk size; one device has no waits that chunks could shorten."""
    capacity = found.placement.capacity
    sizes = [size for size in CHUNKS if capacity % size == 0 and size < capacity <= MOST_CHUNKS * size]
    if len(found.placement.stages) == 1 or not sizes:
        return []
    groups, placement = found.scheme.groups, found.placement
    by_size = {size: chunked_forecast(found.jobs, groups, size, placement) for size in sizes}
    size = min(by_size, key=lambda one: by_size[one].seconds)
    return [_row(found, "chunks", f"samples cut into chunks of {size} rows", by_size[size], added=True)]


def _shard_rows(found: Outlook) -> list[Ablation]:
    """Return results for two devices per stage, without and with overlap of compute and communication."""
    placement, stages = found.placement, len(found.placement.stages)
    if stages % SHARDS or stages != len(placement.case.cluster.devices):
        return []
    try:
        shards = sharded_placement(placement.case, found.jobs, placement.capacity, SHARDS)
    except PlanError:
        return []
    scheme = replace(found.scheme, shift=True, order=SchemeOrder.alternating)
    plain, hidden = (sharded_forecast(shards, SHARDS, scheme, found.jobs, hidden) for hidden in (False, True))
    return [
        _row(found, "tensor parallelism", f"{SHARDS} devices share each layer", plain, added=True),
        _row(found, "subgraph order", "the same, collectives behind another group", hidden, added=True),
    ]


def _order_rows(found: Outlook) -> list[Ablation]:
    """Return results for the chosen groups in every other order."""
    if len(found.placement.stages) == 1:
        return []
    search = Search(found.placement, found.jobs)
    others = (order for order in (SchemeOrder.gpipe, *PIPELINE_ORDERS) if order is not found.scheme.order)
    schemes = [search.sorted_for(replace(found.scheme, order=order)) for order in others]
    return [_row(found, "order", str(scheme.order), _whole(found, scheme)) for scheme in schemes]


def _partition_row(found: Outlook) -> list[Ablation]:
    try:
        blind = lay_out(found.placement.case, found.jobs, found.placement.capacity, ends=False)
    except PlanError:
        return []
    return [_row(found, "partition", "embedding and head not counted", _whole(found, found.scheme, blind))]


def _group_rows(found: Outlook) -> list[Ablation]:
    """Return results for all groupings that were not chosen, in the chosen order."""
    search, added = Search(found.placement, found.jobs), fused_groups(found.jobs, found.placement)
    rows = []
    for mechanism, groups in (candidates(found.jobs, found.placement) | added).items():
        if mechanism != found.mechanism:
            scheme = search.sorted_for(replace(found.scheme, groups=groups, shift=True))
            name = mechanism if mechanism in added else f"groups by {found.mechanism}"
            instead = f"groups by {mechanism}"
            rows.append(_row(found, name, instead, _whole(found, scheme), mechanism in added))
    return rows
