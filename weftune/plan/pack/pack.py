"""Greedy packing of samples into microbatches: longest first, each into the fullest microbatch with room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from weftune.plan.pack.instance import Bins, Instance, padded


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices of `lengths` in bins of at most `capacity`, by best fit decreasing."""
    assert all(length <= capacity for length in lengths), "a sample is longer than the capacity"
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, (lengths[index], -1))
        if place == len(rooms):
            bins.append([index])
            insort(rooms, (capacity - lengths[index], len(bins) - 1))
        else:
            room, chosen = rooms.pop(place)
            bins[chosen].append(index)
            insort(rooms, (room - lengths[index], chosen))
    return bins


def pack_padded(case: Instance) -> Bins:
    """Pack by best fit decreasing with padding per job: a sample costs a bin only the rows that it adds."""
    if case.multiple == 1:
        return pack(case.lengths, case.capacity)
    bins: Bins = []
    loads: list[int] = []
    rows: list[dict[int, int]] = []  # per bin: job -> its tokens
    for index in sorted(range(len(case.lengths)), key=lambda i: -case.lengths[i]):
        job, length = case.jobs[index], case.lengths[index]
        best, best_key = len(bins), (0, 0)
        for place, load in enumerate(loads):
            held = rows[place].get(job, 0)
            after = load + padded(held + length, case.multiple) - padded(held, case.multiple)
            # Take the fullest afterwards; among equals the one that grows least, which uses up padding.
            if after <= case.capacity and (after, load) > best_key:
                best, best_key = place, (after, load)
        if best == len(bins):
            bins.append([])
            loads.append(0)
            rows.append({})
        bins[best].append(index)
        rows[best][job] = rows[best].get(job, 0) + length
        loads[best] = case.load(bins[best])
    return bins
