"""Tokenised samples behind one index, memory-mapped."""

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
    """The selected samples of one store, and the number of times an epoch shows them."""

    store: SampleStore
    chosen: NDArray[np.int64]
    weight: float = 1.0


class Samples:
    """The samples of one job's training or evaluation; several stores where the data is a mixture."""

    def __init__(self, shares: Sequence[Share], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.before = 0
        """Number of adapter rows before every sample; they count towards the lengths and have no tokens."""
        self.first_position = 0
        """First position of every sample; the positions before it belong to keys and values of an adapter."""
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

    def behind(self, rows: int, keys: int = 0) -> Samples:
        """Return the samples preceded by `rows` rows or `keys` keys of an adapter. The last of these rows
        predicts the first token, which is then supervised like the others."""
        if rows == keys == 0:
            return self
        made = copy.copy(self)
        made.first_position = keys
        if rows == 0:
            return made
        firsts = [mask[begins] for (_, mask), begins in zip(self._arrays, self._begins, strict=True)]
        made.before, made.lengths = rows, self.lengths + rows
        made.supervised = self.supervised + np.concatenate(firsts)
        return made

    def largest_batch(self, size: int) -> int:
        """Return the number of tokens of the largest possible batch of `size` samples."""
        lengths = np.sort(self.lengths)[::-1]
        return int(size * lengths[0]) if self.weights is not None else int(lengths[:size].sum())

    def tokens(self, i: int) -> NDArray[np.int32]:
        return self.tokens_and_mask(i)[0]

    def mask(self, i: int) -> NDArray[np.bool_]:
        """Return the mask of supervised tokens."""
        return self.tokens_and_mask(i)[1]

    def tokens_and_mask(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask with a single lookup."""
        share, rows = self._find(i)
        tokens, mask = self._arrays[share]
        return tokens[rows], mask[rows]

    def _find(self, i: int) -> tuple[int, slice]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        share = bisect_right(self._firsts, i) - 1
        begin = int(self._begins[share][i - self._firsts[share]])
        return share, slice(begin, begin + int(self.lengths[i]) - self.before)
