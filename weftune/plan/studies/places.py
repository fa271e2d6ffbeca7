"""The token capacities at which the jobs could run, with what is then recomputed and the cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weftune.errors import PlanError
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.studies.fit import Ground, Placement, frugal, ground_capacities, lay_out

T = TypeVar("T")
ALIKE = 1e-3
"""Ways whose times differ by less than this share are alike, and the one proposed first is taken."""

PATIENCE = 2
"""Smaller capacities in a row that do not help."""


@dataclass(frozen=True, slots=True)
class CapacityPlace:
    """Where the jobs could run: what is recomputed, and the cut for a token capacity."""

    ground: Ground
    layout: Placement


def places(ground: Ground, jobs: Sequence[JobOutline]) -> list[CapacityPlace]:
    """Those that fit, from the largest capacity down.

    One device has no waits that smaller ones could shorten, but may choose what to recompute; a pipeline
    recomputes only what it must.
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
    """What `run` makes of each place, until a pipeline's capacities have been too small twice in a row.

    Waits get shorter and passes dearer with every halving; rounding to whole microbatches makes a dent in it.
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


def _fitting(ground: Ground, jobs: Sequence[JobOutline]) -> Iterator[CapacityPlace]:
    for capacity in ground_capacities(ground, jobs):
        try:
            yield CapacityPlace(ground, lay_out(ground, jobs, capacity))
        except PlanError:
            continue
