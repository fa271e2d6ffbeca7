"""Improvement of a packing by exchanging samples between bins (microbatches), so that some bins become full
and others empty. The samples that fill a bin best are found by solving a subset-sum problem, in which the
bits of an integer are the possible sums."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from weftune.plan.pack.instance import Bins, Instance

REPACKED_BINS = 5
"""Number of bins (microbatches) that are repacked together. Among 3, 4 and 5, this value was best if two or
three samples fill a bin."""
KEPT = 0.6
"""Fraction of the samples, chosen at random, from which each bin (microbatch) is first filled when bins are
repacked at random."""
LOSS = 0.005
"""Maximum relative decrease in the sum of squared bin loads (tokens per bin) at which randomly repacked bins
are accepted."""


def exchange_samples(case: Instance, bins: Bins, min_bins: int, max_exchanges: int) -> Bins:
    """Return the bins (microbatches) after exchanges of samples between pairs of bins. The result has fewer
    bins or, if their number stays the same, at most as many rows in the least full bin.

    The fuller bin of a pair gets those samples of both bins that fill it best, if this bin then has more
    tokens than either bin had before. The sum of squared tokens therefore grows with every exchange, so the
    search ends, at the latest after `max_exchanges` tries. The search also ends when `min_bins` bins remain
    and the least full bin cannot have fewer rows.
    """
    search = _SwapSearch(case, [list(chosen) for chosen in bins], max_exchanges)
    while search.tries > 0 and not search.is_done(min_bins) and search.try_all_pairs():
        pass
    found = search.bins
    worse = len(found) == len(bins) and least_load(case, found) > least_load(case, bins)
    return bins if worse else found


def repack_randomly(
    case: Instance, bins: Bins, min_bins: int, max_repackings: int, max_exchanges: int
) -> Bins:
    """Return fewer bins (microbatches) if at most `max_repackings` random repackings of a few bins reduce
    their number, or else the given bins. The random seed is fixed, so the result depends only on the
    input."""
    random = Random(0)
    current = bins
    for kick in range(1, max_repackings + 1):
        if len(current) <= min_bins:
            break
        found = _repack_some_bins(case, current, random)
        if len(found) < len(current) or kick % 50 == 0:
            found = exchange_samples(case, found, min_bins, max_exchanges)
        current = found
    return current if len(current) < len(bins) else bins


def least_load(case: Instance, bins: Bins) -> int:
    """Return the number of rows in the least full bin (microbatch), including padding."""
    return min((case.load(chosen) for chosen in bins), default=0)


def least_possible_load(case: Instance, count: int) -> int:
    """Return the number of rows in the last of `count` bins (microbatches) if all other bins are full."""
    return max(0, case.rows - (count - 1) * case.capacity)


class _SwapSearch:
    def __init__(self, case: Instance, bins: Bins, max_exchanges: int) -> None:
        self.case = case
        self.bins = bins
        self.tries = max_exchanges

    def is_done(self, min_bins: int) -> bool:
        if len(self.bins) > min_bins:
            return False
        return least_load(self.case, self.bins) <= least_possible_load(self.case, len(self.bins))

    def try_all_pairs(self) -> bool:
        """Try to exchange samples between every pair of bins (microbatches) once. Return whether any samples
        were exchanged."""
        tokens = self.case.tokens
        self.bins.sort(key=lambda chosen: (-tokens(chosen), sorted(chosen)))
        changed = False
        token_counts = [tokens(chosen) for chosen in self.bins]
        for taker in range(len(self.bins)):
            for giver in range(len(self.bins) - 1, taker, -1):
                if self.tries == 0 or token_counts[taker] == self.case.capacity:
                    break
                changed |= self._exchange_in_pair(taker, giver, token_counts)
        self.bins = [chosen for chosen in self.bins if chosen]
        return changed

    def _exchange_in_pair(self, receiver: int, donor: int, bin_tokens: list[int]) -> bool:
        """Exchange samples between two bins (microbatches) if `receiver` becomes fuller than either bin was,
        and update `bin_tokens`. Return whether samples were exchanged."""
        if not self.bins[donor] or not self.bins[receiver]:
            return False
        self.tries -= 1
        case, pool = self.case, self.bins[receiver] + self.bins[donor]
        chosen = find_best_fill(case, pool, case.capacity)
        taken = case.tokens(chosen)
        if taken <= max(bin_tokens[receiver], bin_tokens[donor]):
            return False
        rest = _remove_samples(pool, chosen)
        # Padding may make the rest too large, although it has fewer tokens than before.
        if case.load(rest) > case.capacity:
            return False
        self.bins[receiver], self.bins[donor] = chosen, rest
        bin_tokens[receiver], bin_tokens[donor] = taken, bin_tokens[receiver] + bin_tokens[donor] - taken
        return True


def _repack_some_bins(case: Instance, bins: Bins, random: Random) -> Bins:
    """Repack the least full bin (microbatch) and a few others at random, and return all bins. Return the
    given bins if repacking increases their number or lowers the sum of the squared bin loads too much."""
    rooms = [case.capacity - case.tokens(chosen) + 1 for chosen in bins]
    opened = {rooms.index(max(rooms)), *random.choices(range(len(bins)), weights=rooms, k=REPACKED_BINS - 1)}
    before = [bins[number] for number in sorted(opened)]
    after = _repack_samples(case, [index for chosen in before for index in chosen], random)
    squares, squares_before = (sum(case.tokens(one) ** 2 for one in some) for some in (after, before))
    small_loss = squares >= squares_before * (1 - LOSS)
    if len(after) > len(before) or (len(after) == len(before) and not small_loss):
        return bins
    return [chosen for number, chosen in enumerate(bins) if number not in opened] + after


def _repack_samples(case: Instance, pool: list[int], random: Random) -> Bins:
    """Return new bins (microbatches) with these samples. Each bin gets the longest remaining sample, then
    samples of a random subset that fill it best, and then any others that fit."""
    pool = sorted(pool, key=lambda index: (-case.lengths[index], index))
    bins: Bins = []
    while pool:
        chosen = [pool[0]]
        some = [index for index in pool[1:] if random.random() < KEPT]
        chosen += find_best_fill(case, some, case.capacity - case.load(chosen))
        chosen += find_best_fill(case, _remove_samples(pool, chosen), case.capacity - case.load(chosen))
        pool = _remove_samples(pool, chosen)
        bins.append(chosen)
    return bins


def _remove_samples(pool: list[int], removed_samples: list[int]) -> list[int]:
    taken = set(removed_samples)
    return [index for index in pool if index not in taken]


def find_best_fill(case: Instance, pool: Sequence[int], free_rows: int) -> list[int]:
    """Return the samples of `pool` that fill `free_rows` rows with the most tokens. Among equally good
    choices, longer samples are preferred, because short ones are easier to place later."""
    if len({case.jobs[index] for index in pool}) <= 1:
        sums = _Sums(case, pool, free_rows // case.multiple * case.multiple)
        return sums.find_subset(sums.largest_sum(sums.room))
    return _best_padded_fill(case, pool, free_rows)


class _Sums:
    """All total token counts, up to `free_rows`, that subsets of the samples can have. In `reach[k]`, bit n
    is set if a subset of the k shortest samples has n tokens in total."""

    def __init__(self, case: Instance, pool: Sequence[int], free_rows: int) -> None:
        self.lengths = case.lengths
        self.room = free_rows
        self.order = sorted(pool, key=lambda index: (case.lengths[index], index))
        self.reach = [1]
        mask = (1 << (free_rows + 1)) - 1
        for index in self.order:
            before = self.reach[-1]
            self.reach.append((before | before << case.lengths[index]) & mask)

    def largest_sum(self, free_rows: int) -> int:
        """Return the largest number of tokens, at most `free_rows`, that a subset of the samples has in
        total."""
        return (self.reach[-1] & ((1 << (free_rows + 1)) - 1)).bit_length() - 1

    def find_subset(self, tokens: int) -> list[int]:
        """Return samples with exactly `tokens` tokens in total."""
        taken = []
        for count in range(len(self.order) - 1, -1, -1):
            rest = tokens - self.lengths[self.order[count]]
            if rest >= 0 and self.reach[count] >> rest & 1:
                taken.append(self.order[count])
                tokens = rest
        assert tokens == 0
        return taken


def _best_padded_fill(case: Instance, pool: Sequence[int], free_rows: int) -> list[int]:
    """Return the samples of `pool` that fill `free_rows` rows with the most tokens if the rows of each job
    are padded. The samples are found by dynamic programming over the jobs."""
    units = free_rows // case.multiple
    jobs: dict[int, list[int]] = {}
    for index in pool:
        jobs.setdefault(case.jobs[index], []).append(index)
    tokens = np.zeros(units + 1, dtype=np.int64)  # most tokens per number of units, by the jobs so far
    sums, shares = [], []
    for job in sorted(jobs):
        job_sums = _Sums(case, jobs[job], units * case.multiple)
        best, share = tokens.copy(), np.zeros(units + 1, dtype=np.int64)
        previous = 0
        for count in range(1, units + 1):
            added = job_sums.largest_sum(count * case.multiple)
            if added == previous:
                continue
            previous = added
            with_job = tokens[: units + 1 - count] + added
            better = with_job > best[count:]
            best[count:][better] = with_job[better]
            share[count:][better] = count
        tokens = best
        sums.append(job_sums)
        shares.append(share)
    taken: list[int] = []
    remaining_units = int(tokens.argmax())
    for job_sums, share in zip(reversed(sums), reversed(shares), strict=True):
        count = int(share[remaining_units])
        taken += job_sums.find_subset(job_sums.largest_sum(count * case.multiple))
        remaining_units -= count
    return taken
