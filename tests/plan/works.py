"""Work for pipelines: jobs whose microbatches each hold one sample."""

from collections.abc import Sequence

from weftune.plan.program.prices import PassPrice, Prices
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample, SegmentPlan
from weftune.plan.window.orders import Work


def batch(job: str, step: int, microbatches: int) -> tuple[GlobalBatch, tuple[MicrobatchPlan, ...]]:
    samples = tuple(PlacedSample(i, 1, i) for i in range(microbatches))
    held = tuple(MicrobatchPlan((SegmentPlan(job, step, (one,)),)) for one in samples)
    return GlobalBatch(job, step, samples, microbatches), held


def work(jobs: int, steps: int, microbatches: int) -> Work:
    """Round after round, every job sends one batch of so many microbatches."""
    made = [batch(f"job{job}", step, microbatches) for step in range(1, steps + 1) for job in range(jobs)]
    return Work(8, tuple(one for _, held in made for one in held), tuple(one for one, _ in made))


def even_prices(microbatches: int, stages: int, forward: float = 1.0, backward: float = 1.0) -> Prices:
    """Return prices with identical passes, in which only passes take time."""
    return Prices(((PassPrice(forward, backward, kept_bytes=1),) * stages,) * microbatches)


def stage_prices(rows: Sequence[Sequence[tuple[float, float]]]) -> Prices:
    """Return prices made from (forward, backward) seconds of each microbatch on each stage."""
    return Prices(tuple(tuple(PassPrice(f, b, kept_bytes=1) for f, b in row) for row in rows))
