"""The jobs' next global batches laid out as microbatches, with the cost of each on every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weftune.plan.cost.estimate import (
    ADAPTER_BACKWARD,
    ATTENTION_BACKWARD,
    BaseLayer,
    JobOutline,
    RowCounts,
    Speed,
    adapter_seconds,
    base_line,
    square_seconds,
)
from weftune.plan.cost.layers import StageCost
from weftune.plan.cost.time import Line
from weftune.plan.pack.merge import BatchSample, Merged, MergeRules, merge
from weftune.plan.program.prices import PassPrice, Prices
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample, SegmentPlan
from weftune.plan.studies.fit import ClusterCase, Placement
from weftune.plan.studies.scheme import Groups, Scheme
from weftune.plan.window.orders import Work


@dataclass(frozen=True, slots=True)
class PricedWork:
    """A scheme's microbatches before they are ordered: any order can be made from it."""

    merged: Merged
    work: Work
    prices: Prices


def lay(scheme: Scheme, jobs: Sequence[JobOutline], ground: ClusterCase, layout: Placement) -> PricedWork:
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
    merged = merge(rounds, rules, shift=scheme.shift)
    work = make_work(merged, jobs, layout.capacity)
    rates = [
        stage_rates(cut, jobs, ground, speed)
        for cut, speed in zip(layout.stages, ground.speeds, strict=False)
    ]
    prices = price_all(work.microbatches, rates, layout.stages)
    return PricedWork(merged, work, prices)


def make_work(merged: Merged, jobs: Sequence[JobOutline], capacity: int) -> Work:
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
    return GlobalBatch(job, step, tuple(samples), supervised=offset)


def slowest_first(laid: PricedWork, groups: Groups) -> Groups:
    """Return the groups as the pipeline template takes them: sorted by the time of their microbatches on
    stage 0, slowest first."""
    home = {job: number for number, group in enumerate(groups) for job in group}
    seconds: list[list[float]] = [[] for _ in groups]
    for number, microbatch in enumerate(laid.merged.microbatches):
        if microbatch:
            first = laid.prices.passes[number][0]
            # Samples moved into a microbatch from the next round come after its own samples.
            seconds[home[microbatch[0].job]].append(first.forward + first.backward)
    paces = [sum(each) / len(each) if each else 0.0 for each in seconds]
    return tuple(groups[number] for number in sorted(range(len(groups)), key=lambda one: -paces[one]))


@dataclass(frozen=True, slots=True)
class StageRates:
    """Costs of a stage on its device: sums over its layers, computed once for all microbatches."""

    line: Line
    square: float
    adapters: Mapping[str, float]
    """Job → seconds of a forward per token of the job."""
    kept_bytes: int
    handed_bytes: int
    again: float
    """Share of a forward that the backward recomputes."""
    working_bytes: int = 0

    def price(self, rows: RowCounts) -> PassPrice:
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
            working_bytes=self.working_bytes * rows.tokens,
        )


def stage_rates(cut: StageCost, jobs: Sequence[JobOutline], ground: ClusterCase, speed: Speed) -> StageRates:
    layers = ground.layers[cut.start : cut.stop]
    return StageRates(
        base_line(layers, speed),
        square_seconds(layers, speed),
        {job.name: adapter_seconds(layers, job, speed) for job in jobs},
        sum(layer.kept_bytes for layer in layers),
        layers[0].handed_bytes,
        made_again(layers, ground),
    )


def price_all(
    microbatches: Sequence[MicrobatchPlan], rates: Sequence[StageRates], stages: Sequence[StageCost]
) -> Prices:
    held = [_rows(microbatch) for microbatch in microbatches]
    passes = tuple(tuple(rate.price(rows) for rate in rates) for rows in held)
    return Prices(passes, weight_bytes=tuple(stage.weight_bytes for stage in stages))


def made_again(layers: Sequence[BaseLayer], ground: ClusterCase) -> float:
    """Return the share of a forward that is recomputed; the head's forward never is."""
    if not ground.recompute.layers:
        return 0.0
    flops = sum(layer.flops for layer in layers)
    return sum(layer.flops for layer in layers if layer.kind == "layer") / max(1, flops)


def _rows(microbatch: MicrobatchPlan) -> RowCounts:
    squares = sum(placed.length**2 for segment in microbatch.segments for placed in segment.samples)
    by_job: dict[str, int] = {}
    for segment in microbatch.segments:
        by_job[segment.job] = by_job.get(segment.job, 0) + segment.tokens
    return RowCounts(sum(by_job.values()), squares, by_job)
