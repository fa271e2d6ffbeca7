"""The ways that others would run the same jobs, each with the token capacity that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.outlook.forecast import Forecast, in_turn
from weftune.plan.program.recompute import Recompute
from weftune.plan.studies.candidates import alone
from weftune.plan.studies.forecast import run_passes
from weftune.plan.studies.ordering import least_seconds, passes_in
from weftune.plan.studies.places import CapacityPlace, descend
from weftune.plan.studies.priced import PricedWork, lay
from weftune.plan.studies.scheme import GREEDY, Scheme, SchemeOrder
from weftune.plan.window.orders import Passes


@dataclass(frozen=True, slots=True)
class RivalPart:
    """Jobs that run together; the parts of a way follow one another."""

    scheme: Scheme
    jobs: tuple[JobOutline, ...]


Way = Callable[[Sequence[JobOutline]], list[RivalPart]]


def one_after_another(jobs: Sequence[JobOutline]) -> list[RivalPart]:
    return _job_by_job("one after another", SchemeOrder.one_at_a_time, jobs)


def one_piped_after_another(jobs: Sequence[JobOutline]) -> list[RivalPart]:
    return _job_by_job("1F1B per job", SchemeOrder.alternating, jobs)


def mlora(jobs: Sequence[JobOutline]) -> list[RivalPart]:
    return [RivalPart(Scheme("mLoRA", alone(jobs), SchemeOrder.multi_job, GREEDY, shift=False), tuple(jobs))]


def greedily_packed(jobs: Sequence[JobOutline]) -> list[RivalPart]:
    together = (tuple(job.name for job in jobs),)
    return [RivalPart(Scheme("greedy packing only", together, limits=GREEDY, shift=False), tuple(jobs))]


WAYS: tuple[Way, ...] = (one_after_another, one_piped_after_another, mlora, greedily_packed)


def rivals(tried: Sequence[CapacityPlace], jobs: Sequence[JobOutline]) -> tuple[Forecast, ...]:
    desk = _Desk()
    return tuple(desk.at_its_best(way(jobs), tried) for way in WAYS)


def at_its_best(way: Way, tried: Sequence[CapacityPlace], jobs: Sequence[JobOutline]) -> Forecast:
    """Simulated with the token capacity at which it should be fastest, of those where it fits."""
    return _Desk().at_its_best(way(jobs), tried)


def _job_by_job(name: str, order: SchemeOrder, jobs: Sequence[JobOutline]) -> list[RivalPart]:
    return [RivalPart(Scheme(name, ((job.name,),), order, GREEDY, shift=False), (job,)) for job in jobs]


@dataclass(frozen=True, slots=True)
class _Setting:
    """A part's scheme, which names its jobs, and where: all in which layouts and orders differ."""

    scheme: Scheme
    recompute: Recompute
    capacity: int


class _Desk:
    """Lays out parts, nothing twice: some ways differ in their order only, and all are timed and then run."""

    def __init__(self) -> None:
        self.laid: dict[_Setting, PricedWork] = {}
        self.passes: dict[_Setting, Passes] = {}

    def at_its_best(self, parts: Sequence[RivalPart], tried: Sequence[CapacityPlace]) -> Forecast:
        quick = descend(tried, lambda place: self.least(parts, place), lambda one: one)
        found: Forecast | None = None
        for number in sorted(range(len(quick)), key=quick.__getitem__):
            run = in_turn([self.run(part, tried[number]) for part in parts])
            found = found or run
            if run.fits:
                return run
        assert found is not None, "there is a place"
        return found

    def lay(self, part: RivalPart, place: CapacityPlace) -> PricedWork:
        same = _setting(replace(part.scheme, name="", order=SchemeOrder.alternating), place)
        if same not in self.laid:
            self.laid[same] = lay(part.scheme, part.jobs, place.ground, place.layout)
        return self.laid[same]

    def order(self, part: RivalPart, place: CapacityPlace) -> Passes:
        setting = _setting(part.scheme, place)
        if setting not in self.passes:
            self.passes[setting] = passes_in(part.scheme.order, self.lay(part, place), place.layout)
        return self.passes[setting]

    def run(self, part: RivalPart, place: CapacityPlace) -> Forecast:
        laid, passes = self.lay(part, place), self.order(part, place)
        return run_passes(passes, laid, part.scheme, part.jobs, place.ground, place.layout).forecast

    def least(self, parts: Sequence[RivalPart], place: CapacityPlace) -> float:
        """Seconds if no transport ever waited for another."""
        total = 0.0
        for part in parts:
            laid, passes = self.lay(part, place), self.order(part, place)
            total += least_seconds(passes, laid.prices, place.ground.cluster.link)
        return total


def _setting(scheme: Scheme, place: CapacityPlace) -> _Setting:
    return _Setting(scheme, place.ground.recompute, place.layout.capacity)
