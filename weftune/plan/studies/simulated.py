"""Forecast for a cluster: the best way of running the jobs that the search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.errors import Mistake, PlanError
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.memory import gib
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.studies.candidates import Candidate
from weftune.plan.studies.fit import ClusterCase, Placement, why_not
from weftune.plan.studies.forecast import ForecastRun
from weftune.plan.studies.places import CapacityPlace, descend, places
from weftune.plan.studies.scheme import Scheme
from weftune.plan.studies.search import Search, Tried, fastest, polished


@dataclass(frozen=True, slots=True)
class Outlook:
    ground: ClusterCase
    jobs: tuple[JobOutline, ...]
    layout: Placement
    candidate: Candidate
    scheme: Scheme
    run: ForecastRun
    tried: tuple[Tried, ...]
    """Ways that were simulated at the chosen capacity."""
    source: str
    """Origin of the times."""

    @property
    def forecast(self) -> Forecast:
        return self.run.forecast


def outlook(ground: ClusterCase, jobs: Sequence[JobOutline]) -> Outlook:
    """Return the best plan found for these jobs together; raise PlanError if they do not fit."""
    refuse(ground, jobs)
    if together := why_not(ground, jobs):
        raise PlanError(f"the jobs do not fit together: the run {together}")
    descent = _Descent(jobs)
    descend(places(ground, jobs), descent.evaluate, lambda one: one)
    best = descent.best
    assert best is not None, "the first place that is looked at is planned for"
    last = polished(
        Tried(best.candidate, best.scheme, best.run), CapacityPlace(best.ground, best.layout), jobs
    )
    return replace(best, scheme=last.scheme, run=last.run)


def refuse(ground: ClusterCase, jobs: Sequence[JobOutline]) -> None:
    """Raise PlanError for every job that has no samples or does not fit even alone."""
    refuse_empty(ground, jobs)
    alone = [(job.name, sentence) for job in jobs if (sentence := why_not(ground, [job]))]
    if alone:
        raise PlanError(Mistake(f"job {name}", f"even alone it {sentence}") for name, sentence in alone)


def refuse_empty(ground: ClusterCase, jobs: Sequence[JobOutline]) -> None:
    """Raise PlanError for every job without samples, and for devices without memory for anything."""
    assert jobs, "there is a job to plan for"
    empty = [job.name for job in jobs if not any(job.batches)]
    if empty:
        raise PlanError(Mistake(f"job {name}", "it has 0 samples to train on") for name in empty)
    if max(ground.budgets) <= ground.slack:
        raise PlanError(
            f"--cluster {ground.cluster.name}: {gib(max(ground.budgets))} may be taken of a device, but "
            f"{gib(ground.slack)} are needed before anything of the base is loaded"
        )


class _Descent:
    """The best plan so far; a place whose lower bound cannot beat it is not planned for."""

    def __init__(self, jobs: Sequence[JobOutline]) -> None:
        self.jobs = jobs
        self.best: Outlook | None = None

    def evaluate(self, place: CapacityPlace) -> float:
        """Return the seconds of the jobs there, or a lower bound."""
        search = Search(place, self.jobs)
        if self.best is not None and search.least >= self.best.forecast.seconds:
            return search.least
        found = _best_at(search)
        # Among equals the first is kept, which has the largest capacity and recomputes least.
        if self.best is None or found.forecast.seconds < self.best.forecast.seconds:
            self.best = found
        return found.forecast.seconds


def _best_at(search: Search) -> Outlook:
    place = search.place
    tried = search.tried()
    best = fastest(tried)
    return Outlook(
        ground=place.ground,
        jobs=tuple(search.jobs),
        layout=place.layout,
        candidate=best.candidate,
        scheme=best.scheme,
        run=best.run,
        tried=tuple(tried),
        source=place.ground.speeds[0].source,
    )
