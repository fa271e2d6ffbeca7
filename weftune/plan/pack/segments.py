"""Packing of samples of several jobs into shared microbatches. If CUDA graphs are captured, microbatches have
only a few different sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weftune.plan.pack.best import LIMITS, Limits, pack_best
from weftune.plan.program.program import MicrobatchPlan, PlacedSample, SegmentPlan, sample_groups


def ladder_size(tokens: int) -> int:
    """Round `tokens` up to an allowed microbatch size, in rows. There are at most sixteen allowed sizes per
    power of two, and neighbouring sizes are at least 128 apart."""
    step = max(128, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step


def smallest_ladder_size(lengths: Sequence[int], capacity: int, limits: Limits = LIMITS) -> int:
    """Return the smallest allowed microbatch size, in rows (see `ladder_size`), for which the samples need no
    more microbatches than with `capacity` rows."""
    if not lengths:
        return capacity
    fewest = pack_best(lengths, capacity, limits=limits).count
    size = ladder_size(max(-(-sum(lengths) // fewest), *lengths))
    while size < capacity and pack_best(lengths, size, limits=limits).count > fewest:
        size = ladder_size(size + 1)
    return min(size, capacity)


def pack_segments(
    segments: Iterable[SegmentPlan], capacity: int, pads_to_ladder: bool = False, limits: Limits = LIMITS
) -> list[MicrobatchPlan]:
    """Return microbatches with the samples of all `segments`. Within a microbatch, the samples of a job are
    contiguous. Samples with the same group number, such as a preference pair, are in one microbatch.

    With `pads_to_ladder`, microbatches are padded to the allowed sizes of `ladder_size`. `limits` bound the
    effort of the search for a packing.
    """
    segments = list(segments)
    pieces = [
        (number, together)
        for number, segment in enumerate(segments)
        for together in sample_groups(segment.samples)
    ]
    lengths = [sum(placed.length for placed in together) for _, together in pieces]
    size = smallest_ladder_size(lengths, capacity, limits) if pads_to_ladder else capacity
    bins = pack_best(lengths, size, limits=limits).bins
    made = [_microbatch(segments, [pieces[index] for index in chosen]) for chosen in bins]
    return (
        [replace(one, padded_rows=min(ladder_size(one.tokens), capacity)) for one in made]
        if pads_to_ladder
        else made
    )


def _microbatch(
    segments: Sequence[SegmentPlan], pieces: Iterable[tuple[int, tuple[PlacedSample, ...]]]
) -> MicrobatchPlan:
    samples_of_microbatch: dict[int, list[PlacedSample]] = {}
    for number, together in sorted(pieces, key=lambda piece: (piece[0], piece[1][0].offset)):
        samples_of_microbatch.setdefault(number, []).extend(together)
    return MicrobatchPlan(
        tuple(
            SegmentPlan(segments[number].job, segments[number].step, tuple(samples))
            for number, samples in samples_of_microbatch.items()
        )
    )
