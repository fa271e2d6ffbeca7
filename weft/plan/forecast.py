"""One way of running the jobs, simulated: groups, packing, stages and order to seconds, bubbles and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weft.plan.best import Limits
from weft.plan.cost import Line
from weft.plan.estimate import (
    ADAPTER_BACKWARD,
    ATTENTION_BACKWARD,
    BaseLayer,
    JobOutline,
    Rows,
    adapter_seconds,
    base_line,
    square_seconds,
)
from weft.plan.fit import Ground, Layout
from weft.plan.merge import BatchSample, Merged, MergeRules, merge
from weft.plan.pipeline import Work, assemble, gpipe, multi_job, one_forward_one_backward
from weft.plan.price import PassPrice, Prices
from weft.plan.program import (
    Action,
    Backward,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    Placed,
    Program,
    SegmentPlan,
)
from weft.plan.simulate import simulate
from weft.plan.timeline import Timeline

Groups = tuple[tuple[str, ...], ...]
GREEDY = Limits(tries=0, kicks=0, solver_cells=0, room_cells=0)
"""Best fit and nothing else."""
SEARCHED = Limits(tries=1000, kicks=50, solver_cells=0, room_cells=0)
"""Without the solver: the outlook packs the same window many times over."""


class Order(StrEnum):
    one_at_a_time = "one microbatch at a time"
    gpipe = "GPipe"
    alternating = "1F1B"
    multi_job = "multi-job 1F1B"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of running the jobs."""

    name: str
    groups: Groups
    """Jobs that share microbatches; the groups take turns."""
    order: Order = Order.alternating
    limits: Limits = SEARCHED
    shift: bool = True
    """Whether samples may fill up the round before theirs."""


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

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def fits(self, layout: Layout) -> bool:
        needs = (peak + layout.beside_bytes for peak in self.peaks)
        return all(need <= budget for need, budget in zip(needs, layout.budgets, strict=True))

    @property
    def bubbles(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1.0 - self.busy / (self.seconds * self.devices)


@dataclass(frozen=True, slots=True)
class Run:
    """A forecast with what it was read from."""

    forecast: Forecast
    program: Program
    timeline: Timeline
    merged: Merged


def run_scheme(
    scheme: Scheme, jobs: Sequence[JobOutline], ground: Ground, layout: Layout, merged: Merged | None = None
) -> Run:
    """Lay the jobs' batches out as `scheme` says, order them, and simulate the Program.

    `merged` is what a scheme that differs only in its order has laid out already.
    """
    merged = merged or _merged(scheme, jobs, layout)
    work = _work(merged, jobs, layout.capacity)
    prices = _prices(work, jobs, ground, layout)
    program = _ordered(scheme.order, work, prices, len(layout.stages))
    timeline = simulate(program, prices, ground.cluster.priced())
    state = [stage.state_bytes for stage in layout.stages]
    forecast = Forecast(
        name=scheme.name,
        seconds=timeline.makespan,
        steps=max(len(job.batches) for job in jobs),
        tokens=sum(map(sum, (batch for job in jobs for batch in job.batches))),
        microbatches=len(work.filled),
        busy=sum(timeline.busy()) * timeline.makespan,
        devices=len(layout.stages),
        peaks=tuple(peak + held for peak, held in zip(timeline.peaks, state, strict=True)),
    )
    return Run(forecast, program, timeline, merged)


def in_turn(name: str, parts: Sequence[Forecast]) -> Forecast:
    """Runs that follow one another, each over an empty pipeline."""
    return Forecast(
        name=name,
        seconds=sum(part.seconds for part in parts),
        steps=max(part.steps for part in parts),
        tokens=sum(part.tokens for part in parts),
        microbatches=sum(part.microbatches for part in parts),
        busy=sum(part.busy for part in parts),
        devices=parts[0].devices,
        peaks=tuple(map(max, zip(*(part.peaks for part in parts), strict=True))),
    )


def _merged(scheme: Scheme, jobs: Sequence[JobOutline], layout: Layout) -> Merged:
    by_name = {job.name: job for job in jobs}
    rounds = []
    for step in range(max(len(job.batches) for job in jobs)):
        for group in scheme.groups:
            samples = [
                BatchSample(name, step + 1, number, length)
                for name in group
                if step < len(by_name[name].batches)
                for number, length in enumerate(by_name[name].batches[step])
            ]
            rounds += [samples] if samples else []
    rules = MergeRules(layout.capacity, len(layout.stages), limits=scheme.limits)
    return merge(rounds, rules, shift=scheme.shift)


def _work(merged: Merged, jobs: Sequence[JobOutline], capacity: int) -> Work:
    batches = [
        _batch(job.name, step, lengths) for job in jobs for step, lengths in enumerate(job.batches, start=1)
    ]
    placed = {(batch.job, batch.step): batch.samples for batch in batches}
    microbatches = []
    for microbatch in merged.microbatches:
        held: dict[tuple[str, int], list[Placed]] = {}
        for one in microbatch:
            held.setdefault((one.job, one.batch), []).append(placed[one.job, one.batch][one.sample])
        segments = (SegmentPlan(job, step, tuple(samples)) for (job, step), samples in held.items())
        microbatches.append(MicrobatchPlan(tuple(segments)))
    return Work(capacity, tuple(microbatches), tuple(batches))


def _batch(job: str, step: int, lengths: Sequence[int]) -> GlobalBatch:
    samples, offset = [], 0
    for number, length in enumerate(lengths):
        samples.append(Placed(number, length, offset))
        offset += length
    return GlobalBatch(job, step, tuple(samples), supervised=offset)


@dataclass(frozen=True, slots=True)
class _StageRates:
    """What a stage takes on its device: the sums over its layers, made once for all microbatches."""

    line: Line
    square: float
    adapters: Mapping[str, float]
    """For each job: a forward's seconds for each of its tokens."""
    kept_bytes: int
    handed_bytes: int
    again: float
    """How much of a forward the backward makes again."""

    def price(self, rows: Rows) -> PassPrice:
        line, square = self.line(rows.tokens), self.square * rows.squares
        added = sum(self.adapters[job] * tokens for job, tokens in rows.by_job.items())
        forward = line + square + added
        backward = line + ATTENTION_BACKWARD * square + ADAPTER_BACKWARD * added
        return PassPrice(
            forward=forward,
            backward=backward + self.again * forward,
            activation_bytes=self.handed_bytes * rows.tokens,
            gradient_bytes=self.handed_bytes * rows.tokens,
            kept_bytes=self.kept_bytes * rows.tokens,
        )


def _prices(work: Work, jobs: Sequence[JobOutline], ground: Ground, layout: Layout) -> Prices:
    rates = []
    for cut, speed in zip(layout.stages, ground.speeds, strict=False):
        layers = ground.layers[cut.start : cut.stop]
        rates.append(
            _StageRates(
                base_line(layers, speed),
                square_seconds(layers, speed),
                {job.name: adapter_seconds(layers, job, speed) for job in jobs},
                sum(layer.kept_bytes for layer in layers),
                layers[0].handed_bytes,
                made_again(layers, ground),
            )
        )
    passes = [tuple(rate.price(_rows(microbatch)) for rate in rates) for microbatch in work.microbatches]
    return Prices(tuple(passes), weight_bytes=tuple(stage.weight_bytes for stage in layout.stages))


def made_again(layers: Sequence[BaseLayer], ground: Ground) -> float:
    """The head's forward is never made again."""
    if not ground.recompute.layers:
        return 0.0
    flops = sum(layer.flops for layer in layers)
    return sum(layer.flops for layer in layers if layer.kind == "layer") / max(1, flops)


def _rows(microbatch: MicrobatchPlan) -> Rows:
    squares = sum(placed.length**2 for segment in microbatch.segments for placed in segment.samples)
    by_job = {segment.job: segment.tokens for segment in microbatch.segments}
    return Rows(microbatch.tokens, squares, by_job)


def _ordered(order: Order, work: Work, prices: Prices, stages: int) -> Program:
    match order:
        case Order.gpipe:
            return gpipe(work, stages)
        case Order.alternating:
            return one_forward_one_backward(work, stages)
        case Order.multi_job:
            return multi_job(work, stages, prices)
    lists: list[list[Action]] = [
        [action for number in work.filled for action in (Forward(number, stage), Backward(number, stage))]
        for stage in range(stages)
    ]
    return assemble(work, lists)
