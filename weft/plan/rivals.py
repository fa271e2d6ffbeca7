"""The ways that others would run the same jobs, each with the token capacity that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.plan.candidate import alone
from weft.plan.estimate import JobOutline
from weft.plan.forecast import Forecast, in_turn, run_scheme
from weft.plan.lay import lay
from weft.plan.ordering import least_seconds, passes_in
from weft.plan.places import Place, descend
from weft.plan.scheme import GREEDY, Order, Scheme


@dataclass(frozen=True, slots=True)
class Part:
    """Jobs that run together; the parts of a way follow one another."""

    scheme: Scheme
    jobs: tuple[JobOutline, ...]


Way = Callable[[Sequence[JobOutline]], list[Part]]


def one_after_another(jobs: Sequence[JobOutline]) -> list[Part]:
    return _job_by_job("one after another", Order.one_at_a_time, jobs)


def one_piped_after_another(jobs: Sequence[JobOutline]) -> list[Part]:
    return _job_by_job("1F1B per job", Order.alternating, jobs)


def mlora(jobs: Sequence[JobOutline]) -> list[Part]:
    return [Part(Scheme("mLoRA", alone(jobs), Order.multi_job, GREEDY, shift=False), tuple(jobs))]


def greedily_packed(jobs: Sequence[JobOutline]) -> list[Part]:
    together = (tuple(job.name for job in jobs),)
    return [Part(Scheme("greedy packing only", together, limits=GREEDY, shift=False), tuple(jobs))]


WAYS: tuple[Way, ...] = (one_after_another, one_piped_after_another, mlora, greedily_packed)


def rivals(tried: Sequence[Place], jobs: Sequence[JobOutline]) -> tuple[Forecast, ...]:
    return tuple(at_its_best(way, tried, jobs) for way in WAYS)


def at_its_best(way: Way, tried: Sequence[Place], jobs: Sequence[JobOutline]) -> Forecast:
    """Simulated with the token capacity at which it should be fastest, of those where it fits."""
    parts = way(jobs)
    quick = descend(tried, lambda place: _least(parts, place), lambda one: one)
    found: Forecast | None = None
    for number in sorted(range(len(quick)), key=quick.__getitem__):
        run = in_turn([_run(part, tried[number]) for part in parts])
        found = found or run
        if run.fits:
            return run
    assert found is not None, "there is a place"
    return found


def _job_by_job(name: str, order: Order, jobs: Sequence[JobOutline]) -> list[Part]:
    return [Part(Scheme(name, ((job.name,),), order, GREEDY, shift=False), (job,)) for job in jobs]


def _run(part: Part, place: Place) -> Forecast:
    return run_scheme(part.scheme, part.jobs, place.ground, place.layout).forecast


def _least(parts: Sequence[Part], place: Place) -> float:
    """Seconds if no transport ever waited for another."""
    total = 0.0
    for part in parts:
        laid = lay(part.scheme, part.jobs, place.ground, place.layout)
        passes = passes_in(part.scheme.order, laid, place.layout)
        total += least_seconds(passes, laid.prices, place.ground.cluster.link)
    return total
