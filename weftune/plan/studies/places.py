"""Token capacities at which the jobs could run, each with its recomputation and its cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weftune.errors import PlanError
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.studies.fit import ClusterCase, Placement, frugal, ground_capacities, lay_out

T = TypeVar("T")
ALIKE = 1e-3
"""Relative difference below which times are considered equal; the way proposed first is then chosen."""

PATIENCE = 2
"""Number of consecutive smaller capacities without improvement after which the search stops."""


@dataclass(frozen=True, slots=True)
class CapacityPlace:
    """A way to place the jobs: what is recomputed, and the cut for a token capacity."""

    ground: ClusterCase
    layout: Placement


def places(ground: ClusterCase, jobs: Sequence[JobOutline]) -> list[CapacityPlace]:
    """Return the places that fit, from the largest capacity down.

    One device has no waits that smaller capacities could shorten, but may choose what to recompute; a
    pipeline recomputes only what it must.
    """
    found: list[CapacityPlace] = []
    for choice in frugal(ground):
        fitting = _fitting(choice, jobs)
        if ground.stages > 1:
            found = list(fitting)
            if found:
                break
        else:
            largest = next(fitting, None)
            found += [largest] if largest else []
            if largest and largest.layout.capacity >= ground.most:
                break
    return found


def descend(
    tried: Iterable[CapacityPlace], run: Callable[[CapacityPlace], T], seconds: Callable[[T], float]
) -> list[T]:
    """Return the result of `run` for each place, until two consecutive capacities of a pipeline were worse.

    With every halving, waits get shorter and passes more expensive; rounding to whole microbatches makes the
    trend uneven.
    """
    found: list[T] = []
    least, worse = float("inf"), 0
    for place in tried:
        found.append(run(place))
        now = seconds(found[-1])
        worse = worse + 1 if now > least * (1 + ALIKE) else 0
        if len(place.layout.stages) > 1 and worse == PATIENCE:
            break
        least = min(least, now)
    return found


def _fitting(ground: ClusterCase, jobs: Sequence[JobOutline]) -> Iterator[CapacityPlace]:
    for capacity in ground_capacities(ground, jobs):
        try:
            yield CapacityPlace(ground, lay_out(ground, jobs, capacity))
        except PlanError:
            continue
