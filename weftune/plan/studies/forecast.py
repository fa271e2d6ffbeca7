"""Simulation of one way of running the jobs: its seconds, bubbles and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.pack.merge import Merged
from weftune.plan.program.program import Program
from weftune.plan.program.simulate import Timeline, simulate
from weftune.plan.studies.fit import ClusterCase, Placement
from weftune.plan.studies.ordering import passes_in
from weftune.plan.studies.priced import PricedWork, lay
from weftune.plan.studies.scheme import Scheme
from weftune.plan.window.orders import Passes, assemble


@dataclass(frozen=True, slots=True)
class ForecastRun:
    """A forecast with the program and timeline that it was read from."""

    forecast: Forecast
    program: Program
    timeline: Timeline
    merged: Merged


def run_scheme(
    scheme: Scheme, jobs: Sequence[JobOutline], ground: ClusterCase, layout: Placement
) -> ForecastRun:
    """Lay out the jobs' batches as `scheme` says, order them, and simulate the Program."""
    laid = lay(scheme, jobs, ground, layout)
    passes = passes_in(scheme.order, laid, layout)
    return run_passes(passes, laid, scheme, jobs, ground, layout)


def run_passes(
    passes: Passes,
    laid: PricedWork,
    scheme: Scheme,
    jobs: Sequence[JobOutline],
    ground: ClusterCase,
    layout: Placement,
) -> ForecastRun:
    """Simulate passes that are already ordered."""
    program = assemble(laid.work, passes)
    timeline = simulate(program, laid.prices, ground.cluster.priced())
    held = [stage.state_bytes for stage in layout.stages]
    count = len(laid.work.filled)
    forecast = forecast_of(scheme.name, timeline, jobs, layout, held, count)
    return ForecastRun(forecast, program, timeline, laid.merged)


def forecast_of(
    name: str,
    timeline: Timeline,
    jobs: Sequence[JobOutline],
    layout: Placement,
    held: Sequence[int],
    microbatches: int,
) -> Forecast:
    """Return the forecast of a timeline. `held` are the bytes of adapter state on each device, which the
    timeline does not include."""
    peaks = tuple(peak + state for peak, state in zip(timeline.peaks, held, strict=True))
    rooms = zip(peaks, layout.budgets, strict=True)
    return Forecast(
        name=name,
        seconds=timeline.makespan,
        steps=max(len(job.batches) for job in jobs),
        tokens=sum(map(sum, (batch for job in jobs for batch in job.batches))),
        microbatches=microbatches,
        busy=sum(timeline.busy()) * timeline.makespan,
        devices=timeline.devices,
        peaks=peaks,
        fits=all(peak + layout.beside_bytes <= budget for peak, budget in rooms),
        capacity=layout.capacity,
    )
