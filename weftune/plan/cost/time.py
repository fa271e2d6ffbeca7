"""How long passes over the base, Steps and Saves take: a sum of named terms, forward and backward apart.

Terms are seconds for each unit of what an action holds. They come from a profile of the device, or from the
arithmetic of the base, and are refitted to what a run measures (`refit.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.pack.pack import pack
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
"""Everybody aboard, by name."""


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed + per_token · tokens, both at least 0."""

    fixed: float
    per_token: float

    def __call__(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What a pass holds, as far as its time hangs on it."""

    tokens: int
    """Rows, padding included."""
    squares: int
    """Squared lengths of its samples, summed: what attention costs."""
    samples: int
    supervised: int
    """Rows that go through the head."""
    adapted: int
    """For each row the parameters that it meets of its adapter (widths times rank, over sites), summed."""
    segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of one direction of a pass, each for one unit of `Work`; none is below 0."""

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
"""In the order of `Terms.values` and of `counts`."""


def terms_of(values: Iterable[float]) -> Terms:
    return Terms(**dict(zip(TERMS, values, strict=True)))


def counts(work: PassWork) -> tuple[int, ...]:
    """How many units of each term a pass has."""
    return 1, work.tokens, work.squares, work.samples, work.supervised, work.adapted, work.segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Seconds of Steps or Saves that are made together."""

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
    """False where kernels were compiled or a graph captured in it: its time says nothing of the next."""

    @property
    def tokens(self) -> int:
        return self.work.tokens

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class StateTime:
    """Measured Steps that were made together, or one measured Save."""

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
    """Seconds of the host for each action, in which nothing else is measured."""
    source: str
    """Where the terms come from, for the reader."""
    measured: bool = True
    """False while only the proportions of the terms are known, not their level."""

    def pass_seconds(self, work: PassWork) -> float:
        """Forward and backward."""
        return self.forward(work) + self.backward(work)

    def program_seconds(self, program: Program, shapes: JobShapes) -> float | None:
        """The predicted time of a program, or None while nothing like it has been measured."""
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
        """What the passes of these batches would take if every job packed its samples by itself."""
        if not self.measured:
            return None
        # Terms are sums: over thousands of passes they are taken once, of the sums of what each pass has.
        whole = [sum(column) for column in zip(*_alone(batches, capacity, met_by(shapes)), strict=True)]
        each = zip(self.forward.plus(self.backward).values(), whole, strict=False)
        return sum(term * count for term, count in each)

    def unmeasured(self) -> CostModel:
        """The same as proportions without a level."""
        return replace(self, measured=False)

    def times(self, factor: float) -> CostModel:
        """The same proportions at another level."""
        return replace(
            self,
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            evaluation=self.evaluation.times(factor),
        )


def met_by(shapes: JobShapes) -> dict[str, int]:
    """Job → adapter parameters that a row meets."""
    return {name: shape.met for name, shape in shapes.items()}


def _alone(
    batches: Iterable[GlobalBatch], capacity: int, met: Mapping[str, int]
) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """The units of each term, for every pass of batches that share none."""
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
