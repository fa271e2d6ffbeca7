"""A packing problem, a lower bound on the number of its microbatches, and the greedy solution.

The greedy solution is best fit decreasing: samples, the longest first, are put into the fullest microbatch
that has room for them. The lower bound is L2 of Martello and Toth.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Bins = list[list[int]]
"""Microbatches as lists of sample indices."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A packing problem: samples to pack into microbatches of at most `capacity` rows, in which the rows of
    each job are padded to a multiple of `multiple`."""

    lengths: tuple[int, ...]
    jobs: tuple[int, ...]
    """Index of each sample's job. All indices are 0 if rows are not padded, since packing then does not
    depend on jobs."""
    capacity: int
    """Maximum rows per microbatch, rounded down to a multiple of `multiple`."""
    multiple: int

    def tokens(self, samples: Iterable[int]) -> int:
        return sum(map(self.lengths.__getitem__, samples))

    def load(self, samples: Iterable[int]) -> int:
        """Return the number of rows of a microbatch with the given samples, including padding."""
        if self.multiple == 1:
            return self.tokens(samples)
        rows: dict[int, int] = {}
        for index in samples:
            rows[self.jobs[index]] = rows.get(self.jobs[index], 0) + self.lengths[index]
        return sum(pad_rows(count, self.multiple) for count in rows.values())

    @property
    def rows(self) -> int:
        """Number of rows, including padding, of a single microbatch with all samples."""
        return self.load(range(len(self.lengths)))


def make_instance(
    lengths: Sequence[int], capacity: int, multiple: int = 1, jobs: Sequence[int] | None = None
) -> Instance:
    """Return the packing problem for these samples, with the capacity rounded down to a multiple of
    `multiple`. Without `jobs`, all samples belong to one job."""
    assert jobs is None or len(jobs) == len(lengths), "every sample has a job"
    usable = capacity // multiple * multiple
    assert all(0 < length <= usable for length in lengths), "a sample is longer than the capacity"
    whose = (0,) * len(lengths) if jobs is None or multiple == 1 else tuple(jobs)
    return Instance(tuple(lengths), whose, usable, multiple)


def pad_rows(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins (microbatches) of sample indices, each of at most `capacity` rows, by best fit
    decreasing."""
    assert all(length <= capacity for length in lengths), "a sample is longer than the capacity"
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fullest = bisect_left(rooms, (lengths[index], -1))
        if fullest == len(rooms):
            bins.append([index])
            insort(rooms, (capacity - lengths[index], len(bins) - 1))
        else:
            room, chosen = rooms.pop(fullest)
            bins[chosen].append(index)
            insort(rooms, (room - lengths[index], chosen))
    return bins


def pack_padded(case: Instance) -> Bins:
    """Return bins (microbatches) of sample indices by best fit decreasing, where the rows of each job in a
    bin are padded. A sample may replace padding rows of its own job."""
    if case.multiple == 1:
        return pack(case.lengths, case.capacity)
    bins: Bins = []
    loads: list[int] = []
    rows: list[dict[int, int]] = []  # per bin: job -> its tokens
    for index in sorted(range(len(case.lengths)), key=lambda i: -case.lengths[i]):
        job, length = case.jobs[index], case.lengths[index]
        best, best_key = len(bins), (0, 0)
        for number, load in enumerate(loads):
            rows_before = rows[number].get(job, 0)
            after = (
                load + pad_rows(rows_before + length, case.multiple) - pad_rows(rows_before, case.multiple)
            )
            # Choose the bin that ends up fullest; among equals the one that grows least: it uses up padding.
            if after <= case.capacity and (after, load) > best_key:
                best, best_key = number, (after, load)
        if best == len(bins):
            bins.append([])
            loads.append(0)
            rows.append({})
        bins[best].append(index)
        rows[best][job] = rows[best].get(job, 0) + length
        loads[best] = case.load(bins[best])
    return bins


def lower_bound(case: Instance) -> int:
    """Return a lower bound on the number of microbatches."""
    # Samples of one job share padding, so only a job's sum may be rounded up, not each sample's length.
    by_rows = -(-case.rows // case.capacity) if case.lengths else 0
    return max(by_rows, _martello_toth_bound(case.lengths, case.capacity))


def _martello_toth_bound(lengths: Sequence[int], capacity: int) -> int:
    """Return the lower bound L2 on the number of microbatches: the largest of the bounds for every choice of
    `smallest`, the length below which samples are ignored.

    Each sample that is longer than half of a microbatch needs its own microbatch. Shorter samples can share
    its microbatch only if `smallest` tokens still fit.
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
