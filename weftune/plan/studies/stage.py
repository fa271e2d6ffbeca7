"""Cost of a fusion group in a pipeline: forward and backward seconds on every stage, and peak bytes.

The model follows MuxTune's equations 3 to 5. Communication is kept separate from the compute seconds: whether
it can be hidden is decided later, by which groups share a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftune.plan.cost.time import Line

NO_TIME = Line(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AdapterTime:
    """Time of adapters that run fused in one pass over a stage; one adapter is the simplest case."""

    shared: float
    """Sum of each adapter's seconds times the share of the device that it keeps busy."""
    longest: float
    """Seconds of the slowest adapter alone."""

    @property
    def seconds(self) -> float:
        return max(self.shared, self.longest)

    def __add__(self, other: AdapterTime) -> AdapterTime:
        return AdapterTime(self.shared + other.shared, max(self.longest, other.longest))


@dataclass(frozen=True, slots=True)
class StageAdapters:
    """Adapter times of a job, or of a fusion group, on one stage."""

    forward: AdapterTime
    backward: AdapterTime

    def __add__(self, other: StageAdapters) -> StageAdapters:
        return StageAdapters(self.forward + other.forward, self.backward + other.backward)


def one_adapter(forward: float, backward: float, share: float) -> StageAdapters:
    """Return the times of one job's adapter on a stage, given its seconds and the share of the device that it
    keeps busy."""
    return StageAdapters(AdapterTime(share * forward, forward), AdapterTime(share * backward, backward))


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Load that a job adds to every microbatch; the sum over jobs is the load of their fusion group."""

    jobs: tuple[str, ...]
    tokens: int
    squares: int
    """Sum of squared sample lengths, to which the cost of attention is proportional."""
    adapters: tuple[StageAdapters, ...]
    """Adapter times on each stage."""

    def __add__(self, other: GroupLoad) -> GroupLoad:
        return GroupLoad(
            self.jobs + other.jobs,
            self.tokens + other.tokens,
            self.squares + other.squares,
            tuple(mine + theirs for mine, theirs in zip(self.adapters, other.adapters, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class StagePass:
    """Fitted time of one pass, forward or backward, of the base's operators in a stage."""

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
    """Bytes of its part of the base and of the state of all attached adapters, of this fusion group or
    not."""
    activation_bytes: int
    """Bytes per token that a microbatch in flight keeps for its backward."""
    gradient_bytes: int
    """Bytes per token of the input gradients while the backward runs."""
    budget: int
    shards: int = 1
    """Number of devices that share each operator of the base; the passes are one device's time."""


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one microbatch's pass over one stage."""

    base: float
    adapters: AdapterTime
    communication: float

    @property
    def compute(self) -> float:
        return self.base + self.adapters.seconds

    @property
    def alone(self) -> float:
        """Seconds if no other work overlaps its communication."""
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
    """Stages in order, and the number of microbatches that every fusion group sends through per round."""

    stages: tuple[Stage, ...]
    microbatches: int

    @property
    def communicates(self) -> bool:
        """Whether any pass has collectives within its stage."""
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
        """Return the compute seconds of both passes on every stage: `times` without records, for frequent
        calls."""
        return [
            (stage.forward.seconds(load) + stage.backward.seconds(load)) / stage.shards
            + adapters.forward.seconds
            + adapters.backward.seconds
            for stage, adapters in zip(self.stages, load.adapters, strict=True)
        ]

    def first_seconds(self, load: GroupLoad) -> float:
        """Return the seconds of a round of this group alone: it fills the pipeline, runs at the pace of the
        slowest stage, and drains."""
        each = self.paces(load)
        return sum(each) + (self.microbatches - 1) * max(each)

    def added_seconds(self, load: GroupLoad) -> float:
        """Return the seconds that this group adds to a full pipeline: microbatches at the stages' average
        pace."""
        each = self.paces(load)
        return self.microbatches * sum(each) / len(each)

    def peak_bytes(self, load: GroupLoad) -> tuple[int, ...]:
        """Return the peak bytes of each stage with as many microbatches in flight as 1F1B allows.

        That is one per stage from this one to the last, if all are of this group.
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
