"""Distribution of latencies over a given number of buckets (groups), so that the sums of the buckets are
nearly equal.

The distribution with the smallest variance is sought. Since the mean of the sums is fixed, it is the one with
the smallest sum of squares. For few latencies, the optimum is found. For many, the longest latencies are
placed first; then latencies are moved and swapped while that reduces the sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXACT = 10
"""Maximum number of latencies for which every distribution over buckets is tried."""
SMALLEST_GAIN = 1e-12
"""Minimum relative reduction of the sum of squared bucket sums that counts as a gain and not as a rounding
error."""

Buckets = tuple[tuple[int, ...], ...]
"""For each bucket (group of latencies), the indices of its latencies."""


def balance_latencies(latencies: Sequence[float], count: int) -> Buckets:
    """Return `count` buckets of latencies, none of them empty, whose sums are as nearly equal as the search
    finds."""
    assert 1 <= count <= len(latencies), "every bucket needs a latency"
    buckets = improve_by_moves(assign_longest_first(latencies, count), latencies)
    return _Search(latencies, buckets).best if len(latencies) <= EXACT else buckets


def variance(buckets: Buckets, latencies: Sequence[float]) -> float:
    return float(np.var(bucket_sums(buckets, latencies)))


def bucket_sums(buckets: Buckets, latencies: Sequence[float]) -> list[float]:
    return [sum(latencies[index] for index in bucket) for bucket in buckets]


def assign_longest_first(latencies: Sequence[float], count: int) -> Buckets:
    """Return `count` buckets of latencies, which are assigned from the longest to the shortest, each to the
    bucket with the smallest sum so far."""
    buckets: list[list[int]] = [[] for _ in range(count)]
    filled = [0.0] * count
    for index in _order_by_length(latencies):
        chosen = min(range(count), key=lambda number: (filled[number], len(buckets[number])))
        buckets[chosen].append(index)
        filled[chosen] += latencies[index]
    return tuple(map(tuple, buckets))


def improve_by_moves(buckets: Buckets, latencies: Sequence[float]) -> Buckets:
    """Return buckets with more nearly equal sums, found by greedy search: the move or swap of latencies that
    reduces the sum of the squared bucket sums most is applied, until none reduces it."""
    each = np.array(latencies, dtype=float)
    home = np.empty(len(each), dtype=int)
    for number, bucket in enumerate(buckets):
        home[list(bucket)] = number
    while change := _best_change(each, home, len(buckets)):
        for index, number in change.items():
            home[index] = number
    return tuple(tuple(np.flatnonzero(home == number).tolist()) for number in range(len(buckets)))


def _best_change(
    latencies: NDArray[np.float64], bucket_indices: NDArray[np.int_], count: int
) -> dict[int, int]:
    """Return the best move or swap of latencies, as a dict from the index of each moved latency to its new
    bucket. The dict is empty if no change reduces the sum of the squared bucket sums."""
    bucket_sums = np.bincount(bucket_indices, weights=latencies, minlength=count)
    # Moving d from a bucket of sum A to one of sum B changes the squares by 2d(B − A + d).
    moves = (
        2
        * latencies[:, None]
        * (bucket_sums[None, :] - bucket_sums[bucket_indices][:, None] + latencies[:, None])
    )
    moves[np.bincount(bucket_indices, minlength=count)[bucket_indices] == 1] = np.inf
    apart = latencies[:, None] - latencies[None, :]
    swaps = 2 * apart * (bucket_sums[bucket_indices][None, :] - bucket_sums[bucket_indices][:, None] + apart)
    if min(moves.min(), swaps.min()) >= -SMALLEST_GAIN * float(bucket_sums @ bucket_sums):
        return {}
    if moves.min() <= swaps.min():
        index, number = divmod(int(moves.argmin()), count)
        return {index: number}
    one, other = divmod(int(swaps.argmin()), len(latencies))
    return {one: int(bucket_indices[other]), other: int(bucket_indices[one])}


class _Search:
    """An exhaustive search over distributions of latencies to buckets. The search skips distributions that
    cannot be better than the best one found so far."""

    def __init__(self, latencies: Sequence[float], initial_buckets: Buckets) -> None:
        self.latencies = latencies
        self.order = _order_by_length(latencies)
        self.count = len(initial_buckets)
        self.best = initial_buckets
        self.squares = sum(total * total for total in bucket_sums(initial_buckets, latencies)) * (
            1 - SMALLEST_GAIN
        )
        self._assign_latency(0, [], [], 0.0)

    def _assign_latency(
        self, position: int, buckets: list[list[int]], sums: list[float], squares: float
    ) -> None:
        if squares >= self.squares or len(self.order) - position < self.count - len(buckets):
            return
        if position == len(self.order):
            self.best, self.squares = tuple(map(tuple, buckets)), squares
            return
        index = self.order[position]
        latency = self.latencies[index]
        for number, bucket in enumerate(buckets):
            before = sums[number]
            bucket.append(index)
            sums[number] += latency
            self._assign_latency(position + 1, buckets, sums, squares + latency * (2 * before + latency))
            bucket.pop()
            sums[number] = before
        if len(buckets) < self.count:
            self._assign_latency(
                position + 1, [*buckets, [index]], [*sums, latency], squares + latency * latency
            )


def _order_by_length(latencies: Sequence[float]) -> list[int]:
    return sorted(range(len(latencies)), key=lambda index: -latencies[index])
