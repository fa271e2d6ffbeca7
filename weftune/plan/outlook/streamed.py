"""Forecast for a base that is streamed from host memory: the time of a round (one global batch of every job)
with the chosen layout and with others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import max_sample_tokens
from weftune.plan.layout.choose import LayoutChoice
from weftune.plan.layout.need import StreamCase, draft_from_layout
from weftune.plan.layout.search import largest_drafts, smallest_drafts
from weftune.plan.outlook.forecast import ALONE, Ablation, Forecast, sum_forecasts
from weftune.plan.program.layout import Layout
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.program import Program
from weftune.plan.program.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True)
class StreamOutlook:
    """The forecast for a base that is streamed from host memory, with the forecasts of other ways to run the
    jobs."""

    choice: LayoutChoice
    case: StreamCase
    """Base, jobs and device for which the layout was chosen, as input of the formulas for a streamed base."""
    forecast: Forecast
    """Forecast of a round: one global batch of every job."""
    alternatives: tuple[Forecast, ...]

    @property
    def workers(self) -> int:
        return self.choice.layout.workers

    @property
    def uploaded_bytes(self) -> int:
        """Bytes of layers that are copied to the devices per round (one global batch of every job). A stage
        that is still in its slot (its place in device memory) is not copied again."""
        layout, layers = self.choice.layout, 0
        for worker in range(self.workers):
            own = layout.for_worker(worker)
            sizes = [layout.stages[stage].layer_count for stage in own.streamed_stages]
            still_there = sum(sizes[: own.slot_count]) + sum(sizes[len(sizes) - own.slot_count :])
            layers += 2 * sum(sizes) - still_there
        return layers * self.case.memory.layer_bytes * layout.shards


def stream_outlook(choice: LayoutChoice) -> StreamOutlook:
    case = streaming_case(choice, choice.attached_jobs)
    forecast = _forecast_round(case, choice.layout)
    alone = [_forecast_round(streaming_case(choice, [job]), choice.layout) for job in choice.attached_jobs]
    plain = [
        replace(_forecast_round(case, cut), name=name) for name, cut in _mobius_layouts(case, choice.layout)
    ]
    return StreamOutlook(choice, case, forecast, (replace(sum_forecasts(alone), name=ALONE), *plain))


def streaming_case(choice: LayoutChoice, jobs: Sequence[JobShape]) -> StreamCase:
    """Return the base, device and given jobs as input of the formulas by which a base is streamed."""
    assert choice.stream_device is not None, "it is streamed"
    tokens = max(sum(job.batch_tokens for job in jobs), max_sample_tokens(jobs))
    layout = choice.layout
    return StreamCase(
        choice.shape,
        tuple(jobs),
        choice.stream_device,
        tokens,
        choice.capacity,
        layout.adapters_travel,
        layout.offloads_inputs,
        layout.workers,
    )


def _forecast_round(case: StreamCase, layout: Layout) -> Forecast:
    """Return the forecast of a round (one global batch of every job) with this layout, by the formula that
    the search for layouts uses."""
    draft = draft_from_layout(layout)
    seconds, waiting_fraction, need = (
        case.round_seconds(draft),
        case.waiting_fraction(draft),
        case.device_bytes(draft),
    )
    devices = layout.workers * layout.shards
    return Forecast(
        name="weftune",
        seconds=seconds,
        steps=1,
        tokens=case.round_tokens,
        microbatches=math.ceil(case.round_tokens / case.capacity),
        busy_seconds=seconds * (1.0 - waiting_fraction) * devices,
        devices=devices,
        peaks=(need - case.device.slack_bytes,) * devices,
        fits=need <= case.device.budget_bytes,
        capacity=case.capacity,
    )


def _mobius_layouts(case: StreamCase, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield the names and layouts of two partitions from the Mobius paper, the largest and the smallest
    possible stages, on one device, if they fit in memory."""
    if layout.workers > 1:
        return
    for name, drafts in (("largest stages", largest_drafts), ("smallest stages", smallest_drafts)):
        fitting = [draft for draft in drafts(case) if case.fits(draft)]
        if fitting:
            best = min(fitting, key=case.round_seconds)
            yield name, best.make_layout(layout.adapters_travel, layout.offloaded_rows, layout.shards)


def ablate_streamed_plan(outlook: StreamOutlook) -> tuple[Ablation, ...]:
    """Return the effects of dividing a streamed base into Mobius's stages, of loading stages without
    prefetch, and of streaming all stages, compared with the plan. All other choices of the plan are kept.
    Layouts that do not fit in memory are omitted."""
    layout = outlook.choice.layout
    others = [("streamed stages", name, cut) for name, cut in _mobius_layouts(outlook.case, layout)]
    if max(layout.slot_counts) > 1:
        ahead = "one slot: a stage is loaded once the previous one is evicted"
        slots = tuple(min(1, count) for count in layout.slot_counts)
        others.append(("prefetch", ahead, replace(layout, slot_counts=slots)))
    if any(stage.is_resident for stage in layout.stages):
        passing = tuple(replace(stage, is_resident=False) for stage in layout.stages)
        slots = tuple(max(1, count) for count in layout.slot_counts)
        streamed = replace(layout, stages=passing, slot_counts=slots)
        others.append(("resident stages", "every stage is streamed", streamed))
    rows = [(mechanism, instead, _forecast_round(outlook.case, cut)) for mechanism, instead, cut in others]
    return tuple(
        Ablation(mechanism, instead, forecast, forecast.seconds / outlook.forecast.seconds - 1.0)
        for mechanism, instead, forecast in rows
        if forecast.fits and forecast.seconds < math.inf
    )


def round_timeline(case: StreamCase, layout: Layout, program: Program) -> Timeline:
    """Return the simulated timeline of the passes and Load actions of `program`, at the speeds for which the
    layout was chosen. Transfers of optimizer state and of offloaded inputs are not simulated."""
    sizes = [stage.layer_count for stage in layout.stages]
    by_rows = {rows: _pass_prices(case, sizes, rows) for rows in {one.rows for one in program.microbatches}}
    prices = Prices(
        tuple(by_rows[one.rows] for one in program.microbatches),
        weight_bytes=tuple(size * case.memory.layer_bytes for size in sizes),
    )
    return simulate(program, prices, PricedCluster(layout.workers, host_link=Link(case.link_bandwidth)))


def _pass_prices(case: StreamCase, sizes: Sequence[int], rows: int) -> tuple[PassPrice, ...]:
    """Return the cost of one microbatch on every stage of a streamed base."""
    one = replace(case, round_tokens=rows, capacity=rows)
    return tuple(
        PassPrice(stage.forward_seconds, stage.backward_seconds) for stage in one.stage_rounds(sizes)
    )
