"""Lower bound on the number of microbatches, proven without packing: L2 of Martello and Toth."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from weftune.plan.pack.instance import Instance, instance


def bound(lengths: Sequence[int], capacity: int, multiple: int = 1, jobs: Sequence[int] | None = None) -> int:
    """Return a lower bound on the number of microbatches if each job's rows are padded to `multiple`."""
    return bound_of(instance(lengths, capacity, multiple, jobs))


def bound_of(case: Instance) -> int:
    # Padding joins samples of one job, so a sample's own length may not be rounded up, only a job's sum.
    by_rows = -(-case.rows // case.capacity) if case.lengths else 0
    return max(by_rows, _l2(case.lengths, case.capacity))


def _l2(lengths: Sequence[int], capacity: int) -> int:
    """Return the largest of the bounds given by each smallest length worth counting.

    Samples longer than half a microbatch each need their own. Of the others, those shorter than `smallest`
    are ignored, and so is the room beside a long sample where `smallest` does not fit.
    """
    ordered = sorted(lengths)
    sums = [0, *accumulate(ordered)]
    half = bisect_right(ordered, capacity // 2)  # from here on longer than half
    large = len(ordered) - half
    best = large
    for smallest in sorted({0, *ordered[:half]}):
        hosts = max(half, bisect_right(ordered, capacity - smallest))  # from `half` to here `smallest` fits
        room = (hosts - half) * capacity - (sums[hosts] - sums[half])
        small = sums[half] - sums[bisect_left(ordered, smallest)]
        best = max(best, large + max(0, -(-(small - room) // capacity)))
    return best
