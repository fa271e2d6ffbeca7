"""Exchanges of samples between bins (microbatches), which fill some bins in order to empty others.

Which samples fill a bin best is a subset-sum problem, solved with the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from weftune.plan.pack.instance import Bins, Instance

SHAKEN = 5
"""Number of bins repacked together, the best of 3, 4 and 5 if two or three samples fill a bin."""
KEPT = 0.6
"""Fraction of the samples that a bin is first filled from."""
LOSS = 0.005
"""Relative loss in the sum of squared loads with which repacked bins are still accepted."""


def swap(case: Instance, bins: Bins, fewest: int, tries: int) -> Bins:
    """Exchange samples between bins. Neither the number of bins nor, at equal number, the smallest load
    grows.

    The fuller bin of a pair gets the samples of both that fill it best, if it then holds more than either
    did. So the sum of squared tokens grows with every exchange, and the search ends, at the latest after
    `tries`. It also ends when `fewest` bins remain and the least full bin cannot hold less.
    """
    search = _SwapSearch(case, [list(chosen) for chosen in bins], tries)
    while search.tries > 0 and not search.done(fewest) and search.round():
        pass
    found = search.bins
    worse = len(found) == len(bins) and emptiest(case, found) > emptiest(case, bins)
    return bins if worse else found


def shake(case: Instance, bins: Bins, fewest: int, kicks: int, tries: int) -> Bins:
    """Return fewer bins if at most `kicks` random repackings of a few bins achieve that, else the given bins.

    The random seed is fixed, so the result depends only on the input.
    """
    random = Random(0)
    current = bins
    for kick in range(1, kicks + 1):
        if len(current) <= fewest:
            break
        found = _kicked(case, current, random)
        if len(found) < len(current) or kick % 50 == 0:
            found = swap(case, found, fewest, tries)
        current = found
    return current if len(current) < len(bins) else bins


def emptiest(case: Instance, bins: Bins) -> int:
    """Return the rows of the least full bin, including padding."""
    return min((case.load(chosen) for chosen in bins), default=0)


def least_possible(case: Instance, count: int) -> int:
    """Return the rows of the least full of `count` bins if all others are full."""
    return max(0, case.rows - (count - 1) * case.capacity)


class _SwapSearch:
    def __init__(self, case: Instance, bins: Bins, tries: int) -> None:
        self.case = case
        self.bins = bins
        self.tries = tries

    def done(self, fewest: int) -> bool:
        if len(self.bins) > fewest:
            return False
        return emptiest(self.case, self.bins) <= least_possible(self.case, len(self.bins))

    def round(self) -> bool:
        """Try every pair of bins once, least full first. Return whether any samples were exchanged."""
        tokens = self.case.tokens
        self.bins.sort(key=lambda chosen: (-tokens(chosen), sorted(chosen)))
        changed = False
        held = [tokens(chosen) for chosen in self.bins]
        for taker in range(len(self.bins)):
            for giver in range(len(self.bins) - 1, taker, -1):
                if self.tries == 0 or held[taker] == self.case.capacity:
                    break
                changed |= self._exchange(taker, giver, held)
        self.bins = [chosen for chosen in self.bins if chosen]
        return changed

    def _exchange(self, taker: int, giver: int, held: list[int]) -> bool:
        """Exchange samples if `taker` becomes fuller than both bins were. Update `held`, the tokens per
        bin."""
        if not self.bins[giver] or not self.bins[taker]:
            return False
        self.tries -= 1
        case, pool = self.case, self.bins[taker] + self.bins[giver]
        chosen = fullest(case, pool, case.capacity)
        taken = case.tokens(chosen)
        if taken <= max(held[taker], held[giver]):
            return False
        rest = _without(pool, chosen)
        # Padding may make the rest too large, although it has fewer tokens than before.
        if case.load(rest) > case.capacity:
            return False
        self.bins[taker], self.bins[giver] = chosen, rest
        held[taker], held[giver] = taken, held[taker] + held[giver] - taken
        return True


def _kicked(case: Instance, bins: Bins, random: Random) -> Bins:
    """Repack the least full bin and a few others, unless that lowers the sum of squares too much."""
    rooms = [case.capacity - case.tokens(chosen) + 1 for chosen in bins]
    opened = {rooms.index(max(rooms)), *random.choices(range(len(bins)), weights=rooms, k=SHAKEN - 1)}
    before = [bins[number] for number in sorted(opened)]
    after = _packed_anew(case, [index for chosen in before for index in chosen], random)
    squares, squares_before = (sum(case.tokens(one) ** 2 for one in some) for some in (after, before))
    small_loss = squares >= squares_before * (1 - LOSS)
    if len(after) > len(before) or (len(after) == len(before) and not small_loss):
        return bins
    return [chosen for number, chosen in enumerate(bins) if number not in opened] + after


def _packed_anew(case: Instance, pool: list[int], random: Random) -> Bins:
    """Repack samples: each bin gets the longest remaining sample, then a random subset, then any that fit."""
    pool = sorted(pool, key=lambda index: (-case.lengths[index], index))
    bins: Bins = []
    while pool:
        chosen = [pool[0]]
        some = [index for index in pool[1:] if random.random() < KEPT]
        chosen += fullest(case, some, case.capacity - case.load(chosen))
        chosen += fullest(case, _without(pool, chosen), case.capacity - case.load(chosen))
        pool = _without(pool, chosen)
        bins.append(chosen)
    return bins


def _without(pool: list[int], chosen: list[int]) -> list[int]:
    taken = set(chosen)
    return [index for index in pool if index not in taken]


def fullest(case: Instance, pool: Sequence[int], room: int) -> list[int]:
    """Return the samples of `pool` that put the most tokens into `room` rows; among equals, longer samples.

    Longer samples are preferred because short ones are easier to place later.
    """
    if len({case.jobs[index] for index in pool}) <= 1:
        sums = _Sums(case, pool, room // case.multiple * case.multiple)
        return sums.chosen(sums.largest(sums.room))
    return _fullest_of_jobs(case, pool, room)


class _Sums:
    """All token sums up to `room` that subsets of `pool` can have: bit n of `reach[k]` is set if a subset of
    the k shortest samples has n tokens."""

    def __init__(self, case: Instance, pool: Sequence[int], room: int) -> None:
        self.lengths = case.lengths
        self.room = room
        self.order = sorted(pool, key=lambda index: (case.lengths[index], index))
        self.reach = [1]
        mask = (1 << (room + 1)) - 1
        for index in self.order:
            before = self.reach[-1]
            self.reach.append((before | before << case.lengths[index]) & mask)

    def largest(self, room: int) -> int:
        """Return the largest reachable sum up to `room`."""
        return (self.reach[-1] & ((1 << (room + 1)) - 1)).bit_length() - 1

    def chosen(self, tokens: int) -> list[int]:
        """Return samples with exactly `tokens` tokens in total."""
        taken = []
        for count in range(len(self.order) - 1, -1, -1):
            rest = tokens - self.lengths[self.order[count]]
            if rest >= 0 and self.reach[count] >> rest & 1:
                taken.append(self.order[count])
                tokens = rest
        assert tokens == 0
        return taken


def _fullest_of_jobs(case: Instance, pool: Sequence[int], room: int) -> list[int]:
    """Return the samples that fill `room` best if jobs are padded, by dynamic programming."""
    units = room // case.multiple
    jobs: dict[int, list[int]] = {}
    for index in pool:
        jobs.setdefault(case.jobs[index], []).append(index)
    tokens = np.zeros(units + 1, dtype=np.int64)  # most tokens per number of units, by the jobs so far
    sums, shares = [], []
    for job in sorted(jobs):
        of_job = _Sums(case, jobs[job], units * case.multiple)
        best, share = tokens.copy(), np.zeros(units + 1, dtype=np.int64)
        held = 0
        for count in range(1, units + 1):
            added = of_job.largest(count * case.multiple)
            if added == held:
                continue
            held = added
            with_job = tokens[: units + 1 - count] + added
            better = with_job > best[count:]
            best[count:][better] = with_job[better]
            share[count:][better] = count
        tokens = best
        sums.append(of_job)
        shares.append(share)
    taken: list[int] = []
    remaining_units = int(tokens.argmax())
    for of_job, share in zip(reversed(sums), reversed(shares), strict=True):
        count = int(share[remaining_units])
        taken += of_job.chosen(of_job.largest(count * case.multiple))
        remaining_units -= count
    return taken
