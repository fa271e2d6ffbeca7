"""A search for a packing of samples into as few microbatches (bins) as possible, with bounded effort.

The best-fit heuristic runs first. If this heuristic needs more bins than the lower bound, samples are
exchanged between bins, and a few bins are repacked at random. Effort is limited by counts, not by seconds, so
a packing is a pure function of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weftune.plan.pack.instance import Bins, Instance, lower_bound, make_instance, pack_padded
from weftune.plan.pack.swap import exchange_samples, least_load, least_possible_load, repack_randomly

PackingMethod = Literal["greedy", "swap", "shake"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the effort of the search for a packing."""

    max_exchanges: int = 4000
    """Maximum number of exchanges of samples between two bins (microbatches)."""
    max_repackings: int = 50
    """Maximum number of times that a few bins (microbatches) are repacked at random."""


LIMITS = Limits()
BEST_FIT_ONLY = Limits(max_exchanges=0, max_repackings=0)


@dataclass(frozen=True, slots=True)
class Packing:
    """A packing of samples into microbatches. `bins` contains the sample indices of each microbatch, the
    fullest first."""

    bins: tuple[tuple[int, ...], ...]
    greedy_bin_count: int
    """Number of microbatches that the best-fit heuristic alone needs."""
    lower_bound: int
    """Lower bound on the number of microbatches, which may not be reachable."""
    least_rows: int
    """Number of rows in the least full microbatch, which is the last element of `bins`."""
    method: PackingMethod
    is_optimal: bool
    """Whether the lower bound proves that fewer microbatches are impossible."""

    @property
    def count(self) -> int:
        return len(self.bins)


def pack_best(
    lengths: Sequence[int],
    capacity: int,
    multiple: int = 1,
    jobs: Sequence[int] | None = None,
    leaves_room: bool = False,
    limits: Limits = LIMITS,
) -> Packing:
    """Return a packing of samples of the given lengths into few microbatches of at most `capacity` rows,
    never more microbatches than the best-fit heuristic needs.

    With `leaves_room`, the rows of the last microbatch are also minimised, so that samples of the next round
    (one global batch of every job) can be added to it. The rows of each job in a microbatch are padded to a
    multiple of `multiple`. `jobs` contains the index of each sample's job. None means that all samples belong
    to one job.
    """
    return pack_instance(make_instance(lengths, capacity, multiple, jobs), leaves_room, limits)


def pack_instance(case: Instance, leaves_room: bool = False, limits: Limits = LIMITS) -> Packing:
    greedy, fewest = pack_padded(case), lower_bound(case)
    bins = greedy
    method: PackingMethod = "greedy"

    def keep_if_better(candidate: Bins, candidate_method: PackingMethod) -> None:
        nonlocal bins, method
        fewer, equal = len(candidate) < len(bins), len(candidate) == len(bins)
        if fewer or (equal and least_load(case, candidate) < least_load(case, bins)):
            bins, method = candidate, candidate_method

    def can_free_rows() -> bool:
        """Return whether the least full bin (microbatch) has so many more rows than its minimum that the
        shortest sample could be moved out."""
        spare = least_load(case, bins) - least_possible_load(case, len(bins))
        return leaves_room and spare >= min(case.lengths, default=1)

    if len(bins) > fewest:
        keep_if_better(exchange_samples(case, bins, fewest, limits.max_exchanges), "swap")
    if len(bins) > fewest:
        keep_if_better(
            repack_randomly(case, bins, fewest, limits.max_repackings, limits.max_exchanges), "shake"
        )
    if can_free_rows():
        keep_if_better(exchange_samples(case, bins, fewest, limits.max_exchanges), "swap")
    ordered = sorted((sorted(chosen) for chosen in bins), key=lambda one: (-case.load(one), one))
    return Packing(
        bins=tuple(tuple(chosen) for chosen in ordered),
        greedy_bin_count=len(greedy),
        lower_bound=fewest,
        least_rows=least_load(case, ordered),
        method=method,
        is_optimal=len(ordered) == fewest,
    )
