"""A plan as a value: what one device does in a window, action by action, and the proof that it may.

Steps are counted from 1; step n is the n-th global batch of a job and the optimizer step it ends in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.plan.memory import NOTHING, Recompute


@dataclass(frozen=True, slots=True)
class Placed:
    """A sample of a global batch: which, how long, and how many tokens of the batch stand before it."""

    sample: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one job that make one optimizer step."""

    job: str
    step: int
    samples: tuple[Placed, ...]
    supervised: int
    """Supervised tokens in the whole batch: what the job's loss is divided by."""

    @property
    def tokens(self) -> int:
        return sum(placed.length for placed in self.samples)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The samples of one job that share a microbatch."""

    job: str
    step: int
    samples: tuple[Placed, ...]

    @property
    def tokens(self) -> int:
        return sum(placed.length for placed in self.samples)


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    segments: tuple[SegmentPlan, ...]
    rung: int = 0
    """Where graphs want few different sizes: the rows that the pass computes, padding included."""

    @property
    def rows(self) -> int:
        return max(self.tokens, self.rung)

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(segment.job for segment in self.segments)

    def without(self, jobs: frozenset[str] | set[str]) -> MicrobatchPlan:
        kept = tuple(segment for segment in self.segments if segment.job not in jobs)
        return MicrobatchPlan(kept, self.rung)


@dataclass(frozen=True, slots=True)
class Forward:
    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A forward pass over held-out samples; each segment's `step` says after which Step it looks."""

    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    job: str
    step: int


Action = Forward | Backward | Evaluate | Step | Save


@dataclass(frozen=True, slots=True)
class Program:
    """What one device does in one window."""

    capacity: int
    microbatches: tuple[MicrobatchPlan, ...]
    batches: tuple[GlobalBatch, ...]
    actions: tuple[Action, ...]
    recompute: Recompute = NOTHING

    @property
    def jobs(self) -> frozenset[str]:
        return frozenset(job for microbatch in self.microbatches for job in microbatch.jobs)

    def batch(self, job: str, step: int) -> GlobalBatch:
        return next(batch for batch in self.batches if (batch.job, batch.step) == (job, step))

    def compute(self) -> Iterator[tuple[Forward | Evaluate, MicrobatchPlan]]:
        """Every pass over the base that this program makes."""
        for action in self.actions:
            if isinstance(action, Forward | Evaluate):
                yield action, self.microbatches[action.microbatch]

    def shared(self) -> int:
        """How many of its microbatches hold two jobs or more."""
        return sum(len(set(microbatch.jobs)) > 1 for microbatch in self.microbatches)

    def without(self, job: str) -> Program:
        """The same program when `job` is dead: its rows and actions are gone, all else stands."""
        microbatches = tuple(microbatch.without({job}) for microbatch in self.microbatches)

        def lives(action: Action) -> bool:
            if isinstance(action, Step | Save):
                return action.job != job
            return bool(microbatches[action.microbatch].segments)

        return replace(
            self,
            microbatches=microbatches,
            batches=tuple(batch for batch in self.batches if batch.job != job),
            actions=tuple(action for action in self.actions if lives(action)),
        )


class IllegalProgram(AssertionError):
    """A planner broke a rule. Always a bug of ours, never the user's mistake."""


def check(program: Program, done: dict[str, int] | None = None) -> None:
    """Raise IllegalProgram unless every rule of training holds; `done` is each job's last executed step.

    The rules: every sample of a global batch is trained exactly once, at its own offset; a microbatch keeps
    to the capacity and holds each job's rows in one segment; Backward follows its Forward; Step follows every
    Backward of its batch; a job's batches come in order, the next Forward only after the Step before it;
    Evaluate and Save look at a step that has just been made; nothing is left over at the seam.
    """
    _check_microbatches(program)
    _check_samples(program)
    _check_order(program, done or {})


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise IllegalProgram(sentence)


def _check_microbatches(program: Program) -> None:
    for index, microbatch in enumerate(program.microbatches):
        _require(
            len(set(microbatch.jobs)) == len(microbatch.jobs),
            f"microbatch {index} holds two segments of one job: {microbatch.jobs}",
        )
        _require(
            microbatch.rows <= program.capacity,
            f"microbatch {index} has {microbatch.rows} rows, more than {program.capacity}",
        )


def _check_samples(program: Program) -> None:
    trained: dict[tuple[str, int], list[Placed]] = {}
    for action, microbatch in program.compute():
        if isinstance(action, Forward):
            for segment in microbatch.segments:
                trained.setdefault((segment.job, segment.step), []).extend(segment.samples)
    planned = {(batch.job, batch.step): batch for batch in program.batches}
    _require(trained.keys() == planned.keys(), "the batches trained are not the batches planned")
    for key, batch in planned.items():
        by_offset = sorted(trained[key], key=lambda placed: placed.offset)
        _require(tuple(by_offset) == batch.samples, f"the samples of {key} are not trained exactly once each")
        offset = 0
        for placed in batch.samples:
            _require(placed.offset == offset, f"sample {placed.sample} of {key} has the wrong offset")
            offset += placed.length


def _check_order(program: Program, done: dict[str, int]) -> None:
    stepped = dict(done)
    open_rows: dict[tuple[str, int], int] = {}
    left = {(batch.job, batch.step): len(batch.samples) for batch in program.batches}
    in_flight: set[int] = set()
    used: set[int] = set()
    for action in program.actions:
        if isinstance(action, Forward | Evaluate):
            _require(action.microbatch not in used, f"{action} runs a microbatch a second time")
            used.add(action.microbatch)
        match action:
            case Forward(microbatch):
                in_flight.add(microbatch)
                for segment in program.microbatches[microbatch].segments:
                    before = stepped.setdefault(segment.job, segment.step - 1)
                    _require(segment.step == before + 1, f"{action}: {segment.job} is only at step {before}")
                    open_rows.setdefault((segment.job, segment.step), 0)
            case Backward(microbatch):
                _require(microbatch in in_flight, f"{action} has no Forward before it")
                in_flight.remove(microbatch)
                for segment in program.microbatches[microbatch].segments:
                    open_rows[segment.job, segment.step] += len(segment.samples)
            case Step(job, step):
                _require(
                    open_rows.pop((job, step), None) == left.get((job, step)),
                    f"{action} comes before the last Backward of its batch",
                )
                stepped[job] = step
            case Evaluate(microbatch):
                for segment in program.microbatches[microbatch].segments:
                    now = stepped.setdefault(segment.job, segment.step)
                    _require(segment.step == now, f"{action}: {segment.job} is at step {now}")
            case Save(job, step):
                _require(stepped.setdefault(job, step) == step, f"{action}: {job} is at step {stepped[job]}")
    _require(not in_flight and not open_rows, "work is left over at the end of the window")
    filled = {index for index, microbatch in enumerate(program.microbatches) if microbatch.segments}
    _require(used == filled, "a microbatch is never run")
