"""The tokenised samples of a job, memory-mapped, and the order in which the job trains on them."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from weftune.data.cache import SampleStore


@dataclass(frozen=True, slots=True)
class Share:
    """The selected samples of one store, and how often each is shown per epoch."""

    store: SampleStore
    chosen: NDArray[np.int64]
    weight: float = 1.0


class Samples:
    """The training or evaluation samples of one job, from several stores if the data is a mixture."""

    def __init__(self, shares: Sequence[Share], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.before = 0
        """Number of adapter rows before every sample, which count towards its length and have no tokens."""
        self.first_position = 0
        """First position of every sample; earlier positions belong to the keys and values of an adapter."""
        self.lengths = np.concatenate([share.store.lengths[share.chosen] for share in shares])
        self.supervised = np.concatenate([share.store.supervised[share.chosen] for share in shares])
        self.weights: NDArray[np.float64] | None = None
        if any(share.weight != 1 for share in shares):
            self.weights = np.concatenate([np.full(len(share.chosen), share.weight) for share in shares])
        self._arrays = [(share.store.tokens, share.store.mask) for share in shares]
        # First index of each share's samples, and offset of each sample's tokens in its store.
        self._firsts = list(accumulate((len(share.chosen) for share in shares), initial=0))
        self._begins = [
            np.concatenate([[0], np.cumsum(share.store.lengths, dtype=np.int64)])[share.chosen]
            for share in shares
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    def with_prefix(self, rows: int, keys: int = 0) -> Samples:
        """Return the samples preceded by `rows` rows or `keys` keys of an adapter. The last of these rows
        predicts the first token, which is then supervised like the others."""
        if rows == keys == 0:
            return self
        moved = copy.copy(self)
        moved.first_position = keys
        if rows == 0:
            return moved
        firsts = [mask[begins] for (_, mask), begins in zip(self._arrays, self._begins, strict=True)]
        moved.before, moved.lengths = rows, self.lengths + rows
        moved.supervised = self.supervised + np.concatenate(firsts)
        return moved

    def largest_batch(self, size: int) -> int:
        """Return the maximum number of tokens that a batch of `size` samples can have."""
        lengths = np.sort(self.lengths)[::-1]
        return int(size * lengths[0]) if self.weights is not None else int(lengths[:size].sum())

    def tokens(self, i: int) -> NDArray[np.int32]:
        return self.tokens_and_mask(i)[0]

    def mask(self, i: int) -> NDArray[np.bool_]:
        """Return the mask of supervised tokens of sample `i`."""
        return self.tokens_and_mask(i)[1]

    def tokens_and_mask(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens and the mask of sample `i` with a single lookup."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        share = bisect_right(self._firsts, i) - 1
        begin = int(self._begins[share][i - self._firsts[share]])
        rows = slice(begin, begin + int(self.lengths[i]) - self.before)
        tokens, mask = self._arrays[share]
        return tokens[rows], mask[rows]


class SampleOrder:
    """A job's global batches, a pure function of its seed and the epoch. Every epoch has a new permutation;
    its last batch may be smaller.

    A weight of 2 shows a sample twice per epoch. With a weight of 0.5, one half of the samples is shown in
    one epoch and the other half in the next: each epoch continues in a fixed, seeded cycle of those samples.
    """

    def __init__(
        self, samples_count: int, batch_size: int, seed: int, weights: NDArray[np.floating] | None = None
    ) -> None:
        assert samples_count > 0
        assert batch_size > 0
        assert seed >= 0
        self._batch_size = batch_size
        self._seed = seed
        self._cycles = () if weights is None else _cycles(weights, seed)
        self._always_shown = np.arange(samples_count)
        if weights is not None:
            assert len(weights) == samples_count
            self._always_shown = np.repeat(np.arange(samples_count), np.floor(weights).astype(np.int64))
        self._per_epoch = len(self._always_shown) + sum(share for _, share in self._cycles)
        assert self._per_epoch > 0
        self.steps_per_epoch = -(-self._per_epoch // batch_size)
        self._latest: tuple[int, NDArray[np.int64]] | None = None

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the samples of global batch `step`, counted from 1."""
        assert step >= 1
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        start = within * self._batch_size
        return self._samples_of_epoch(epoch)[start : start + self._batch_size]

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed after step `step`, a fraction within an epoch."""
        assert step >= 0
        whole, within = divmod(step, self.steps_per_epoch)
        return whole + within * self._batch_size / self._per_epoch

    def _samples_of_epoch(self, epoch: int) -> NDArray[np.int64]:
        latest = self._latest  # two threads may request two epochs at once
        if latest is None or latest[0] != epoch:
            drawn = [self._always_shown]
            for circle, share in self._cycles:
                drawn.append(circle[(epoch * share + np.arange(share)) % len(circle)])
            everything = np.concatenate(drawn)
            latest = epoch, everything[_permutation(len(everything), self._seed, 1, epoch)]
            self._latest = latest
        return latest[1]


def _cycles(weights: NDArray[np.floating], seed: int) -> tuple[tuple[NDArray[np.int64], int], ...]:
    """Return, for each fractional weight, a seeded cycle of its samples and how many are shown per epoch."""
    circles = []
    for number, weight in enumerate(np.unique(weights)):
        part = float(weight) - float(np.floor(weight))
        members = np.flatnonzero(weights == weight)
        if part > 0:
            share = max(1, int(np.floor(part * len(members) + 0.5)))
            circles.append((members[_permutation(len(members), seed, 2, number)], share))
    return tuple(circles)


def _permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Return a random permutation, made from raw bits so that it is the same in every version of numpy."""
    return np.argsort(np.random.PCG64(list(key)).random_raw(count), kind="stable")
