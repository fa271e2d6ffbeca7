"""Time model of passes over the base, optimizer steps and saves. A pass is a forward or a backward.

The time of a pass is a sum of terms, such as seconds per token times the number of tokens. The coefficients
come from a profile of the device or from the shape of the base, and are refitted to the measurements of a run
(`refit.py`).
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
    Score,
    Step,
)

JobShapes = Mapping[str, JobShape]
"""Maps the name of every running job to its shape, a record of its sizes."""


@dataclass(frozen=True, slots=True)
class Line:
    """A linear time model: seconds = fixed + per_token · tokens, with coefficients of at least 0."""

    fixed: float
    per_token: float

    def __call__(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """The counts of a pass, such as tokens and samples, from which its time is predicted."""

    tokens: int
    """Number of rows, padding included."""
    squares: int
    """Sum of the squared sample lengths, to which the cost of attention is proportional."""
    samples: int
    supervised: int
    """Number of rows that go through the head."""
    adapted: int
    """Number of adapter parameters that each row is multiplied by, summed over all rows of the pass."""
    segments: int
    """Number of segments. A segment is the rows that belong to one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Coefficients of the time model of a forward or of a backward: the seconds per token, per sample, and
    per unit of each other count in `PassWork`. No value is negative."""

    fixed: float = 0.0
    token: float = 0.0
    square: float = 0.0
    sample: float = 0.0
    supervised: float = 0.0
    adapter: float = 0.0
    segment: float = 0.0

    def __call__(self, work: PassWork) -> float:
        return sum(each * count for each, count in zip(self.values(), term_counts(work), strict=True))

    def tokens_within(self, seconds: float, typical_work: PassWork) -> int:
        """Return the number of tokens with which a pass takes `seconds` seconds, or 0 if even an empty pass
        takes longer. The pass has as many segments (jobs) as `typical_work`; its other counts grow in
        proportion to its tokens."""
        constant = self.fixed + self.segment * typical_work.segments
        per_token = (self(typical_work) - constant) / typical_work.tokens
        return int(max(0.0, seconds - constant) / max(per_token, 1e-12))

    def values(self) -> tuple[float, ...]:
        return (
            self.fixed, self.token, self.square, self.sample, self.supervised, self.adapter, self.segment,
        )  # fmt: skip

    def multiply_by(self, factor: float) -> Terms:
        return make_terms([factor * value for value in self.values()])

    def add(self, other: Terms) -> Terms:
        return make_terms([mine + theirs for mine, theirs in zip(self.values(), other.values(), strict=True)])


TERMS = ("fixed", "token", "square", "sample", "supervised", "adapter", "segment")
"""Names of the terms of the time model of a pass, in the order of `Terms.values` and of `term_counts`."""


def make_terms(values: Iterable[float]) -> Terms:
    return Terms(**dict(zip(TERMS, values, strict=True)))


def term_counts(work: PassWork) -> tuple[int, ...]:
    """Return the counts by which the coefficients of the time model of a pass are multiplied, in the order of
    `TERMS`."""
    return 1, work.tokens, work.squares, work.samples, work.supervised, work.adapted, work.segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Time of optimizer steps or of saves: seconds per job and seconds per adapter parameter."""

    job: float = 0.0
    parameter: float = 0.0

    def __call__(self, jobs: int, parameters: int) -> float:
        return self.job * jobs + self.parameter * parameters

    def add(self, other: Rate) -> Rate:
        return Rate(job=self.job + other.job, parameter=self.parameter + other.parameter)


NO_TIME = Rate()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Measured seconds of the forward and, in training, the backward of one microbatch."""

    work: PassWork
    forward: float
    backward: float
    training: bool
    settled: bool = True
    """Whether the measured times are those of a usual pass, in which no kernels were compiled and no CUDA
    graph was captured."""

    @property
    def tokens(self) -> int:
        return self.work.tokens

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class StateTime:
    """Measured time of one save, or of the optimizer steps of several jobs executed together."""

    jobs: int
    parameters: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The model that predicts the seconds of passes where one device holds the whole base."""

    forward: Terms
    backward: Terms
    evaluation: Terms
    step: Rate = Rate()
    save: Rate = Rate()
    overhead_per_action: float = 0.0
    """Seconds per action that are spent outside passes, optimizer steps and saves."""
    source: str
    """Source of the time model, as a string for the user."""
    is_measured: bool = True
    """Whether the coefficients of the time model are in seconds. If False, only their proportions are
    known."""

    def pass_seconds(self, work: PassWork) -> float:
        """Return the predicted seconds of a forward and its backward together, given the counts of the
        pass."""
        return self.forward(work) + self.backward(work)

    def tokens_within(self, seconds: float, typical_work: PassWork) -> int:
        """Return the number of tokens of a microbatch whose forward and backward each take at most `seconds`
        seconds. The microbatch is assumed to have as many samples and supervised rows per token as
        `typical_work`."""
        return min(terms.tokens_within(seconds, typical_work) for terms in (self.forward, self.backward))

    def program_seconds(self, program: Program, shapes: JobShapes) -> float | None:
        """Return the predicted seconds of a Program, or None if the time model was never fitted to
        measurements."""
        if not self.is_measured:
            return None
        total, met = 0.0, active_parameters_by_job(shapes)
        for action in program.actions:
            match action:
                case Forward(number, stage=0):
                    total += (
                        self.pass_seconds(pass_work(program.microbatches[number], met))
                        + self.overhead_per_action
                    )
                case Evaluate(number, stage=0) | Score(number, stage=0):
                    total += (
                        self.evaluation(pass_work(program.microbatches[number], met))
                        + self.overhead_per_action
                    )
                case Step(job):
                    total += self.step(1, shapes[job].trainable_parameters) + self.overhead_per_action
                case Save(job):
                    total += self.save(1, shapes[job].trainable_parameters) + self.overhead_per_action
        return total

    def solo_seconds(self, batches: Iterable[GlobalBatch], capacity: int, shapes: JobShapes) -> float | None:
        """Return the predicted seconds that all forwards and backwards would take if jobs did not share
        microbatches. Return None if the time model was never fitted to measurements."""
        if not self.is_measured:
            return None
        # Terms are linear, so they are applied once to the summed counts instead of to thousands of passes.
        whole = [
            sum(column)
            for column in zip(*_solo_work(batches, capacity, active_parameters_by_job(shapes)), strict=True)
        ]
        each = zip(self.forward.add(self.backward).values(), whole, strict=False)
        return sum(term * count for term, count in each)

    def multiply_by(self, factor: float) -> CostModel:
        """Return a time model in which every forward and backward takes `factor` times as long."""
        return replace(
            self,
            forward=self.forward.multiply_by(factor),
            backward=self.backward.multiply_by(factor),
            evaluation=self.evaluation.multiply_by(factor),
        )


def active_parameters_by_job(shapes: JobShapes) -> dict[str, int]:
    """Return, for each job, the number of adapter parameters that a row is multiplied by."""
    return {name: shape.active_parameters for name, shape in shapes.items()}


def _solo_work(
    batches: Iterable[GlobalBatch], capacity: int, active_parameters: Mapping[str, int]
) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Yield the counts (tokens, samples and others) of every pass over these global batches if no two of them
    shared a microbatch."""
    for batch in batches:
        lengths = [placed.length for placed in batch.samples]
        fits = sum(lengths) <= capacity
        for chosen in [range(len(lengths))] if fits else pack(lengths, capacity):
            own = [lengths[index] for index in chosen]
            tokens = sum(own)
            supervised = sum([batch.samples[index].supervised_tokens for index in chosen])
            squares = sum([length * length for length in own])
            yield 1, tokens, squares, len(own), supervised, tokens * active_parameters[batch.job], 1


def pass_work(microbatch: MicrobatchPlan, active_parameters: Mapping[str, int]) -> PassWork:
    samples = [placed for segment in microbatch.segments for placed in segment.samples]
    return PassWork(
        tokens=microbatch.rows,
        squares=sum(placed.squares for placed in samples),
        samples=len(samples),
        supervised=sum(placed.supervised_tokens for placed in samples),
        adapted=sum(segment.tokens * active_parameters[segment.job] for segment in microbatch.segments),
        segments=len(microbatch.segments),
    )
