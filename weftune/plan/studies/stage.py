"""What a fusion group costs a pipeline: seconds on every stage, forward and backward apart, and peak bytes.

MuxTune's equations 3 to 5. Communication is kept beside the compute seconds, not in them: whether it can be
hidden is decided later, by who shares a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftune.plan.cost.time import Line

NO_TIME = Line(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AdapterTime:
    """Adapters that run fused in one pass over a stage; one adapter is the simplest case."""

    shared: float
    """Each one's seconds times the share of the device that it keeps busy, summed."""
    longest: float
    """The seconds of the slowest by itself."""

    @property
    def seconds(self) -> float:
        return max(self.shared, self.longest)

    def __add__(self, other: AdapterTime) -> AdapterTime:
        return AdapterTime(self.shared + other.shared, max(self.longest, other.longest))


@dataclass(frozen=True, slots=True)
class StageAdapters:
    """The adapters of a job, or of a fusion group, on one stage."""

    forward: AdapterTime
    backward: AdapterTime

    def __add__(self, other: StageAdapters) -> StageAdapters:
        return StageAdapters(self.forward + other.forward, self.backward + other.backward)


def one_adapter(forward: float, backward: float, share: float) -> StageAdapters:
    """One job's adapter on a stage: its seconds, and the share of the device that it keeps busy meanwhile."""
    return StageAdapters(AdapterTime(share * forward, forward), AdapterTime(share * backward, backward))


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a job brings to every microbatch; the sum of several is what their fusion group brings."""

    jobs: tuple[str, ...]
    tokens: int
    squares: int
    """The summed squares of the samples' lengths, which is what attention costs."""
    adapters: tuple[StageAdapters, ...]
    """One for each stage."""

    def __add__(self, other: GroupLoad) -> GroupLoad:
        return GroupLoad(
            self.jobs + other.jobs,
            self.tokens + other.tokens,
            self.squares + other.squares,
            tuple(mine + theirs for mine, theirs in zip(self.adapters, other.adapters, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class StagePass:
    """The fitted time of one pass, forward or backward, of the base's operators in a stage."""

    line: Line
    per_square: float = 0.0
    communication: Line = NO_TIME
    """Collectives inside the stage, during which it could compute for another fusion group."""

    def seconds(self, load: GroupLoad) -> float:
        return self.line(load.tokens) + self.per_square * load.squares


@dataclass(frozen=True, slots=True)
class Stage:
    forward: StagePass
    backward: StagePass
    resident_bytes: int
    """Its part of the base, and of the state of every adapter aboard, in this fusion group or not."""
    activation_bytes: int
    """What a token of a microbatch in flight keeps for its backward."""
    gradient_bytes: int
    """What a token's input gradients take while its backward runs."""
    budget: int
    shards: int = 1
    """The devices that share each operator of the base; the passes are one device's time."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """One microbatch's pass over one stage."""

    base: float
    adapters: AdapterTime
    communication: float

    @property
    def compute(self) -> float:
        return self.base + self.adapters.seconds

    @property
    def alone(self) -> float:
        """When there is nothing to do during its communication."""
        return self.compute + self.communication


@dataclass(frozen=True, slots=True)
class StageTime:
    forward: PassSeconds
    backward: PassSeconds

    @property
    def compute(self) -> float:
        return self.forward.compute + self.backward.compute


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first stage on which a load does not fit."""

    stage: int
    need: int
    budget: int


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Stages in order, and how many microbatches every fusion group sends through them in a round."""

    stages: tuple[Stage, ...]
    microbatches: int

    @property
    def communicates(self) -> bool:
        """Whether any pass has collectives inside its stage."""
        return any(
            stage.forward.communication != NO_TIME or stage.backward.communication != NO_TIME
            for stage in self.stages
        )

    def times(self, load: GroupLoad) -> tuple[StageTime, ...]:
        return tuple(
            StageTime(
                _pass_seconds(stage.forward, stage.shards, load, adapters.forward),
                _pass_seconds(stage.backward, stage.shards, load, adapters.backward),
            )
            for stage, adapters in zip(self.stages, load.adapters, strict=True)
        )

    def paces(self, load: GroupLoad) -> list[float]:
        """Compute seconds of both passes on every stage: `times` without its records, for the many calls."""
        return [
            (stage.forward.seconds(load) + stage.backward.seconds(load)) / stage.shards
            + adapters.forward.seconds
            + adapters.backward.seconds
            for stage, adapters in zip(self.stages, load.adapters, strict=True)
        ]

    def first_seconds(self, load: GroupLoad) -> float:
        """A round of this group alone: it fills the pipeline, keeps the slowest stage's pace, and drains."""
        each = self.paces(load)
        return sum(each) + (self.microbatches - 1) * max(each)

    def added_seconds(self, load: GroupLoad) -> float:
        """What this group adds to a pipeline that is full: its microbatches at the stages' average pace."""
        each = self.paces(load)
        return self.microbatches * sum(each) / len(each)

    def peak_bytes(self, load: GroupLoad) -> tuple[int, ...]:
        """For each stage, when as many microbatches are in flight as 1F1B lets there be.

        That is one for each stage from here to the last, were they all of this group.
        """
        flights = range(len(self.stages), 0, -1)
        return tuple(
            stage.resident_bytes + load.tokens * (stage.gradient_bytes + in_flight * stage.activation_bytes)
            for stage, in_flight in zip(self.stages, flights, strict=True)
        )

    def shortage(self, load: GroupLoad) -> Shortage | None:
        for index, (stage, need) in enumerate(zip(self.stages, self.peak_bytes(load), strict=True)):
            if need > stage.budget:
                return Shortage(index, need, stage.budget)
        return None


def _pass_seconds(one: StagePass, shards: int, load: GroupLoad, adapters: AdapterTime) -> PassSeconds:
    return PassSeconds(one.seconds(load) / shards, adapters, one.communication(load.tokens))
