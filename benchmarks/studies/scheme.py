"""Schemes, which say how jobs share microbatches and in which order these run, and their simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.studies.placement import ClusterCase, Placement
from weftune.plan.cost.estimate import (
    ADAPTER_BACKWARD,
    ATTENTION_BACKWARD,
    BaseLayer,
    JobOutline,
    RowCounts,
    adapter_seconds,
    base_pass_time,
    square_seconds,
)
from weftune.plan.cost.streamed_memory import ON_THE_WAY
from weftune.plan.cost.time import Line
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.pack.best import Limits
from weftune.plan.pack.merge import BatchSample, Merged, MergeRules, merge
from weftune.plan.program.prices import Link, PassPrice, Prices
from weftune.plan.program.program import (
    Action,
    Backward,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    SegmentPlan,
)
from weftune.plan.program.simulate import Timeline, simulate
from weftune.plan.window.orders import (
    Passes,
    Work,
    alternating_passes,
    assemble,
    cut_long_samples,
    eager_passes,
    gpipe_passes,
    multi_job_passes,
)

Groups = tuple[tuple[str, ...], ...]
SEARCHED = Limits(max_exchanges=1000)
"""Limits of packing, lower than those of windows, since a forecast packs the same window many times."""


class SchemeOrder(StrEnum):
    gpipe = "GPipe"
    alternating = "1F1B"
    multi_job = "multi-job 1F1B"
    template = "pipeline template"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The way in which jobs share microbatches, microbatches are packed, and their passes are ordered."""

    name: str
    groups: Groups
    """Groups of jobs that share microbatches. The groups alternate."""
    order: SchemeOrder = SchemeOrder.alternating
    limits: Limits = SEARCHED
    moves_samples: bool = True
    """Whether samples may be moved into microbatches of the preceding round that are not full."""


def separate_groups(jobs: Sequence[JobOutline]) -> Groups:
    return tuple((job.name,) for job in jobs)


# -- layout and prices -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PricedWork:
    """A scheme's microbatches and their costs, before they are ordered."""

    work: Work
    prices: Prices


def pack_scheme(
    scheme: Scheme, jobs: Sequence[JobOutline], placement: Placement, chunk_rows: int | None = None
) -> PricedWork:
    """Return the jobs' next global batches packed into microbatches, with the cost of each on every stage.
    With `chunk_rows`, microbatches have at most this many rows, and longer samples are cut into chunks."""
    max_rows = chunk_rows or placement.capacity
    by_name = {job.name: job for job in jobs}
    rounds = []
    for step in range(max(len(job.batches) for job in jobs)):
        for group in scheme.groups:
            samples = [
                BatchSample(name, step + 1, number, min(length, max_rows))
                for name in group
                if step < len(by_name[name].batches)
                for number, length in enumerate(by_name[name].batches[step])
            ]
            rounds += [samples] if samples else []
    rules = MergeRules(max_rows, len(placement.stages), limits=scheme.limits)
    merged = merge(rounds, rules, moves_samples=scheme.moves_samples)
    work = cut_long_samples(_work(merged, jobs, placement.capacity), max_rows)
    return PricedWork(work, price_rows([_rows(one) for one in work.microbatches], jobs, placement))


def _work(merged: Merged, jobs: Sequence[JobOutline], capacity: int) -> Work:
    batches = [
        make_batch(job.name, step, lengths)
        for job in jobs
        for step, lengths in enumerate(job.batches, start=1)
    ]
    placed = {(batch.job, batch.step): batch.samples for batch in batches}
    microbatches = []
    for microbatch in merged.microbatches:
        held: dict[tuple[str, int], list[PlacedSample]] = {}
        for one in microbatch:
            held.setdefault((one.job, one.batch), []).append(placed[one.job, one.batch][one.sample])
        segments = (SegmentPlan(job, step, tuple(samples)) for (job, step), samples in held.items())
        microbatches.append(MicrobatchPlan(tuple(segments)))
    return Work(capacity, tuple(microbatches), tuple(batches))


def make_batch(job: str, step: int, lengths: Sequence[int]) -> GlobalBatch:
    samples, offset = [], 0
    for number, length in enumerate(lengths):
        samples.append(PlacedSample(number, length, offset))
        offset += length
    return GlobalBatch(job, step, tuple(samples), supervised_tokens=offset)


def slowest_first(priced: PricedWork, groups: Groups) -> Groups:
    """Return the groups sorted by their mean time on the first stage, the slowest first, as the template
    order of pipelines requires."""
    home = {job: number for number, group in enumerate(groups) for job in group}
    seconds: list[list[float]] = [[] for _ in groups]
    for number in priced.work.filled_microbatches:
        first = priced.prices.passes[number][0]
        # Samples moved into a microbatch from the next round come after its own samples.
        job = priced.work.microbatches[number].segments[0].job
        seconds[home[job]].append(first.forward + first.backward)
    paces = [sum(each) / len(each) if each else 0.0 for each in seconds]
    return tuple(groups[number] for number in sorted(range(len(groups)), key=lambda one: -paces[one]))


@dataclass(frozen=True, slots=True)
class StageRates:
    """Costs of a stage per token or per squared length, summed over its layers, from which the cost of any
    microbatch follows."""

    line: Line
    seconds_per_square: float
    adapters: Mapping[str, float]
    """Maps each job to the seconds per token that its adapters add to a forward."""
    kept_bytes: int
    output_bytes: int
    recomputed_share: float
    """Fraction of a forward that the backward recomputes."""

    def price(self, rows: RowCounts) -> PassPrice:
        line, square = self.line(rows.tokens), self.seconds_per_square * rows.squared_lengths
        added = sum(self.adapters[job] * tokens for job, tokens in rows.tokens_by_job.items())
        forward = line + square + added
        backward = line + ATTENTION_BACKWARD * square + ADAPTER_BACKWARD * added
        return PassPrice(
            forward=forward,
            backward=backward + self.recomputed_share * forward,
            activation_bytes=self.output_bytes * rows.tokens,
            gradient_bytes=self.output_bytes * rows.tokens,
            kept_bytes=self.kept_bytes * rows.tokens,
        )


def price_rows(rows: Sequence[RowCounts], jobs: Sequence[JobOutline], placement: Placement) -> Prices:
    """Return the cost on every stage of microbatches with these token counts."""
    rates = []
    for number, speed in zip(range(len(placement.stages)), placement.case.speeds, strict=False):
        layers = placement.layers(number)
        rates.append(
            StageRates(
                base_pass_time(layers, speed),
                square_seconds(layers, speed),
                {job.name: adapter_seconds(layers, job, speed) for job in jobs},
                sum(layer.kept_bytes for layer in layers),
                layers[0].output_bytes,
                recomputed_share(layers, placement.case),
            )
        )
    passes = tuple(tuple(rate.price(one) for rate in rates) for one in rows)
    return Prices(passes, weight_bytes=tuple(stage.weight_bytes for stage in placement.stages))


def recomputed_share(layers: Sequence[BaseLayer], case: ClusterCase) -> float:
    """Return the fraction of a forward through these layers that the backward recomputes. The forward of the
    head is never recomputed."""
    if not case.recompute.recomputed_layers:
        return 0.0
    flops = sum(layer.flops for layer in layers)
    return sum(layer.flops for layer in layers if layer.kind == "layer") / max(1, flops)


def _rows(microbatch: MicrobatchPlan) -> RowCounts:
    squares = sum(placed.squares for segment in microbatch.segments for placed in segment.samples)
    by_job: dict[str, int] = {}
    for segment in microbatch.segments:
        by_job[segment.job] = by_job.get(segment.job, 0) + segment.tokens
    return RowCounts(sum(by_job.values()), squares, by_job)


# -- order --------------------------------------------------------------------------------------------------


def order_passes(order: SchemeOrder, priced: PricedWork, placement: Placement) -> Passes:
    work, stages = priced.work, len(placement.stages)
    match order:
        case SchemeOrder.gpipe:
            return gpipe_passes(work, stages)
        case SchemeOrder.alternating:
            return alternating_passes(work, stages)
        case SchemeOrder.multi_job:
            return multi_job_passes(work, stages, priced.prices)
        case SchemeOrder.template:
            # Microbatches in flight may keep all bytes that weights, adapters and transport do not need.
            rooms = (
                max(
                    stage.kept_bytes,
                    budget
                    - (stage.resident_bytes(0) + placement.other_bytes)
                    - ON_THE_WAY * stage.activation_bytes,
                )
                for stage, budget in zip(placement.stages, placement.budgets, strict=True)
            )
            return eager_passes(work, priced.prices, tuple(rooms))


def least_seconds(passes: Passes, prices: Prices, link: Link) -> float:
    """Return a lower bound on the seconds of a simulation of these passes. It is exact if no transfer waits
    for another one. Stage s is on device s. This function finds the orders that are worth simulating."""
    clock = _Clock(prices, link, len(passes))
    reached = [0] * len(passes)
    sweep, moved = list(range(len(passes))), True
    while moved:
        before = list(reached)
        for stage in sweep:
            reached[stage] = clock.run(stage, passes[stage], reached[stage])
        moved = reached != before
        # Forward times propagate down the stages, backward times up.
        sweep.reverse()
    assert reached == [len(actions) for actions in passes], "an order whose devices wait for each other"
    return max(clock.free)


class _Clock:
    """The times at which the results of passes arrive. Each is computed as soon as the arrival time of the
    pass's input is known."""

    def __init__(self, prices: Prices, link: Link, stages: int) -> None:
        self.prices, self.link, self.last = prices, link, stages - 1
        self.free = [0.0] * stages
        self.forwards: list[dict[int, float]] = [{} for _ in range(stages)]
        """For each receiving stage, a dict from each microbatch to the arrival time of its activation."""
        self.back: list[dict[int, float]] = [{} for _ in range(stages)]

    def run(self, stage: int, actions: Sequence[Action], start: int) -> int:
        """Process the actions of a stage from index `start` to the first one whose input time is unknown, and
        return the index of that action."""
        forwards, back, free = self.forwards[stage], self.back[stage], self.free[stage]
        prices, link = self.prices.passes, self.link
        for index in range(start, len(actions)):
            action = actions[index]
            assert isinstance(action, Forward | Backward)
            number, price = action.microbatch, prices[action.microbatch][stage]
            goes_forward = isinstance(action, Forward)
            came = 0.0 if goes_forward and not stage else (forwards if goes_forward else back).get(number)
            if came is None:
                self.free[stage] = free
                return index
            free = max(free, came) + (price.forward if goes_forward else price.backward)
            if not goes_forward:
                if stage:
                    self.back[stage - 1][number] = free + link.seconds(price.gradient_bytes)
            elif stage == self.last:
                back[number] = free
            else:
                self.forwards[stage + 1][number] = free + link.seconds(price.activation_bytes)
        self.free[stage] = free
        return len(actions)


# -- simulation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForecastRun:
    """A forecast with the Program and the simulated timeline that it was computed from."""

    forecast: Forecast
    program: Program
    timeline: Timeline


def run_scheme(scheme: Scheme, jobs: Sequence[JobOutline], placement: Placement) -> ForecastRun:
    """Pack and order the jobs' batches according to `scheme`, and simulate the resulting Program."""
    laid = pack_scheme(scheme, jobs, placement)
    return run_passes(scheme.name, order_passes(scheme.order, laid, placement), laid, jobs, placement)


def run_passes(
    name: str, passes: Passes, priced: PricedWork, jobs: Sequence[JobOutline], placement: Placement
) -> ForecastRun:
    """Simulate passes that are already ordered."""
    return simulate_program(name, assemble(priced.work, passes), priced.prices, jobs, placement)


def simulate_program(
    name: str, program: Program, prices: Prices, jobs: Sequence[JobOutline], placement: Placement
) -> ForecastRun:
    timeline = simulate(program, prices, placement.case.cluster.simulator_cluster())
    # The timeline does not include adapter state.
    states = (stage.state_bytes for stage in placement.stages)
    peaks = tuple(peak + state for peak, state in zip(timeline.peaks, states, strict=True))
    rooms = zip(peaks, placement.budgets, strict=True)
    forecast = Forecast(
        name=name,
        seconds=timeline.makespan,
        steps=max(len(job.batches) for job in jobs),
        tokens=sum(map(sum, (batch for job in jobs for batch in job.batches))),
        microbatches=sum(bool(one.segments) for one in program.microbatches),
        busy_seconds=sum(timeline.busy_fractions()) * timeline.makespan,
        devices=timeline.devices,
        peaks=peaks,
        fits=all(peak + placement.other_bytes <= budget for peak, budget in rooms),
        capacity=placement.capacity,
    )
    return ForecastRun(forecast, program, timeline)
