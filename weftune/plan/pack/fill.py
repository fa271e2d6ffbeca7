"""Filling of one microbatch as far as a pool of samples allows: subset sums as the bits of an integer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftune.plan.pack.instance import Instance


def fullest(case: Instance, pool: Sequence[int], room: int) -> list[int]:
    """Return the samples of `pool` that put the most tokens into `room` rows; among equals, longer samples.

    Longer samples are preferred because short ones are easier to place later.
    """
    if len({case.jobs[index] for index in pool}) <= 1:
        sums = _Sums(case, pool, room // case.multiple * case.multiple)
        return sums.chosen(sums.most(sums.room))
    return _fullest_of_jobs(case, pool, room)


class _Sums:
    """All sums that samples of `pool` can have, up to `room`: bit n of `reach[k]` is set if the k shortest
    samples have a subset of n tokens."""

    def __init__(self, case: Instance, pool: Sequence[int], room: int) -> None:
        self.lengths = case.lengths
        self.room = room
        self.order = sorted(pool, key=lambda index: (case.lengths[index], index))
        self.reach = [1]
        mask = (1 << (room + 1)) - 1
        for index in self.order:
            before = self.reach[-1]
            self.reach.append((before | before << case.lengths[index]) & mask)

    def most(self, room: int) -> int:
        """Return the largest sum of at most `room`."""
        return (self.reach[-1] & ((1 << (room + 1)) - 1)).bit_length() - 1

    def chosen(self, tokens: int) -> list[int]:
        """Return samples with exactly `tokens` tokens in total."""
        taken = []
        for place in range(len(self.order) - 1, -1, -1):
            rest = tokens - self.lengths[self.order[place]]
            if rest >= 0 and self.reach[place] >> rest & 1:
                taken.append(self.order[place])
                tokens = rest
        assert tokens == 0
        return taken


def _fullest_of_jobs(case: Instance, pool: Sequence[int], room: int) -> list[int]:
    """Return the fullest choice if each job is padded: dynamic programming over the multiples of rows that
    each job gets."""
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
            most = of_job.most(count * case.multiple)
            if most == held:
                continue
            held = most
            with_job = tokens[: units + 1 - count] + most
            better = with_job > best[count:]
            best[count:][better] = with_job[better]
            share[count:][better] = count
        tokens = best
        sums.append(of_job)
        shares.append(share)
    taken: list[int] = []
    left = int(tokens.argmax())
    for of_job, share in zip(reversed(sums), reversed(shares), strict=True):
        count = int(share[left])
        taken += of_job.chosen(of_job.most(count * case.multiple))
        left -= count
    return taken
