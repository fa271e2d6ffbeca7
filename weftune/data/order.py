"""The order in which a job sees its samples: a pure function of its seed and the epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SampleOrder:
    """A job's global batches. Every epoch has its own permutation; its last batch may be smaller.

    A weight of 2 shows a sample twice per epoch. With a weight of 0.5, one half of the samples is shown in
    one epoch and the other half in the next: the fractional share moves around a seeded circle of those
    samples.
    """

    def __init__(
        self, samples_count: int, batch_size: int, seed: int, weights: NDArray[np.floating] | None = None
    ) -> None:
        assert samples_count > 0
        assert batch_size > 0
        assert seed >= 0
        self._batch_size = batch_size
        self._seed = seed
        self._circles = () if weights is None else _circles(weights, seed)
        self._always = np.arange(samples_count)
        if weights is not None:
            assert len(weights) == samples_count
            self._always = np.repeat(np.arange(samples_count), np.floor(weights).astype(np.int64))
        self._per_epoch = len(self._always) + sum(share for _, share in self._circles)
        assert self._per_epoch > 0
        self.steps_per_epoch = -(-self._per_epoch // batch_size)
        self._made: tuple[int, NDArray[np.int64]] | None = None

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the samples of global batch `step`, counted from 1."""
        assert step >= 1
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        start = within * self._batch_size
        return self._shown(epoch)[start : start + self._batch_size]

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed after that step."""
        assert step >= 0
        whole, within = divmod(step, self.steps_per_epoch)
        return whole + within * self._batch_size / self._per_epoch

    def _shown(self, epoch: int) -> NDArray[np.int64]:
        if self._made is None or self._made[0] != epoch:
            drawn = [self._always]
            for circle, share in self._circles:
                drawn.append(circle[(epoch * share + np.arange(share)) % len(circle)])
            everything = np.concatenate(drawn)
            # Two threads may request two epochs at once: return the local result.
            made = (epoch, everything[_permutation(len(everything), self._seed, 1, epoch)])
            self._made = made
            return made[1]
        return self._made[1]


def _circles(weights: NDArray[np.floating], seed: int) -> tuple[tuple[NDArray[np.int64], int], ...]:
    """Return, for each weight with a fractional part, its samples in a seeded circle and the number shown per
    epoch."""
    circles = []
    for number, weight in enumerate(np.unique(weights)):
        part = float(weight) - float(np.floor(weight))
        members = np.flatnonzero(weights == weight)
        if part > 0:
            share = max(1, int(np.floor(part * len(members) + 0.5)))
            circles.append((members[_permutation(len(members), seed, 2, number)], share))
    return tuple(circles)


def _permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Return a permutation from sorted raw bits, which are the same in every version of numpy; its shuffle
    does not guarantee that."""
    return np.argsort(np.random.PCG64(list(key)).random_raw(count), kind="stable")
