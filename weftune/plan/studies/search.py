"""Search over every grouping in every order at one place; only those that may still win are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.studies.candidates import Candidate, alone, candidates
from weftune.plan.studies.forecast import ForecastRun, run_passes
from weftune.plan.studies.ordering import least_seconds, passes_in
from weftune.plan.studies.places import ALIKE, CapacityPlace
from weftune.plan.studies.priced import PricedWork, lay, slowest_first
from weftune.plan.studies.scheme import GREEDY, SEARCHED, Scheme, SchemeOrder
from weftune.plan.window.orders import Passes

PIPELINE_ORDERS = (SchemeOrder.alternating, SchemeOrder.multi_job, SchemeOrder.template)


@dataclass(frozen=True, slots=True)
class Tried:
    """A way that was simulated; ways whose lower bound could not win were not."""

    candidate: Candidate
    scheme: Scheme
    run: ForecastRun

    @property
    def seconds(self) -> float:
        return self.run.forecast.seconds


def fastest(tried: Sequence[Tried]) -> Tried:
    """Return the first of the fastest ways, up to `ALIKE`; ways that do not fit count only if none fits."""
    fitting = [one for one in tried if one.run.forecast.fits] or tried
    least = min(one.seconds for one in fitting)
    return next(one for one in fitting if one.seconds <= least * (1 + ALIKE))


def orders_of(place: CapacityPlace) -> tuple[SchemeOrder, ...]:
    return PIPELINE_ORDERS if len(place.layout.stages) > 1 else (SchemeOrder.alternating,)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A way before it is simulated."""

    candidate: Candidate
    scheme: Scheme
    laid: PricedWork
    passes: Passes
    least: float
    """Lower bound in seconds: no simulation of it is shorter."""


class Search:
    def __init__(self, place: CapacityPlace, jobs: Sequence[JobOutline]) -> None:
        self.place, self.jobs = place, jobs
        self.desk = _Desk(place, jobs)
        self.proposals: list[_Proposal] = []
        for candidate in candidates(jobs, place.layout):
            for order in orders_of(place):
                scheme = self.desk.sorted_for(Scheme("weftune", candidate.groups, order))
                if all(one.scheme != scheme for one in self.proposals):
                    self.proposals.append(self.desk.propose(candidate, scheme))

    @property
    def least(self) -> float:
        """Lower bound in seconds over all proposals."""
        return min(one.least for one in self.proposals)

    def tried(self) -> list[Tried]:
        return self.desk.simulate(self.proposals)


def polished(best: Tried, place: CapacityPlace, jobs: Sequence[JobOutline]) -> Tried:
    """Return the best way found by changing one property at a time: merging, packing, order, or no
    sharing."""
    desk = _Desk(place, jobs)
    while True:
        proposals = [desk.propose(best.candidate, scheme) for scheme in _neighbours(best.scheme, desk, jobs)]
        better = [one for one in proposals if one.least * (1 + ALIKE) < best.seconds]
        found = [one for one in desk.simulate(better) if one.run.forecast.fits]
        after = fastest([best, *found])
        if after.seconds * (1 + ALIKE) >= best.seconds:
            return best
        best = after


def _neighbours(scheme: Scheme, desk: _Desk, jobs: Sequence[JobOutline]) -> list[Scheme]:
    schemes = [
        replace(scheme, shift=not scheme.shift),
        replace(scheme, limits=SEARCHED if scheme.limits == GREEDY else GREEDY),
        replace(scheme, groups=alone(jobs), shift=False),
        *(replace(scheme, order=order) for order in orders_of(desk.place)),
    ]
    return [one for one in map(desk.sorted_for, schemes) if one != scheme]


class _Desk:
    """Lays out and orders ways at one place, and caches the layouts."""

    def __init__(self, place: CapacityPlace, jobs: Sequence[JobOutline]) -> None:
        self.place, self.jobs = place, jobs
        self.laid: dict[Scheme, PricedWork] = {}

    def sorted_for(self, scheme: Scheme) -> Scheme:
        """Return the scheme with its groups in order: the template takes the slowest group first."""
        if scheme.order is not SchemeOrder.template:
            return scheme
        return replace(scheme, groups=slowest_first(self.lay(scheme), scheme.groups))

    def lay(self, scheme: Scheme) -> PricedWork:
        same = replace(scheme, order=SchemeOrder.alternating)
        if same not in self.laid:
            self.laid[same] = lay(same, self.jobs, self.place.ground, self.place.layout)
        return self.laid[same]

    def propose(self, candidate: Candidate, scheme: Scheme) -> _Proposal:
        laid, link = self.lay(scheme), self.place.ground.cluster.link
        passes = passes_in(scheme.order, laid, self.place.layout)
        return _Proposal(candidate, scheme, laid, passes, least_seconds(passes, laid.prices, link))

    def simulate(self, proposals: Sequence[_Proposal]) -> list[Tried]:
        """Simulate the most promising proposals first, until no other can be faster; return them in the order
        of the proposals."""
        ground, layout = self.place.ground, self.place.layout
        found: dict[int, Tried] = {}
        least = float("inf")
        for number in sorted(range(len(proposals)), key=lambda one: proposals[one].least):
            one = proposals[number]
            if one.least > least * (1 + ALIKE):
                break
            run = run_passes(one.passes, one.laid, one.scheme, self.jobs, ground, layout)
            found[number] = Tried(one.candidate, one.scheme, run)
            if run.forecast.fits:
                least = min(least, run.forecast.seconds)
        return [found[number] for number in sorted(found)]
