"""Time model of passes over the base, Steps and Saves: a sum of named terms, forward and backward separate.

Terms are seconds per unit of an action's content. They come from a profile of the device, or from the
arithmetic of the base, and are refitted to what a run measures (`refit.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.pack.instance import pack
from weftune.plan.program.program import (
    Evaluate,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    Program,
    Save,
    Step,
)

JobShapes = Mapping[str, JobShape]
"""Name → shape of every attached job."""


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed + per_token · tokens, both at least 0."""

    fixed: float
    per_token: float

    def __call__(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """The counts of a pass that determine its time."""

    tokens: int
    """Number of rows, padding included."""
    squares: int
    """Sum of the squared lengths of its samples, to which the cost of attention is proportional."""
    samples: int
    supervised: int
    """Number of rows that go through the head."""
    adapted: int
    """Adapter parameters that each row is multiplied by (widths times rank, over sites), summed over rows."""
    segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of one direction of a pass, per unit of each count in `PassWork`; none is below 0."""

    fixed: float = 0.0
    token: float = 0.0
    square: float = 0.0
    sample: float = 0.0
    supervised: float = 0.0
    adapter: float = 0.0
    segment: float = 0.0

    def __call__(self, work: PassWork) -> float:
        return sum(each * count for each, count in zip(self.values(), counts(work), strict=True))

    def values(self) -> tuple[float, ...]:
        return (
            self.fixed, self.token, self.square, self.sample, self.supervised, self.adapter, self.segment,
        )  # fmt: skip

    def times(self, factor: float) -> Terms:
        return terms_of([factor * value for value in self.values()])

    def plus(self, other: Terms) -> Terms:
        return terms_of([mine + theirs for mine, theirs in zip(self.values(), other.values(), strict=True)])


TERMS = ("fixed", "token", "square", "sample", "supervised", "adapter", "segment")
"""Names of the terms, in the order of `Terms.values` and of `counts`."""


def terms_of(values: Iterable[float]) -> Terms:
    return Terms(**dict(zip(TERMS, values, strict=True)))


def counts(work: PassWork) -> tuple[int, ...]:
    """Return the number of units of each term in a pass."""
    return 1, work.tokens, work.squares, work.samples, work.supervised, work.adapted, work.segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Seconds per job and per parameter of Steps or Saves that are executed together."""

    job: float = 0.0
    parameter: float = 0.0

    def __call__(self, jobs: int, parameters: int) -> float:
        return self.job * jobs + self.parameter * parameters

    def plus(self, other: Rate) -> Rate:
        return Rate(job=self.job + other.job, parameter=self.parameter + other.parameter)


NO_TIME = Rate()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """One measured pass."""

    work: PassWork
    forward: float
    backward: float
    training: bool
    settled: bool = True
    """False if kernels were compiled or a graph was captured: its time does not predict the next."""

    @property
    def tokens(self) -> int:
        return self.work.tokens

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class StateTime:
    """Measured time of Steps that were executed together, or of one Save."""

    jobs: int
    parameters: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    forward: Terms
    backward: Terms
    evaluation: Terms
    step: Rate = Rate()
    save: Rate = Rate()
    between: float = 0.0
    """Host seconds per action that no other measurement covers."""
    source: str
    """Origin of the terms, for display."""
    measured: bool = True
    """False while only the proportions of the terms are known, not their level."""

    def pass_seconds(self, work: PassWork) -> float:
        """Return the seconds of forward and backward."""
        return self.forward(work) + self.backward(work)

    def program_seconds(self, program: Program, shapes: JobShapes) -> float | None:
        """Return the predicted time of a program, or None while nothing like it has been measured."""
        if not self.measured:
            return None
        total, met = 0.0, met_by(shapes)
        for action in program.actions:
            match action:
                case Forward(number, stage=0):
                    total += self.pass_seconds(work_of(program.microbatches[number], met)) + self.between
                case Evaluate(number, stage=0):
                    total += self.evaluation(work_of(program.microbatches[number], met)) + self.between
                case Step(job):
                    total += self.step(1, shapes[job].trainable) + self.between
                case Save(job):
                    total += self.save(1, shapes[job].trainable) + self.between
        return total

    def alone_seconds(self, batches: Iterable[GlobalBatch], capacity: int, shapes: JobShapes) -> float | None:
        """Return the seconds of the passes of these batches if every job packed its samples alone."""
        if not self.measured:
            return None
        # Terms are linear, so they are applied once to the summed counts instead of to thousands of passes.
        whole = [sum(column) for column in zip(*_alone(batches, capacity, met_by(shapes)), strict=True)]
        each = zip(self.forward.plus(self.backward).values(), whole, strict=False)
        return sum(term * count for term, count in each)

    def times(self, factor: float) -> CostModel:
        """Return the same proportions scaled by `factor`."""
        return replace(
            self,
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            evaluation=self.evaluation.times(factor),
        )


def met_by(shapes: JobShapes) -> dict[str, int]:
    """Return a mapping of job → adapter parameters that a row is multiplied by."""
    return {name: shape.met for name, shape in shapes.items()}


def _alone(
    batches: Iterable[GlobalBatch], capacity: int, met: Mapping[str, int]
) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Yield the units of each term for every pass, if no two batches share a pass."""
    for batch in batches:
        lengths = [placed.length for placed in batch.samples]
        fits = sum(lengths) <= capacity
        for chosen in [range(len(lengths))] if fits else pack(lengths, capacity):
            own = [lengths[index] for index in chosen]
            tokens = sum(own)
            supervised = sum([batch.samples[index].supervised for index in chosen])
            squares = sum([length * length for length in own])
            yield 1, tokens, squares, len(own), supervised, tokens * met[batch.job], 1


def work_of(microbatch: MicrobatchPlan, met: Mapping[str, int]) -> PassWork:
    samples = [placed for segment in microbatch.segments for placed in segment.samples]
    return PassWork(
        tokens=microbatch.rows,
        squares=sum(placed.length**2 for placed in samples),
        samples=len(samples),
        supervised=sum(placed.supervised for placed in samples),
        adapted=sum(segment.tokens * met[segment.job] for segment in microbatch.segments),
        segments=len(microbatch.segments),
    )
