"""The search for the best scheme (groups of jobs and order of passes) on a cluster. A scheme is simulated
only if the lower bound on its time is shorter than the best time so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.studies.placement import (
    SAME_TIME_SHARE,
    ClusterCase,
    Placement,
    best_placement,
    misfit_reason,
    placements,
)
from benchmarks.studies.scheme import (
    SEARCHED,
    ForecastRun,
    Groups,
    PricedWork,
    Scheme,
    SchemeOrder,
    least_seconds,
    order_passes,
    pack_scheme,
    run_passes,
    separate_groups,
    slowest_first,
)
from weftune.errors import Mistake, PlanError
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.memory import format_bytes
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.pack.best import BEST_FIT_ONLY
from weftune.plan.pack.merge import JobLengths, group_jobs
from weftune.plan.window.orders import Passes

PIPELINE_ORDERS = (SchemeOrder.alternating, SchemeOrder.multi_job, SchemeOrder.template)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The result of a simulation: a scheme at a placement of the base on a cluster, with its forecast."""

    placement: Placement
    jobs: tuple[JobOutline, ...]
    mechanism: str
    """Mechanism that proposed the groups."""
    scheme: Scheme
    run: ForecastRun
    simulated_schemes: tuple[Outlook, ...] = ()
    """All schemes that were simulated at the chosen token capacity."""

    @property
    def forecast(self) -> Forecast:
        return self.run.forecast

    @property
    def source(self) -> str:
        """Origin of the predicted times, for display."""
        return self.placement.case.speeds[0].source


def outlook(case: ClusterCase, jobs: Sequence[JobOutline]) -> Outlook:
    """Return the best scheme and placement found for these jobs together. Raise PlanError if they do not
    fit."""
    _refuse(case, jobs)
    if together := misfit_reason(case, jobs):
        raise PlanError(f"the jobs do not fit together: the run {together}")
    best: Outlook | None = None

    def seconds(placement: Placement) -> float:
        """Return the predicted seconds at this placement, or a lower bound if the placement cannot be better
        than the best one so far."""
        nonlocal best
        search = Search(placement, jobs)
        proposals = search.proposals()
        least = min(one.least_seconds for one in proposals)
        if best is not None and least >= best.forecast.seconds:
            return least
        tried = search.simulate(proposals)
        found = replace(fastest(tried), simulated_schemes=tuple(tried))
        # Among equals the first is kept, which has the largest capacity and recomputes least.
        if best is None or found.forecast.seconds < best.forecast.seconds:
            best = found
        return found.forecast.seconds

    best_placement(placements(case, jobs), seconds)
    assert best is not None, "the first placement is planned for"
    return replace(Search(best.placement, jobs).improve(best), simulated_schemes=best.simulated_schemes)


def _refuse(case: ClusterCase, jobs: Sequence[JobOutline]) -> None:
    """Raise PlanError if jobs have no samples or do not fit alone, or if the devices are too small."""
    assert jobs, "there is a job to plan for"
    empty = [job.name for job in jobs if not any(job.batches)]
    if empty:
        raise PlanError(Mistake(f"job {name}", "it has 0 samples to train on") for name in empty)
    if max(case.budgets) <= case.memory.slack_bytes:
        raise PlanError(
            f"--cluster {case.cluster.name}: {format_bytes(max(case.budgets))} may be taken of a device, but "
            f"{format_bytes(case.memory.slack_bytes)} are needed before anything of the base is loaded"
        )
    too_large = [(job.name, sentence) for job in jobs if (sentence := misfit_reason(case, [job]))]
    if too_large:
        raise PlanError(Mistake(f"job {name}", f"even alone it {sentence}") for name, sentence in too_large)


def candidates(jobs: Sequence[JobOutline], placement: Placement) -> dict[str, Groups]:
    """Return a dict from the name of each mechanism to the groups of jobs that it proposes."""
    lengths = [JobLengths(job.name, mean_length(job), round_tokens(job)) for job in jobs]
    return {
        "head-tail grouping": group_jobs(lengths, placement.capacity, len(placement.stages)).groups,
        "one group": (tuple(job.name for job in jobs),),
        "single jobs": separate_groups(jobs),
    }


def round_tokens(job: JobOutline) -> int:
    """Return the average number of tokens of a global batch."""
    return -(-sum(map(sum, job.batches)) // len(job.batches))


def mean_length(job: JobOutline) -> float:
    return sum(map(sum, job.batches)) / max(1, sum(map(len, job.batches)))


def fastest(outlooks: Sequence[Outlook]) -> Outlook:
    """Return the first scheme whose time is within `SAME_TIME_SHARE` of the fastest one. Schemes that do not
    fit in memory are considered only if no scheme fits."""
    fitting = [one for one in outlooks if one.forecast.fits] or outlooks
    least = min(one.forecast.seconds for one in fitting)
    return next(one for one in fitting if one.forecast.seconds <= least * (1 + SAME_TIME_SHARE))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A scheme at a placement before it is simulated."""

    placement: Placement
    jobs: tuple[JobOutline, ...]
    mechanism: str
    scheme: Scheme
    priced: PricedWork
    passes: Passes
    least_seconds: float
    """Lower bound on the simulated seconds."""

    def simulate(self) -> Outlook:
        run = run_passes(self.scheme.name, self.passes, self.priced, self.jobs, self.placement)
        return Outlook(self.placement, self.jobs, self.mechanism, self.scheme, run)


class Search:
    """Proposes and simulates schemes at one placement, and caches their layouts."""

    def __init__(self, placement: Placement, jobs: Sequence[JobOutline]) -> None:
        self.placement, self.jobs = placement, tuple(jobs)
        self.orders = PIPELINE_ORDERS if len(placement.stages) > 1 else (SchemeOrder.alternating,)
        self.laid: dict[Scheme, PricedWork] = {}

    def proposals(self) -> list[Proposal]:
        """Return every candidate grouping in every order."""
        found: list[Proposal] = []
        for mechanism, groups in candidates(self.jobs, self.placement).items():
            for order in self.orders:
                scheme = self.sort_groups(Scheme("weftune", groups, order))
                if all(one.scheme != scheme for one in found):
                    found.append(self.propose(mechanism, scheme))
        return found

    def sort_groups(self, scheme: Scheme) -> Scheme:
        """Return the scheme with its groups sorted if its order is the template, which takes the slowest
        group first."""
        if scheme.order is not SchemeOrder.template:
            return scheme
        return replace(scheme, groups=slowest_first(self._pack_scheme(scheme), scheme.groups))

    def _pack_scheme(self, scheme: Scheme) -> PricedWork:
        same = replace(scheme, order=SchemeOrder.alternating)
        if same not in self.laid:
            self.laid[same] = pack_scheme(same, self.jobs, self.placement)
        return self.laid[same]

    def propose(self, mechanism: str, scheme: Scheme) -> Proposal:
        laid = self._pack_scheme(scheme)
        passes = order_passes(scheme.order, laid, self.placement)
        least = least_seconds(passes, laid.prices, self.placement.case.cluster.link)
        return Proposal(self.placement, self.jobs, mechanism, scheme, laid, passes, least)

    def simulate(self, proposals: Sequence[Proposal]) -> list[Outlook]:
        """Simulate the most promising proposals until no other proposal can be faster. Return the results in
        the order of the proposals."""
        found: dict[int, Outlook] = {}
        least = float("inf")
        for number in sorted(range(len(proposals)), key=lambda one: proposals[one].least_seconds):
            if proposals[number].least_seconds > least * (1 + SAME_TIME_SHARE):
                break
            found[number] = proposals[number].simulate()
            if found[number].forecast.fits:
                least = min(least, found[number].forecast.seconds)
        return [found[number] for number in sorted(found)]

    def improve(self, best: Outlook) -> Outlook:
        """Return the best scheme found by repeatedly changing one of these: merging of rounds, packing, order
        of passes, or sharing of microbatches."""
        while True:
            seconds = best.forecast.seconds
            proposals = (self.propose(best.mechanism, scheme) for scheme in self._neighbours(best.scheme))
            better = [one for one in proposals if one.least_seconds * (1 + SAME_TIME_SHARE) < seconds]
            found = [one for one in self.simulate(better) if one.forecast.fits]
            after = fastest([best, *found])
            if after.forecast.seconds * (1 + SAME_TIME_SHARE) >= seconds:
                return best
            best = after

    def _neighbours(self, scheme: Scheme) -> list[Scheme]:
        schemes = [
            replace(scheme, moves_samples=not scheme.moves_samples),
            replace(scheme, limits=SEARCHED if scheme.limits == BEST_FIT_ONLY else BEST_FIT_ONLY),
            replace(scheme, groups=separate_groups(self.jobs), moves_samples=False),
            *(replace(scheme, order=order) for order in self.orders),
        ]
        return [one for one in map(self.sort_groups, schemes) if one != scheme]
