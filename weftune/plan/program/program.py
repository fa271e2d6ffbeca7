"""A plan as a value: what every device does in a window, action by action.

Steps are counted from 1; step n is the n-th global batch of a job and the optimizer step it ends in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

from weftune.plan.program.recompute import NOTHING, Recompute


class OfBatch(Protocol):
    """Anything that belongs to one global batch."""

    @property
    def job(self) -> str: ...

    @property
    def step(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample of a global batch: which, how long, and how many tokens of the batch stand before it."""

    sample: int
    length: int
    offset: int
    supervised: int = 0
    """Of its tokens, those that count in the loss."""
    group: int | None = None
    """Neighbours in a batch that have the same number here must share a microbatch: pairs, say."""


def in_groups(samples: Sequence[PlacedSample], size: int) -> tuple[PlacedSample, ...]:
    """The samples of a batch, every so many neighbours in a group; as they are where each may be alone."""
    if size == 1:
        return tuple(samples)
    assert len(samples) % size == 0, f"a batch of {len(samples)} samples is no number of groups of {size}"
    return tuple(replace(placed, group=number // size) for number, placed in enumerate(samples))


def kept_together(samples: Iterable[PlacedSample]) -> list[tuple[PlacedSample, ...]]:
    """Samples in runs that must share a microbatch; most are alone."""
    runs: list[list[PlacedSample]] = []
    for placed in samples:
        if runs and placed.group is not None and placed.group == runs[-1][-1].group:
            runs[-1].append(placed)
        else:
            runs.append([placed])
    return [tuple(run) for run in runs]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one job that make one optimizer step."""

    job: str
    step: int
    samples: tuple[PlacedSample, ...]
    supervised: int
    """Supervised tokens in the whole batch: what the job's loss is divided by."""
    before: int = 0
    """Of its rows, those that the job's adapter puts before samples."""

    @property
    def tokens(self) -> int:
        """All rows of its samples, which is what passes compute."""
        return sum(placed.length for placed in self.samples)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The samples of one job that share a microbatch."""

    job: str
    step: int
    samples: tuple[PlacedSample, ...]

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
    """A forward pass over held-out samples; each segment's `step` says after which Step it is made."""

    microbatch: int
    stage: int = 0


Reduced = Literal["norm", "gradient"]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Where several devices train a job together, behind the last Backward of its batch.

    `gradient`, only with replicas: the sums of the batch here (gradient, losses, correct predictions) are
    sent to the devices that hold the same stage in other replicas; nobody waits. A replica without samples of
    a batch has no such action.
    `norm`: the sums of the other replicas are added, everywhere in the same order. Losses, correct
    predictions and the squared norm of this stage's slice, added to those of the next stage, then go to the
    stage before, in the first replica alone. The first device decides, and its decision goes to every Step.
    """

    job: str
    step: int
    what: Reduced = "norm"


@dataclass(frozen=True, slots=True)
class Step:
    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    job: str
    step: int


What = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Send:
    """Hands over what was computed here. `stage` is the stage that takes it, in the Send and in its Recv."""

    microbatch: int
    stage: int
    what: What
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    microbatch: int
    stage: int
    what: What
    peer: int


@dataclass(frozen=True, slots=True)
class Load:
    """Brings a stage's weights from the host."""

    stage: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Gives up a stage's weights; nothing returns to the host, since the base is frozen."""

    stage: int


Compute = Forward | Backward | Evaluate
Transport = Send | Recv
Streaming = Load | Evict
OfJob = Reduce | Step | Save
Action = Compute | Transport | Streaming | OfJob


@dataclass(frozen=True)
class Program:
    """What every device does in one window."""

    capacity: int
    microbatches: tuple[MicrobatchPlan, ...]
    batches: tuple[GlobalBatch, ...]
    devices: tuple[tuple[Action, ...], ...]
    """For each device its actions in order; with replicas the first one's devices come first, and so on."""
    stages: tuple[int, ...] = (0,)
    """For each stage the device that it lives on, in the first replica."""
    recompute: Recompute = NOTHING
    chunk: int = 0
    """Where samples are cut into chunks, the rows of one: a batch's `samples` are then parts of them."""
    replicas: int = 1
    """Copies of all stages, each on devices of its own; every microbatch runs in one of them."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """All of them, where there is one device."""
        assert len(self.devices) == 1, f"a program for {len(self.devices)} devices has no single order"
        return self.devices[0]

    @property
    def pipelined(self) -> bool:
        """Whether several devices, each with a slice of every adapter, agree on every Step by a Reduce."""
        return len(self.devices) > 1

    @property
    def width(self) -> int:
        """Devices of one replica."""
        return len(self.devices) // self.replicas

    def replica(self, device: int) -> int:
        return device // self.width

    def homes(self, replica: int) -> tuple[int, ...]:
        """For each stage the device that it lives on in a replica."""
        return tuple(replica * self.width + device for device in self.stages)

    def group(self, device: int) -> range:
        """The devices that hold the same stages, one in each replica and in their order."""
        return range(device % self.width, len(self.devices), self.width)

    @property
    def jobs(self) -> frozenset[str]:
        return frozenset(job for microbatch in self.microbatches for job in microbatch.jobs)

    def batch(self, job: str, step: int) -> GlobalBatch:
        return self._batches[job, step]

    @cached_property
    def _batches(self) -> dict[tuple[str, int], GlobalBatch]:
        """By job and step: with thousands of jobs, each asks for its own."""
        return {(batch.job, batch.step): batch for batch in self.batches}

    def supervised(self, segment: OfBatch) -> int:
        """Supervised tokens of a segment's whole global batch: what its loss is divided by."""
        return self.batch(segment.job, segment.step).supervised

    def samples(self, segment: OfBatch) -> int:
        """Samples of a segment's whole global batch."""
        return len(self.batch(segment.job, segment.step).samples)

    def compute(self) -> Iterator[tuple[Forward | Evaluate, MicrobatchPlan]]:
        """Every pass over the base that this program makes, each once however many stages it crosses."""
        for replica in range(self.replicas):
            yield from self.compute_in(replica)

    def compute_in(self, replica: int) -> Iterator[tuple[Forward | Evaluate, MicrobatchPlan]]:
        """The passes that one replica makes."""
        for action in self.devices[self.homes(replica)[0]]:
            if isinstance(action, Forward | Evaluate) and action.stage == 0:
                yield action, self.microbatches[action.microbatch]

    def shared(self) -> int:
        """How many of its microbatches hold two jobs or more."""
        return sum(len(set(microbatch.jobs)) > 1 for microbatch in self.microbatches)

    def without(self, *jobs: str) -> Program:
        """The same program when these jobs are dead: their rows and actions are gone, all else stands."""
        dead = frozenset(jobs)
        microbatches = tuple(microbatch.without(dead) for microbatch in self.microbatches)

        def lives(action: Action) -> bool:
            if isinstance(action, OfJob):
                return action.job not in dead
            return isinstance(action, Streaming) or bool(microbatches[action.microbatch].segments)

        return replace(
            self,
            microbatches=microbatches,
            batches=tuple(batch for batch in self.batches if batch.job not in dead),
            devices=tuple(tuple(action for action in actions if lives(action)) for actions in self.devices),
        )

    def without_saves(self, jobs: frozenset[str]) -> Program:
        """The same program that leaves these jobs unsaved."""

        def is_kept(action: Action) -> bool:
            return not (isinstance(action, Save) and action.job in jobs)

        return replace(self, devices=tuple(tuple(filter(is_kept, actions)) for actions in self.devices))


class IllegalProgram(AssertionError):
    """A planner broke a rule. Always a bug of ours, never the user's mistake."""
