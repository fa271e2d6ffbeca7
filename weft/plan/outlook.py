"""What a cluster would make of the jobs: the best way of running them, the ways it beats, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from weft.errors import Mistake, PlanError
from weft.plan.bucket import arrange
from weft.plan.cost import Line
from weft.plan.estimate import (
    ADAPTER_BACKWARD,
    ATTENTION_BACKWARD,
    JobOutline,
    adapter_seconds,
    base_line,
    square_seconds,
)
from weft.plan.fit import Ground, Layout, capacities, frugal, lay_out, why_not
from weft.plan.forecast import (
    GREEDY,
    Forecast,
    Groups,
    Order,
    Run,
    Scheme,
    in_turn,
    made_again,
    run_scheme,
)
from weft.plan.fuse import Fusion, fuse
from weft.plan.group import JobLengths, group
from weft.plan.memory import gib
from weft.plan.merge import Merged
from weft.plan.stage import Load, Pass, Pipeline, Stage, one_adapter

ADAPTER_SHARE = 0.5
"""How much of the device one adapter's products keep busy: fused ones overlap that far."""
ALIKE = 1e-3
"""Ways whose times differ by less than this share are alike, and the one proposed first is taken."""
CAPACITIES = 3
"""So many token capacities are tried in a pipeline, where smaller ones leave shorter waits."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the jobs could run: what is made again, and the cut for a token capacity."""

    ground: Ground
    layout: Layout


@dataclass(frozen=True, slots=True)
class Candidate:
    """A grouping that competes, and the mechanism that proposes it."""

    mechanism: str
    groups: Groups
    reason: str


@dataclass(frozen=True, slots=True)
class Tried:
    mechanism: str
    order: Order
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Outlook:
    ground: Ground
    jobs: tuple[JobOutline, ...]
    layout: Layout
    candidate: Candidate
    scheme: Scheme
    run: Run
    tried: tuple[Tried, ...]
    """At the capacity that was chosen."""
    alternatives: tuple[Forecast, ...]
    by_capacity: Mapping[int, float]
    """The seconds of a window at every token capacity that was tried."""
    source: str
    """Where times come from."""

    @property
    def forecast(self) -> Forecast:
        return self.run.forecast


@dataclass(frozen=True, slots=True)
class Ablation:
    mechanism: str
    instead: str
    forecast: Forecast
    cost: float
    """How much longer a window takes without it, as a share; below 0 it would be shorter."""


def outlook(ground: Ground, jobs: Sequence[JobOutline]) -> Outlook:
    """The best that is found for these jobs, all aboard together; PlanError says what does not fit."""
    refuse(ground, jobs)
    if together := why_not(ground, jobs):
        raise PlanError(f"the jobs do not fit together: the company {together}")
    places = _places(ground, jobs)
    found = [_best_at(place, jobs) for place in places]
    # Of equals the first, which has the largest capacity and makes least again.
    best = min(found, key=lambda one: one.forecast.seconds)
    return replace(
        best,
        alternatives=_alternatives(places, jobs),
        by_capacity={
            one.layout.capacity: one.forecast.seconds
            for one in found
            if one.ground.recompute == best.ground.recompute
        },
    )


def refuse(ground: Ground, jobs: Sequence[JobOutline]) -> None:
    """PlanError for every job without samples, or that does not fit even alone."""
    assert jobs, "there is a job to plan for"
    empty = [job.name for job in jobs if not any(job.batches)]
    if empty:
        raise PlanError(Mistake(f"job {name}", "it has 0 samples to train on") for name in empty)
    spare = max(ground.budgets) - ground.slack
    if spare <= 0:
        raise PlanError(
            f"--cluster {ground.cluster.name}: {gib(max(ground.budgets))} may be taken of a device, but "
            f"{gib(ground.slack)} are needed before anything of the base is loaded"
        )
    alone = [(job.name, sentence) for job in jobs if (sentence := why_not(ground, [job]))]
    if alone:
        raise PlanError(Mistake(f"job {name}", f"even alone it {sentence}") for name, sentence in alone)


def ablate(found: Outlook) -> tuple[Ablation, ...]:
    """What switching each mechanism off costs, all others as they were chosen."""
    scheme, jobs, ground = found.scheme, found.jobs, found.ground
    switched = [
        ("packing", "best fit only", replace(scheme, limits=GREEDY)),
        ("merging", "every round by itself", replace(scheme, shift=False)),
        ("sharing", "no job shares a microbatch", replace(scheme, groups=_alone(jobs), shift=False)),
        ("order", "GPipe", replace(scheme, order=Order.gpipe)),
    ]
    rows = [
        _row(found, mechanism, instead, _whole(other, jobs, ground, found.layout))
        for mechanism, instead, other in switched
    ]
    return (*rows, *_partition_row(found), *_proposals(found))


def _partition_row(found: Outlook) -> list[Ablation]:
    try:
        blind = lay_out(found.ground, found.jobs, found.layout.capacity, ends=False)
    except PlanError:
        return []
    forecast = _whole(found.scheme, found.jobs, found.ground, blind)
    return [_row(found, "partition", "embedding and head not counted", forecast)]


def _proposals(found: Outlook) -> list[Ablation]:
    """The groupings that did not win, each as if its mechanism alone decided."""
    least: dict[str, Forecast] = {}
    for one in found.tried:
        if one.mechanism not in least or one.forecast.seconds < least[one.mechanism].seconds:
            least[one.mechanism] = one.forecast
    chosen = found.candidate.mechanism
    return [
        _row(found, f"groups by {chosen}", f"groups by {name}", forecast)
        for name, forecast in least.items()
        if name != chosen
    ]


def _row(found: Outlook, mechanism: str, instead: str, forecast: Forecast) -> Ablation:
    return Ablation(mechanism, instead, forecast, forecast.seconds / found.forecast.seconds - 1.0)


def _whole(scheme: Scheme, jobs: Sequence[JobOutline], ground: Ground, layout: Layout) -> Forecast:
    return run_scheme(scheme, jobs, ground, layout).forecast


def _places(ground: Ground, jobs: Sequence[JobOutline]) -> list[Place]:
    """The largest capacities that fit.

    One device has no waits that smaller ones could shorten, but may choose what to make again; a pipeline
    makes again only what it must.
    """
    places: list[Place] = []
    for choice in frugal(ground):
        wanted = len(places) + 1 if ground.stages == 1 else CAPACITIES
        for capacity in capacities(jobs, ground.most):
            if len(places) == wanted:
                break
            with suppress(PlanError):
                places.append(Place(choice, lay_out(choice, jobs, capacity)))
        full = bool(places) and places[-1].layout.capacity >= ground.most
        if places and (ground.stages > 1 or full):
            break
    return places


def _best_at(place: Place, jobs: Sequence[JobOutline]) -> Outlook:
    """Every candidate in every order; the best also with each round by itself."""
    ground, layout = place.ground, place.layout
    orders = [Order.alternating, Order.multi_job] if len(layout.stages) > 1 else [Order.alternating]
    tried: list[tuple[Candidate, Scheme, Run]] = []
    runs: dict[tuple[Groups, Order], Run] = {}
    for candidate in _candidates(ground, jobs, layout):
        merged: Merged | None = None
        for order in orders:
            scheme = Scheme("weft", candidate.groups, order)
            key = candidate.groups, order
            if key not in runs:
                runs[key] = run_scheme(scheme, jobs, ground, layout, merged)
            merged = runs[key].merged
            tried.append((candidate, scheme, runs[key]))
    least = min(run.forecast.seconds for _, _, run in tried)
    candidate, scheme, run = next(one for one in tried if one[2].forecast.seconds <= least * (1 + ALIKE))
    apart = replace(scheme, shift=False)
    unmerged = run_scheme(apart, jobs, ground, layout)
    if unmerged.forecast.seconds * (1 + ALIKE) < run.forecast.seconds:
        scheme, run = apart, unmerged
    return Outlook(
        ground=ground,
        jobs=tuple(jobs),
        layout=layout,
        candidate=candidate,
        scheme=scheme,
        run=run,
        tried=tuple(Tried(one.mechanism, its.order, other.forecast) for one, its, other in tried),
        alternatives=(),
        by_capacity={},
        source=ground.speeds[0].source,
    )


def _candidates(ground: Ground, jobs: Sequence[JobOutline], layout: Layout) -> list[Candidate]:
    stages, names = len(layout.stages), [job.name for job in jobs]
    lengths = [JobLengths(job.name, _mean(job), _round_tokens(job)) for job in jobs]
    head_tail = group(lengths, layout.capacity, stages)
    fusion, pipeline = _fused(ground, jobs, layout)
    arrangement = arrange(fusion, pipeline)
    buckets = tuple(load.jobs for bucket in arrangement.bucketing.buckets for load in bucket.groups)
    return [
        Candidate("head-tail grouping", head_tail.groups, head_tail.why(stages)),
        Candidate(
            "fusion", tuple(one.jobs for one in fusion.groups), "; ".join(one.reason for one in fusion.groups)
        ),
        Candidate("buckets", buckets, arrangement.reason),
        Candidate("one group", (tuple(names),), "groups that take turns would not wait less"),
        Candidate("single jobs", _alone(jobs), "each job's rounds follow those of the others"),
    ]


def _fused(ground: Ground, jobs: Sequence[JobOutline], layout: Layout) -> tuple[Fusion, Pipeline]:
    """Fusion over the microbatches that a round needs at least, every job with its share in each."""
    count = max(1, -(-sum(map(_round_tokens, jobs)) // layout.capacity))
    pipeline = Pipeline(tuple(_stage(ground, layout, number) for number in range(len(layout.stages))), count)
    loads = []
    for job in jobs:
        tokens = -(-_round_tokens(job) // count)
        adapters = []
        for number, cut in enumerate(layout.stages):
            seconds = tokens * adapter_seconds(
                ground.layers[cut.start : cut.stop], job, ground.speeds[number]
            )
            adapters.append(one_adapter(seconds, ADAPTER_BACKWARD * seconds, ADAPTER_SHARE))
        loads.append(Load((job.name,), tokens, int(tokens * _mean(job)), tuple(adapters)))
    return fuse(loads, pipeline), pipeline


def _stage(ground: Ground, layout: Layout, number: int) -> Stage:
    cut, speed = layout.stages[number], ground.speeds[number]
    layers = ground.layers[cut.start : cut.stop]
    line, square = base_line(layers, speed), square_seconds(layers, speed)
    again = made_again(layers, ground)
    twice = Line((1 + again) * line.fixed, (1 + again) * line.per_token)
    return Stage(
        forward=Pass(line, square),
        backward=Pass(twice, (ATTENTION_BACKWARD + again) * square),
        resident_bytes=cut.weight_bytes + cut.state_bytes + ground.slack,
        activation_bytes=cut.kept_bytes // layout.capacity,
        gradient_bytes=ground.held_bytes,
        budget=layout.budgets[number],
    )


def _alternatives(places: Sequence[Place], jobs: Sequence[JobOutline]) -> tuple[Forecast, ...]:
    """Each with the token capacity that suits it best."""
    each = [_alternatives_at(place.ground, jobs, place.layout) for place in places]
    return tuple(min(same, key=lambda one: one.seconds) for same in zip(*each, strict=True))


def _alternatives_at(ground: Ground, jobs: Sequence[JobOutline], layout: Layout) -> list[Forecast]:
    def job_by_job(name: str, order: Order) -> Forecast:
        schemes = [Scheme(name, ((job.name,),), order, GREEDY, shift=False) for job in jobs]
        alone = zip(schemes, jobs, strict=True)
        return in_turn(name, [_whole(scheme, [job], ground, layout) for scheme, job in alone])

    together = (tuple(job.name for job in jobs),)
    return [
        job_by_job("one after another", Order.one_at_a_time),
        job_by_job("1F1B per job", Order.alternating),
        _whole(Scheme("mLoRA", _alone(jobs), Order.multi_job, GREEDY, shift=False), jobs, ground, layout),
        _whole(Scheme("greedy packing only", together, limits=GREEDY, shift=False), jobs, ground, layout),
    ]


def _alone(jobs: Sequence[JobOutline]) -> Groups:
    return tuple((job.name,) for job in jobs)


def _mean(job: JobOutline) -> float:
    count = sum(map(len, job.batches))
    return sum(map(sum, job.batches)) / max(1, count)


def _round_tokens(job: JobOutline) -> int:
    """Tokens of a global batch, on average."""
    return -(-sum(map(sum, job.batches)) // len(job.batches))
