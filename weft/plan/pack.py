"""Samples to microbatches, greedily: the longest first, each into the fullest microbatch with room for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace

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


def rung(tokens: int) -> int:
    """The next size on the ladder: sixteen rungs between a power of two and the next, none below 128."""
    step = max(128, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


def level(lengths: Sequence[int], capacity: int) -> int:
    """The lowest rung on which as few microbatches do as at full capacity: they are then evenly full."""
    if not lengths:
        return capacity
    fewest = len(pack(lengths, capacity))
    size = rung(max(-(-sum(lengths) // fewest), *lengths))
    while size < capacity and len(pack(lengths, size)) > fewest:
        size = rung(size + 1)
    return min(size, capacity)


def pack_segments(
    segments: Iterable[SegmentPlan], capacity: int, ladder: bool = False
) -> list[MicrobatchPlan]:
    """Microbatches that share the samples of all `segments`; in each, a job's samples stay together.

    With a `ladder`, each is to be padded to a rung.
    """
    segments = list(segments)
    pieces = [(rank, placed) for rank, segment in enumerate(segments) for placed in segment.samples]
    lengths = [placed.length for _, placed in pieces]
    bins = pack(lengths, level(lengths, capacity) if ladder else capacity)
    made = [_microbatch(segments, [pieces[index] for index in chosen]) for chosen in bins]
    return [replace(one, rung=min(rung(one.tokens), capacity)) for one in made] if ladder else made


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
