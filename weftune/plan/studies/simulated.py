"""What a cluster would make of the jobs: the best way of running them that the search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.errors import Mistake, PlanError
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.memory import gib
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.studies.candidates import Candidate
from weftune.plan.studies.fit import Ground, Placement, why_not
from weftune.plan.studies.forecast import ForecastRun
from weftune.plan.studies.places import CapacityPlace, descend, places
from weftune.plan.studies.scheme import Scheme
from weftune.plan.studies.search import Search, Tried, fastest, polished


@dataclass(frozen=True, slots=True)
class Outlook:
    ground: Ground
    jobs: tuple[JobOutline, ...]
    layout: Placement
    candidate: Candidate
    scheme: Scheme
    run: ForecastRun
    tried: tuple[Tried, ...]
    """At the capacity that was chosen."""
    source: str
    """Where times come from."""

    @property
    def forecast(self) -> Forecast:
        return self.run.forecast


def outlook(ground: Ground, jobs: Sequence[JobOutline]) -> Outlook:
    """The best that is found for these jobs, all aboard together; PlanError says what does not fit."""
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


def refuse(ground: Ground, jobs: Sequence[JobOutline]) -> None:
    """PlanError for every job without samples, or that does not fit even alone."""
    refuse_empty(ground, jobs)
    alone = [(job.name, sentence) for job in jobs if (sentence := why_not(ground, [job]))]
    if alone:
        raise PlanError(Mistake(f"job {name}", f"even alone it {sentence}") for name, sentence in alone)


def refuse_empty(ground: Ground, jobs: Sequence[JobOutline]) -> None:
    """PlanError for every job without samples, and for devices without room for anything."""
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
    """The best plan so far; a place where nothing could beat it is not planned for."""

    def __init__(self, jobs: Sequence[JobOutline]) -> None:
        self.jobs = jobs
        self.best: Outlook | None = None

    def evaluate(self, place: CapacityPlace) -> float:
        """What the jobs take there, or at least take."""
        search = Search(place, self.jobs)
        if self.best is not None and search.least >= self.best.forecast.seconds:
            return search.least
        found = _best_at(search)
        # Of equals the first, which has the largest capacity and makes least again.
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
