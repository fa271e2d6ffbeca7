"""Ablation of mechanisms of the planner: forecasts with one mechanism switched off, or with one added that is
off by default."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.studies.fusion import fused_groups
from benchmarks.studies.placement import Placement, cut_stages
from benchmarks.studies.scheme import (
    Scheme,
    SchemeOrder,
    pack_scheme,
    run_scheme,
    separate_groups,
    simulate_program,
)
from benchmarks.studies.search import PIPELINE_ORDERS, Outlook, Search, candidates
from benchmarks.studies.shards import sharded_forecast, sharded_placement
from weftune.errors import PlanError
from weftune.plan.outlook.forecast import Ablation, Forecast
from weftune.plan.pack.best import BEST_FIT_ONLY
from weftune.plan.window.orders import chunked_multi_job

CHUNKS = (64, 128, 256, 512, 1024)
MAX_CHUNKS = 8
"""Maximum number of chunks per full microbatch. More chunks cost more time in passes than they save in
waits."""
SHARDS = 2


def ablate(outlook: Outlook) -> tuple[Ablation, ...]:
    """Return the predicted effect of switching off each mechanism, and of adding each mechanism that is off
    by default."""
    scheme, jobs = outlook.scheme, outlook.jobs
    switched = [
        ("packing", "best fit only", replace(scheme, limits=BEST_FIT_ONLY)),
        ("merging", "every round by itself", replace(scheme, moves_samples=False)),
        (
            "sharing",
            "no job shares a microbatch",
            replace(scheme, groups=separate_groups(jobs), moves_samples=False),
        ),
    ]
    rows = [
        _row(outlook, mechanism, instead, _forecast_scheme(outlook, other))
        for mechanism, instead, other in switched
    ]
    others = (*_order_rows(outlook), *_partition_row(outlook), *_group_rows(outlook))
    return (*rows, *others, *_chunk_rows(outlook), *_shard_rows(outlook))


def _row(
    outlook: Outlook, mechanism: str, alternative: str, forecast: Forecast, is_added: bool = False
) -> Ablation:
    return Ablation(
        mechanism, alternative, forecast, forecast.seconds / outlook.forecast.seconds - 1.0, is_added
    )


def _forecast_scheme(outlook: Outlook, scheme: Scheme, placement: Placement | None = None) -> Forecast:
    return run_scheme(scheme, outlook.jobs, placement or outlook.placement).forecast


def _chunk_rows(outlook: Outlook) -> list[Ablation]:
    """Return the effect of cutting samples into chunks of the best size. The list is empty for one device,
    which has no waits that chunks could shorten."""
    capacity = outlook.placement.capacity
    sizes = [size for size in CHUNKS if capacity % size == 0 and size < capacity <= MAX_CHUNKS * size]
    if len(outlook.placement.stages) == 1 or not sizes:
        return []
    by_size = {size: _forecast_chunks(outlook, size) for size in sizes}
    size = min(by_size, key=lambda one: by_size[one].seconds)
    return [_row(outlook, "chunks", f"samples cut into chunks of {size} rows", by_size[size], is_added=True)]


def _forecast_chunks(outlook: Outlook, rows: int) -> Forecast:
    jobs, placement = outlook.jobs, outlook.placement
    laid = pack_scheme(outlook.scheme, jobs, placement, rows)
    longest = max(length for job in jobs for batch in job.batches for length in batch)
    program = chunked_multi_job(laid.work, len(placement.stages), laid.prices, max(longest, rows))
    return simulate_program(f"chunks of {rows}", program, laid.prices, jobs, placement).forecast


def _shard_rows(outlook: Outlook) -> list[Ablation]:
    """Return the effects of tensor parallelism over two devices per stage, without and with overlap of
    compute and communication."""
    placement, stages = outlook.placement, len(outlook.placement.stages)
    if stages % SHARDS or stages != len(placement.case.cluster.devices):
        return []
    try:
        shards = sharded_placement(placement.case, outlook.jobs, placement.capacity, SHARDS)
    except PlanError:
        return []
    scheme = replace(outlook.scheme, moves_samples=True, order=SchemeOrder.alternating)
    plain, hidden = (
        sharded_forecast(shards, SHARDS, scheme, outlook.jobs, hidden) for hidden in (False, True)
    )
    return [
        _row(outlook, "tensor parallelism", f"{SHARDS} devices share each layer", plain, is_added=True),
        _row(outlook, "subgraph order", "the same, collectives behind another group", hidden, is_added=True),
    ]


def _order_rows(outlook: Outlook) -> list[Ablation]:
    """Return the effects of running the chosen groups of jobs with every other pipeline schedule."""
    if len(outlook.placement.stages) == 1:
        return []
    search = Search(outlook.placement, outlook.jobs)
    others = (order for order in (SchemeOrder.gpipe, *PIPELINE_ORDERS) if order is not outlook.scheme.order)
    schemes = [search.sort_groups(replace(outlook.scheme, order=order)) for order in others]
    return [
        _row(outlook, "order", str(scheme.order), _forecast_scheme(outlook, scheme)) for scheme in schemes
    ]


def _partition_row(outlook: Outlook) -> list[Ablation]:
    try:
        blind = cut_stages(outlook.placement.case, outlook.jobs, outlook.placement.capacity, count_ends=False)
    except PlanError:
        return []
    return [
        _row(
            outlook,
            "partition",
            "embedding and head not counted",
            _forecast_scheme(outlook, outlook.scheme, blind),
        )
    ]


def _group_rows(outlook: Outlook) -> list[Ablation]:
    """Return the effects of all groupings of jobs that were not chosen, with the chosen pipeline schedule."""
    search, added = Search(outlook.placement, outlook.jobs), fused_groups(outlook.jobs, outlook.placement)
    rows = []
    for mechanism, groups in (candidates(outlook.jobs, outlook.placement) | added).items():
        if mechanism != outlook.mechanism:
            scheme = search.sort_groups(replace(outlook.scheme, groups=groups, moves_samples=True))
            name = mechanism if mechanism in added else f"groups by {outlook.mechanism}"
            instead = f"groups by {mechanism}"
            rows.append(_row(outlook, name, instead, _forecast_scheme(outlook, scheme), mechanism in added))
    return rows
