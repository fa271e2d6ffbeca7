"""One way of running the jobs, ordered and simulated: its seconds, bubbles and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.outlook.fit import Ground, Placement
from weftune.plan.outlook.ordering import passes_in
from weftune.plan.outlook.priced import PricedWork, lay
from weftune.plan.outlook.scheme import Scheme
from weftune.plan.pack.merge import Merged
from weftune.plan.program.program import Program
from weftune.plan.program.simulate import simulate
from weftune.plan.program.timeline import Timeline
from weftune.plan.window.orders import Passes, assemble


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a window comes to."""

    name: str
    seconds: float
    steps: int
    """Rounds: global batches of the job that has most."""
    tokens: int
    microbatches: int
    busy: float
    """Seconds in which devices compute, summed over them."""
    devices: int
    peaks: tuple[int, ...]
    """Bytes on each device, weights and adapters included, slack not."""
    fits: bool
    """Whether each device has room for its peak."""
    capacity: int

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bubbles(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1.0 - self.busy / (self.seconds * self.devices)


@dataclass(frozen=True, slots=True)
class ForecastRun:
    """A forecast with what it was read from."""

    forecast: Forecast
    program: Program
    timeline: Timeline
    merged: Merged


def run_scheme(scheme: Scheme, jobs: Sequence[JobOutline], ground: Ground, layout: Placement) -> ForecastRun:
    """Lay the jobs' batches out as `scheme` says, order them, and simulate the Program."""
    laid = lay(scheme, jobs, ground, layout)
    passes = passes_in(scheme.order, laid, layout)
    return run_passes(passes, laid, scheme, jobs, ground, layout)


def run_passes(
    passes: Passes,
    laid: PricedWork,
    scheme: Scheme,
    jobs: Sequence[JobOutline],
    ground: Ground,
    layout: Placement,
) -> ForecastRun:
    """The same where the order is there already."""
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
    """`held` are the bytes of adapter state on each device, which the timeline does not know of."""
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


def in_turn(parts: Sequence[Forecast]) -> Forecast:
    """Runs that follow one another, each over an empty pipeline; the name is that of the first."""
    return Forecast(
        name=parts[0].name,
        seconds=sum(part.seconds for part in parts),
        steps=max(part.steps for part in parts),
        tokens=sum(part.tokens for part in parts),
        microbatches=sum(part.microbatches for part in parts),
        busy=sum(part.busy for part in parts),
        devices=parts[0].devices,
        peaks=tuple(map(max, zip(*(part.peaks for part in parts), strict=True))),
        fits=all(part.fits for part in parts),
        capacity=parts[0].capacity,
    )
