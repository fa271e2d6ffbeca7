"""Ways in which other systems would run the same jobs, each with the token capacity that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.outlook.forecast import Forecast, in_turn
from weftune.plan.studies.forecast import run_passes
from weftune.plan.studies.ordering import least_seconds, passes_in
from weftune.plan.studies.places import CapacityPlace, descend
from weftune.plan.studies.priced import PricedWork, lay
from weftune.plan.studies.scheme import GREEDY, Scheme
from weftune.plan.window.orders import Passes


@dataclass(frozen=True, slots=True)
class RivalPart:
    """Jobs that run together; the parts of a way run one after another."""

    scheme: Scheme
    jobs: tuple[JobOutline, ...]


Way = Callable[[Sequence[JobOutline]], list[RivalPart]]


def one_piped_after_another(jobs: Sequence[JobOutline]) -> list[RivalPart]:
    return [
        RivalPart(Scheme("1F1B per job", ((job.name,),), limits=GREEDY, shift=False), (job,)) for job in jobs
    ]


def greedily_packed(jobs: Sequence[JobOutline]) -> list[RivalPart]:
    together = (tuple(job.name for job in jobs),)
    return [RivalPart(Scheme("greedy packing only", together, limits=GREEDY, shift=False), tuple(jobs))]


@dataclass(frozen=True, slots=True)
class _OrderedPart:
    """A part at one place, before it is simulated."""

    part: RivalPart
    place: CapacityPlace
    laid: PricedWork
    passes: Passes
    least: float
    """Seconds if no transfer ever waited for another."""

    def run(self) -> Forecast:
        part, place = self.part, self.place
        return run_passes(self.passes, self.laid, part.scheme, part.jobs, place.ground, place.layout).forecast


def at_its_best(way: Way, tried: Sequence[CapacityPlace], jobs: Sequence[JobOutline]) -> Forecast:
    """Return a simulation with the capacity at which the way should be fastest, of those where it fits."""
    parts = way(jobs)
    ordered = descend(tried, lambda place: [_ordered(part, place) for part in parts], _seconds)
    runs = (in_turn([one.run() for one in found]) for found in sorted(ordered, key=_seconds))
    fastest = next(runs)
    return next((run for run in chain([fastest], runs) if run.fits), fastest)


def _ordered(part: RivalPart, place: CapacityPlace) -> _OrderedPart:
    laid = lay(part.scheme, part.jobs, place.ground, place.layout)
    passes = passes_in(part.scheme.order, laid, place.layout)
    return _OrderedPart(
        part, place, laid, passes, least_seconds(passes, laid.prices, place.ground.cluster.link)
    )


def _seconds(parts: Sequence[_OrderedPart]) -> float:
    return sum(part.least for part in parts)
