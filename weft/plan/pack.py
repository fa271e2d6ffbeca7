"""Samples to microbatches, greedily: the longest first, each into the fullest microbatch with room for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from weft.plan.program import MicrobatchPlan, Placed, SegmentPlan


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`, by best fit decreasing."""
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


def pack_segments(segments: Iterable[SegmentPlan], capacity: int) -> list[MicrobatchPlan]:
    """Microbatches that share the samples of all `segments`; in each, a job's samples stay together."""
    segments = list(segments)
    pieces = [(rank, placed) for rank, segment in enumerate(segments) for placed in segment.samples]
    bins = pack([placed.length for _, placed in pieces], capacity)
    return [_microbatch(segments, [pieces[index] for index in chosen]) for chosen in bins]


def _microbatch(segments: Sequence[SegmentPlan], pieces: Iterable[tuple[int, Placed]]) -> MicrobatchPlan:
    held: dict[int, list[Placed]] = {}
    for rank, placed in sorted(pieces, key=lambda piece: (piece[0], piece[1].offset)):
        held.setdefault(rank, []).append(placed)
    return MicrobatchPlan(
        tuple(
            SegmentPlan(segments[rank].job, segments[rank].step, tuple(samples))
            for rank, samples in held.items()
        )
    )
