"""The search over ways to divide several devices among jobs: shares × replicas × stages × shards.

A share is a part of the jobs that has its own workers. The workers of a share hold replicas of the base; each
replica is cut into stages, and each stage into shards. Divisions that cannot run or do not fit in memory are
dropped. The speed of the others is predicted (they are priced) for the first window, a few global batches, of
the share that has the most work, since a run takes as long as its slowest share. Divisions are priced in the
order of an optimistic bound on their speed, which assumes that no worker waits for another, until no other
division can be faster. If layers are recomputed to make room for large microbatches, half of the token
capacity is tried too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import TYPE_CHECKING

from weftune.core.shapes import JobShape, LayerRange, ModelShape
from weftune.plan.cost.memory import max_sample_tokens
from weftune.plan.cost.time import PassWork, active_parameters_by_job
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.layout.split import share_jobs
from weftune.plan.program.program import Recompute
from weftune.plan.window.pace import shorten_windows
from weftune.plan.window.rounds import JobWindow

if TYPE_CHECKING:
    from weftune.plan.layout.choose import LayoutChoice

AUTO = 0
"""Placeholder for a number of shares (parts of the jobs), replicas, stages or shards that the planner is to
choose."""

SAME_SPEED = 0.01
"""Relative difference in speed below which the simpler of two divisions of the devices is chosen."""
SHOWN = 3
"""Maximum number of divisions of the devices that are listed for the user."""
ROUND_TOKENS = 64
"""Token capacities are multiples of this number, except a capacity that is the length of the longest
sample."""
SMALL_LOSS = 0.05
"""Minimum fraction of the devices' time that must be lost for the loss to be reported as the limit of a
candidate's speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """One way to divide devices among jobs, as numbers of shares (parts of the jobs), replicas, stages and
    shards, with the token capacity of microbatches."""

    shares: int = 1
    replicas: int = 1
    stages: int = 1
    shards: int = 1
    capacity: int | None = None
    """Maximum tokens per microbatch. None means the default of the device."""
    overlaps: bool = False
    """Whether two microbatches alternate after every half layer (attention or feed-forward), so that the
    all-reduces over shards of one overlap with the computation of the other."""

    @property
    def may_overlap(self) -> bool:
        """Whether the all-reduces of one microbatch can overlap with the computation of another, which
        requires shards and a single stage."""
        return self.shards > 1 and self.stages == self.replicas == 1

    @property
    def workers_per_share(self) -> int:
        return self.replicas * self.stages * self.shards

    @property
    def devices(self) -> int:
        return self.shares * self.workers_per_share

    @property
    def complexity(self) -> tuple[int, int, int, int, bool]:
        """Sort key for divisions of the devices with the same speed. The division with the smallest key is
        chosen. The key prefers shares (parts of the jobs) to replicas, replicas to stages, stages to shards,
        and shards without overlap to those with overlap."""
        return self.workers_per_share, self.shards, self.stages, self.replicas, self.overlaps

    @property
    def description(self) -> str:
        """Description of the division for the user, such as `2 replicas of 4 shards`."""
        counts = (
            (self.shares, "shares"),
            (self.replicas, "replicas"),
            (self.stages, "stages"),
            (self.shards, "shards"),
        )
        text = " of ".join(f"{number} {name}" for number, name in counts if number > 1) or "one device"
        return f"{text} whose microbatches overlap" if self.overlaps else text

    @property
    def flags(self) -> str:
        """Command-line options of `weftune train` that request this division. Empty for one device."""
        counts = (
            (self.shares, "--gpus"),
            (self.stages, "--pipeline"),
            (self.replicas, "--replicas"),
            (self.shards, "--shards"),
            (self.capacity or 0, "--capacity"),
        )
        return " ".join(f"{flag} {number}" for number, flag in counts if number > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPrice:
    """Predicted time and memory of the first window (a few global batches) of one share (part) of the
    jobs."""

    tokens: int
    seconds: float
    computing_fraction: float
    """Fraction of the window's time in which the devices compute."""
    seconds_without_link: float
    """Predicted seconds of the window (a few global batches of every job) if transfers between devices took
    no time."""
    recomputing_fraction: float
    """Fraction of the computing time that is spent on recomputing forwards in the backward."""
    peak_bytes: int
    capacity: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to divide the devices, with its predicted speed and memory."""

    division: Division
    capacity: int
    """Maximum number of tokens per microbatch that fits in memory."""
    tokens_per_second: float
    """Predicted tokens per second of all jobs together, if the run takes as long as the slowest share (part
    of the jobs)."""
    needs_bytes: int
    """Predicted peak bytes on the fullest device in the first window (a few global batches of every job)."""
    idle_fraction: float
    """Fraction of the time of all devices of the machine in which they do not compute."""
    limited_by: str
    """Name of the largest cause of lost time: memory, link, bubbles (idle pipeline stages), Steps (optimizer
    steps), jobs (uneven shares) or devices (unused ones); `compute` if little time is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionSpace:
    """The divisions of the devices that are searched, as the possible numbers of shares (parts of the jobs),
    replicas, stages and shards. A number that is set on the command line has one value."""

    shares: Sequence[int]
    replicas: Sequence[int]
    stages: Sequence[int]
    shards: Sequence[int]
    capacity: int | None
    """Maximum tokens per microbatch that the user has requested. None lets the search choose the maximum."""
    may_overlap: bool = False
    """Whether divisions may be tried in which the all-reduces over shards of one microbatch overlap with the
    computation of another."""

    @property
    def chooses_capacity(self) -> bool:
        return self.capacity is None

    def divisions(self, devices: int) -> Iterator[Division]:
        """Yield all divisions of the devices in this space that need at most `devices` devices."""
        pairs = [(stages, shards) for stages in self.stages for shards in self.shards]
        for shares, replicas in product(self.shares, self.replicas):
            left = devices // (shares * replicas)
            for stages, shards in pairs:
                if stages * shards <= left:
                    division = Division(
                        shares=shares,
                        replicas=replicas,
                        stages=stages,
                        shards=shards,
                        capacity=self.capacity,
                    )
                    yield division
                    if self.may_overlap and division.may_overlap:
                        yield replace(division, overlaps=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The properties of the jobs and of the base that the search for the best division of the devices
    needs."""

    windows: Mapping[str, JobWindow]
    """Maps each job to its part of the first window: its next global batches, without evaluations."""
    seconds: Mapping[str, float]
    """Maps each job to the predicted seconds of its whole training on one device. Only the ratios of these
    numbers matter."""
    shape: ModelShape
    """Shape of the whole base."""
    times: StageTimes
    """Predictor of the times of forwards and backwards if layers are not divided into shards."""
    price: Callable[[LayoutChoice], WindowPrice]
    """Function that predicts the time and memory of the first window (a few global batches) of a share (part)
    of the jobs."""
    max_shares: int | None = None
    """Maximum number of shares (parts) into which the jobs are divided. None means the number of jobs."""
    shard_counts: Sequence[int] = (1,)
    """Numbers of shards into which the base and the adapters can be divided."""
    may_overlap: bool = False
    """Whether the layers of the base can run one half at a time, which is required for overlapping
    all-reduces with computation."""

    def search_space(self, given_division: Division, devices: int) -> DivisionSpace:
        """Return the divisions to search: all possible values of each number that is `AUTO` in
        `given_division`, and the given value of each other number."""

        def values_up_to(number: int, max_count: int) -> Sequence[int]:
            return range(1, max_count + 1) if number == AUTO else (number,)

        return DivisionSpace(
            shares=values_up_to(given_division.shares, self.max_shares or len(self.seconds)),
            replicas=values_up_to(given_division.replicas, devices),
            stages=values_up_to(given_division.stages, min(devices, self.shape.layers)),
            shards=self.shard_counts if given_division.shards == AUTO else (given_division.shards,),
            capacity=given_division.capacity,
            may_overlap=self.may_overlap,
        )


def search_divisions(
    jobs: Sequence[JobShape],
    workload: Workload,
    space: DivisionSpace,
    devices: int,
    build: Callable[[Division, Sequence[JobShape]], LayoutChoice | None],
) -> list[Candidate]:
    """Return the fastest divisions of the devices, or an empty list if none fits in memory. The first
    division is the simplest among those that are about as fast as the fastest.

    `build` returns the layout choice for a share (part) of the jobs, given a division and the jobs of the
    share, or None if one of these jobs does not fit in memory even alone.
    """
    bounds, order = _Bounds(jobs, workload), count()
    by_name = {job.name: job for job in jobs}
    waiting: list[tuple[float, int, Division, LayoutChoice | None]] = []
    found: list[Candidate] = []
    for division in space.divisions(devices):
        heapq.heappush(waiting, (-bounds.bound_without_layout(division), next(order), division, None))
    while waiting and -waiting[0][0] >= _least_reported_speed(found):
        bound, _, division, choice = heapq.heappop(waiting)
        share = bounds.heaviest_share(division.shares)
        if choice is not None:
            price, has_room = workload.price(choice), len(choice.attached_jobs) == len(share.jobs)
            found.append(_make_candidate(division, price, has_room, share.work_fraction, devices))
        elif (choice := build(division, [by_name[name] for name in share.jobs])) is not None:
            passes = _microbatches(choice)
            speed = min(-bound, bounds.bound_for_layout(division, choice, passes))
            heapq.heappush(waiting, (-speed, next(order), division, choice))
            if space.chooses_capacity and (capacity := passes.smaller_capacity):
                smaller = replace(division, capacity=capacity)
                heapq.heappush(waiting, (bound, next(order), smaller, None))
    return _rank_candidates(found)


@dataclass(frozen=True, slots=True)
class _Microbatches:
    """The recomputation of activations and the token capacity of microbatches that memory allows in a
    layout."""

    recompute: Recompute
    capacity: int
    least_capacity: int
    single_tokens: int
    """Number of tokens of a round (one global batch of every job) that would fit in a single microbatch, but
    is to be split into two, so that these can overlap. 0 if nothing overlaps or a round has several
    microbatches."""

    @property
    def smaller_capacity(self) -> int:
        """Second token capacity to try, about half of the first, with which layers may need no recomputation
        or a round (one global batch of every job) may have two microbatches that overlap. 0 if there is no
        reason to try a second capacity, or if the longest sample needs the full capacity."""
        if self.single_tokens:
            half = -(-self.single_tokens // (2 * ROUND_TOKENS)) * ROUND_TOKENS
        elif self.recompute.recomputed_layers:
            half = self.capacity // 2 // ROUND_TOKENS * ROUND_TOKENS
        else:
            return 0
        smaller = max(half, self.least_capacity)
        return smaller if smaller < self.capacity else 0


def _microbatches(choice: LayoutChoice) -> _Microbatches:
    jobs, memory = choice.attached_jobs, choice.memory
    recompute = memory.choose_recompute(jobs, choice.capacity)
    capacity = memory.choose_capacity(jobs, choice.capacity, recompute)
    round_tokens = sum(job.batch_tokens for job in jobs)
    single_tokens = round_tokens if choice.layout.overlaps and round_tokens <= capacity else 0
    return _Microbatches(recompute, capacity, max_sample_tokens(jobs), single_tokens)


def _least_reported_speed(candidates: Sequence[Candidate]) -> float:
    """Return the number of tokens per second that a further division of the devices must reach to be
    reported. Return 0 until enough candidates are found."""
    fastest = _fastest_capacities(candidates)
    return fastest[SHOWN - 1].tokens_per_second if len(fastest) >= SHOWN else 0.0


def _fastest_capacities(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return one candidate for each division of the devices, with the token capacity that makes it fastest.
    The fastest candidate comes first."""
    ordered = sorted(candidates, key=lambda one: -one.tokens_per_second)
    fastest: dict[Division, Candidate] = {}
    for one in ordered:
        fastest.setdefault(replace(one.division, capacity=None), one)
    return list(fastest.values())


def _rank_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates from the fastest to the slowest, except that the first one is the simplest among
    those that are about as fast as the fastest."""
    ordered = _fastest_capacities(candidates)
    if not ordered:
        return []
    fast = [
        one for one in ordered if one.tokens_per_second >= (1 - SAME_SPEED) * ordered[0].tokens_per_second
    ]
    best = min(fast, key=lambda one: one.division.complexity)
    return [best, *(one for one in ordered if one is not best)]


def _make_candidate(
    division: Division, price: WindowPrice, has_room: bool, work_fraction: float, devices: int
) -> Candidate:
    """Return the candidate for a division of the devices. `price` is the predicted first window (a few global
    batches) of the share (part of the jobs) with the most work. `has_room` is whether all jobs of this share
    fit in memory together, and `work_fraction` is the fraction of all work that belongs to this share."""
    used = division.devices / devices
    even = 1 / (work_fraction * division.shares)
    idle_fraction = 1.0 - price.computing_fraction * used * even
    link = 1.0 - price.seconds_without_link / price.seconds
    waits = 1.0 - price.computing_fraction - link
    losses = {
        # Waits are longer where jobs wait for memory, since fewer jobs fill them.
        "memory": price.recomputing_fraction * price.computing_fraction + (0.0 if has_room else waits),
        "link": link,
        "bubbles" if division.stages > 1 else "Steps": waits,
        "jobs": 1.0 - even,
        "devices": 1.0 - used,
    }
    worst = max(losses, key=lambda name: losses[name])
    return Candidate(
        division=division,
        capacity=price.capacity,
        tokens_per_second=price.tokens_per_second / work_fraction,
        needs_bytes=price.peak_bytes,
        idle_fraction=idle_fraction,
        limited_by=worst if losses[worst] > SMALL_LOSS else "compute",
    )


@dataclass(frozen=True, slots=True)
class _HeaviestShare:
    jobs: tuple[str, ...]
    work_fraction: float
    """Fraction of the work of all jobs that belongs to this share (part) of the jobs."""


class _Bounds:
    """Upper bounds on the training speed with different divisions of the devices. The bounds assume that no
    worker waits for another, except while a pipeline fills and drains."""

    def __init__(self, jobs: Sequence[JobShape], workload: Workload) -> None:
        self._jobs, self._workload = jobs, workload
        self._active_parameters = active_parameters_by_job({job.name: job for job in jobs})
        self._times: dict[int, StageTimes] = {}
        self._shares: dict[int, _HeaviestShare] = {}
        self._speeds: dict[tuple[int, int, int, bool], float] = {}
        """Maps (shares of the jobs, stages, shards, overlaps) to the upper bound on the tokens per second of
        all jobs together, with one replica per share."""

    def heaviest_share(self, shares: int) -> _HeaviestShare:
        """Return the share (part) of the jobs with the most work if the jobs are divided into `shares`
        shares."""
        if shares not in self._shares:
            seconds = self._workload.seconds
            sources = {job.name: job.source_job for job in self._jobs}
            found = max(share_jobs(seconds, shares, sources), key=lambda share: share.seconds)
            self._shares[shares] = _HeaviestShare(found.jobs, found.seconds / sum(seconds.values()))
        return self._shares[shares]

    def bound_without_layout(self, division: Division) -> float:
        """Return an upper bound on the tokens per second of all jobs, computed before the layout is known.
        The stages are assumed to take equally long."""
        key = division.shares, division.stages, division.shards, division.overlaps
        if key not in self._speeds:
            share, times = self.heaviest_share(division.shares), self._sharded_times(division.shards)
            work = self._total_work([self._workload.windows[name] for name in share.jobs])
            layers = times.layers
            whole = times.least_seconds(LayerRange(0, layers, layers), work, 0, overlaps=division.overlaps)
            # A stage with the mean number of layers or more, without embedding and head.
            largest = LayerRange(1, 1 - (-layers // division.stages), layers + 2)
            seconds = max(
                whole / division.stages,
                times.least_seconds(largest, work, 0, overlaps=division.overlaps),
            )
            self._speeds[key] = work.tokens / seconds / share.work_fraction
        return self._speeds[key] * division.replicas

    def bound_for_layout(self, division: Division, choice: LayoutChoice, passes: _Microbatches) -> float:
        """Return an upper bound on the tokens per second of all jobs if each share (part) of the jobs runs in
        this layout."""
        share, times = self.heaviest_share(division.shares), self._sharded_times(division.shards)
        windows = [self._workload.windows[job.name] for job in choice.attached_jobs]
        windows = shorten_windows(windows, choice.first_pace)
        work = self._total_work(windows)
        ranges = [LayerRange(one.start, one.stop, times.layers) for one in choice.layout.stages]
        count = -(-work.tokens // passes.capacity)
        stages = [
            times.least_seconds(one, work, count, passes.recompute, division.overlaps) for one in ranges
        ]
        shortest = min(placed.length for one in windows for batch in one.batches for placed in batch.samples)
        # The other stages wait until the first sample has arrived, and until the last one has returned.
        filling = (sum(stages) - max(stages)) * shortest / work.tokens
        return work.tokens / (max(stages) / division.replicas + filling) / share.work_fraction

    def _sharded_times(self, shards: int) -> StageTimes:
        if shards not in self._times:
            shape = self._workload.shape
            self._times[shards] = self._workload.times.divide_among_shards(shape, shards)
        return self._times[shards]

    def _total_work(self, windows: Sequence[JobWindow]) -> PassWork:
        """Return the total counts (tokens, samples and others) of all global batches in these windows, as if
        one pass trained them all."""
        batches = [batch for window in windows for batch in window.batches]
        lengths = [placed.length for batch in batches for placed in batch.samples]
        return PassWork(
            tokens=sum(lengths),
            squares=sum(length**2 for length in lengths),
            samples=len(lengths),
            supervised=sum(placed.supervised_tokens for batch in batches for placed in batch.samples),
            adapted=sum(batch.tokens * self._active_parameters[batch.job] for batch in batches),
            segments=len(batches),
        )
