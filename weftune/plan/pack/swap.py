"""Exchange of samples between microbatches, to fill the fuller ones and in the end to empty the emptiest."""

from __future__ import annotations

from random import Random

from weftune.plan.pack.fill import fullest
from weftune.plan.pack.instance import Bins, Instance

SHAKEN = 5
"""Number of bins repacked together: the best of 3, 4 and 5 on lengths of which two or three fill a bin."""
KEPT = 0.6
"""Share of samples that a bin is first filled from."""
LOSS = 0.005
"""Share of their sum of squares that repacked bins may lose and still be accepted."""


def swap(case: Instance, bins: Bins, fewest: int, tries: int) -> Bins:
    """Exchange samples between bins. There are never more, and if as many, the emptiest is at most as full.

    Of two bins, the fuller takes what fills it best from both, if it then holds more than either did. The sum
    of squared tokens therefore grows with every exchange, and the search ends; `tries` ends it sooner. It
    also ends when `fewest` bins remain and the emptiest cannot hold less.
    """
    search = _SwapSearch(case, [list(chosen) for chosen in bins], tries)
    while search.tries > 0 and not search.done(fewest) and search.round():
        pass
    found = search.bins
    worse = len(found) == len(bins) and emptiest(case, found) > emptiest(case, bins)
    return bins if worse else found


def shake(case: Instance, bins: Bins, fewest: int, kicks: int, tries: int) -> Bins:
    """Return fewer bins if `kicks` random repackings of a few of them lead there, otherwise those given.

    The random numbers are the same in every call, so the result depends only on the input.
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
        """Try every pair once, the emptiest giving first. Return False if nothing could be exchanged."""
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
        """Exchange samples between two bins if that helps, and update `held`, the tokens in each bin."""
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
    """Repack the emptiest bin and a few with much room if little is lost; otherwise return the given bins."""
    rooms = [case.capacity - case.tokens(chosen) + 1 for chosen in bins]
    opened = {rooms.index(max(rooms)), *random.choices(range(len(bins)), weights=rooms, k=SHAKEN - 1)}
    before = [bins[place] for place in sorted(opened)]
    made = _packed_anew(case, [index for chosen in before for index in chosen], random)
    small_loss = _full(case, made) >= _full(case, before) * (1 - LOSS)
    if len(made) > len(before) or (len(made) == len(before) and not small_loss):
        return bins
    return [chosen for place, chosen in enumerate(bins) if place not in opened] + made


def _packed_anew(case: Instance, pool: list[int], random: Random) -> Bins:
    """Build each bin around the longest sample left, filled first from some of the others and then from
    all."""
    pool = sorted(pool, key=lambda index: (-case.lengths[index], index))
    made: Bins = []
    while pool:
        chosen = [pool[0]]
        some = [index for index in pool[1:] if random.random() < KEPT]
        chosen += fullest(case, some, _room(case, chosen))
        chosen += fullest(case, _without(pool, chosen), _room(case, chosen))
        pool = _without(pool, chosen)
        made.append(chosen)
    return made


def _room(case: Instance, chosen: list[int]) -> int:
    return case.capacity - case.load(chosen)


def _full(case: Instance, bins: Bins) -> int:
    return sum(case.tokens(chosen) ** 2 for chosen in bins)


def _without(pool: list[int], chosen: list[int]) -> list[int]:
    taken = set(chosen)
    return [index for index in pool if index not in taken]
