"""The tokenised samples of a job, memory-mapped, and the order in which the job trains on them."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from weftune.data.cache import SampleStore


@dataclass(frozen=True, slots=True)
class StoreRows:
    """The samples that a job uses from one store (a cached table of tokenised samples), and how often each is
    shown per epoch."""

    store: SampleStore
    row_indices: NDArray[np.int64]
    weight: float = 1.0


class Samples:
    """The training samples or the evaluation samples of one job, which come from several stores if the data
    is a mixture."""

    def __init__(
        self, selections: Sequence[StoreRows], fingerprint: str, group_size: int = 1, has_labels: bool = False
    ) -> None:
        """Combine the samples of `selections`. `has_labels` says whether they are answers with a label."""
        self.fingerprint = fingerprint
        self.group_size = group_size
        """Number of consecutive samples that are made from one row: 2 for preference pairs, otherwise 1."""
        self.has_targets = True
        """Whether the tokens of answers are supervised."""
        self.supervises_prompts = False
        """Whether the first sample of each pair is supervised from its first token."""
        self.rows_before = 0
        """Number of virtual tokens that the adapter inserts before every sample. These tokens count towards
        the sample's length."""
        self.first_position = 0
        """Position of the first token of every sample. Earlier positions belong to the prefix keys of an
        adapter."""
        self.references: NDArray[np.float64] | None = None
        """Sum of the reference policy's log-probabilities over the supervised tokens of each sample. None if
        they are not known, or if the job has no reference policy."""
        self.desirable: NDArray[np.bool_] | None = None
        """For each sample, whether its answer is desirable. None unless the samples are answers with a
        label."""
        if has_labels:
            self.desirable = np.concatenate([_sample_labels(selection) for selection in selections])
        self.mismatched_samples: Samples | None = None
        """For each sample, its prompt with another sample's answer. None if the job does not need them."""
        self._partners: NDArray[np.int64] | None = None
        """For each sample, the index of the sample whose answer it has. None if all samples have their own
        answers."""
        self.lengths = np.concatenate(
            [selection.store.lengths[selection.row_indices] for selection in selections]
        )
        self._stored_lengths = self.lengths
        self.supervised = np.concatenate(
            [selection.store.supervised[selection.row_indices] for selection in selections]
        )
        self.weights: NDArray[np.float64] | None = None
        if any(selection.weight != 1 for selection in selections):
            self.weights = np.concatenate(
                [np.full(len(selection.row_indices), selection.weight) for selection in selections]
            )
        self._arrays = [(selection.store.tokens, selection.store.mask) for selection in selections]
        self._rows = [(selection.store.rows, selection.row_indices) for selection in selections]
        # First index of each selection's samples, and offset of each sample's tokens in its store.
        self._firsts = list(accumulate((len(selection.row_indices) for selection in selections), initial=0))
        self._begins = [
            np.concatenate([[0], np.cumsum(selection.store.lengths, dtype=np.int64)])[selection.row_indices]
            for selection in selections
        ]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """Number of rows of the data. A row is one sample or, for preference data, a pair of samples."""
        return len(self) // self.group_size

    def row_hashes(self) -> NDArray[np.uint64]:
        """Return, for every sample, the 64-bit hash of the row from which it was made."""
        return np.concatenate([rows[chosen] for rows, chosen in self._rows])

    def sample_order(self, batch_size: int, seed: int) -> SampleOrder:
        """Return the order in which the job trains on the samples, with `batch_size` rows per global
        batch."""
        weights = None if self.weights is None else self.weights[:: self.group_size]
        return SampleOrder(self.rows, batch_size, seed, weights, self.group_size)

    def supervise_prompts(self) -> Samples:
        """Return the samples of preference pairs with the prompts of chosen samples supervised too."""
        assert self.group_size == 2
        assert self.rows_before == 0
        changed = copy.copy(self)
        changed.supervises_prompts, changed.supervised = True, self.supervised.copy()
        changed.supervised[0::2] = self.lengths[0::2] - 1
        return changed

    def remove_targets(self) -> Samples:
        """Return the samples without supervised tokens, for objectives that need no log-probabilities."""
        changed = copy.copy(self)
        changed.has_targets, changed.supervised = False, np.zeros_like(self.supervised)
        return changed

    def add_mismatched_samples(self, rows: NDArray[np.int64], batch_size: int, max_tokens: int) -> Samples:
        """Return the samples with the field `mismatched_samples` set, as in TRL: among every `batch_size`
        consecutive samples of `rows`, each prompt gets the previous sample's answer, and the first prompt
        gets the last one's. A sample has at most `max_tokens` tokens."""
        assert self.group_size == 1
        assert self.rows_before == 0
        partners = np.arange(len(self))
        for start in range(0, len(rows), batch_size):
            own = rows[start : start + batch_size]
            partners[own] = np.roll(own, 1)
        other, paired = copy.copy(self), copy.copy(self)
        answers = self.supervised + self._starts_with_answer()
        prompts = self.lengths - answers
        other.lengths = np.minimum(prompts + answers[partners], max_tokens)
        other.supervised = other.lengths - np.maximum(prompts, 1)
        other._partners = partners
        digest = hashlib.blake2b(partners.tobytes(), digest_size=16).hexdigest()
        other.fingerprint = f"{self.fingerprint}-{digest}-{max_tokens}"
        paired.mismatched_samples = other
        return paired

    def answer_tokens(self, index: int) -> int:
        """Return the number of answer tokens of sample `index`, including a first token that no earlier token
        predicts."""
        return int(self._stored_row(index)[1].sum())

    def add_prefix(self, rows: int, keys: int = 0) -> Samples:
        """Return the samples, each preceded by `rows` virtual tokens or `keys` prefix keys of an adapter. The
        last virtual token predicts the sample's first token, which can therefore be supervised."""
        if rows == keys == 0:
            return self
        moved = copy.copy(self)
        moved.first_position = keys
        if self.mismatched_samples is not None:
            moved.mismatched_samples = self.mismatched_samples.add_prefix(rows, keys)
        if rows == 0:
            return moved
        moved.rows_before, moved.lengths = rows, self.lengths + rows
        first = self._starts_with_answer()
        if self.supervises_prompts:
            first[0::2] = True
        moved.supervised = self.supervised + (first & self.has_targets)
        return moved

    def _starts_with_answer(self) -> NDArray[np.bool_]:
        """Return an array that says for each sample whether its first token belongs to the answer."""
        firsts = [mask[begins] for (_, mask), begins in zip(self._arrays, self._begins, strict=True)]
        return np.concatenate(firsts)

    @property
    def parts(self) -> tuple[Samples, ...]:
        """The sets of samples: the samples themselves, followed by the mismatched samples (prompts with the
        answers to other prompts) if there are any."""
        return (self,) if self.mismatched_samples is None else (self, self.mismatched_samples)

    def with_references(self, references: NDArray[np.float64]) -> Samples:
        """Return the samples with their log-probabilities under the reference policy. In `references`,
        mismatched samples (prompts with the answers to other prompts) come last."""
        assert len(references) == sum(map(len, self.parts))
        scored, border = copy.copy(self), len(self)
        scored.references = references[:border]
        if self.mismatched_samples is not None:
            scored.mismatched_samples = self.mismatched_samples.with_references(references[border:])
        return scored

    def max_batch_tokens(self, size: int) -> int:
        """Return the maximum number of tokens that a batch of `size` rows can have."""
        lengths = np.sort(self._row_lengths())[::-1]
        return int(size * lengths[0]) if self.weights is not None else int(lengths[:size].sum())

    @property
    def longest_row_tokens(self) -> int:
        """Maximum number of tokens that must be in the same microbatch: the length of the longest sample or
        preference pair."""
        return int(self._row_lengths().max())

    def _row_lengths(self) -> NDArray[np.int64]:
        return self.lengths.reshape(-1, self.group_size).sum(axis=1)

    def tokens(self, index: int) -> NDArray[np.int32]:
        return self.tokens_and_mask(index)[0]

    def mask(self, index: int) -> NDArray[np.bool_]:
        """Return the mask that says which tokens of sample `index` are supervised."""
        return self.tokens_and_mask(index)[1]

    def tokens_and_mask(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of sample `index`, and the mask that says which of them are supervised."""
        tokens, mask = self._stored_row(index)
        if self._partners is not None:
            other, other_mask = self._stored_row(int(self._partners[index]))
            tokens = np.concatenate([tokens[~mask], other[other_mask]])[
                : self.lengths[index] - self.rows_before
            ]
            return tokens, np.arange(len(tokens)) >= len(mask) - mask.sum()
        if not self.has_targets:
            return tokens, np.zeros_like(mask)
        return tokens, np.ones_like(mask) if self.supervises_prompts and index % 2 == 0 else mask

    def _stored_row(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        selection = bisect_right(self._firsts, index) - 1
        begin = int(self._begins[selection][index - self._firsts[selection]])
        rows = slice(begin, begin + int(self._stored_lengths[index]))
        tokens, mask = self._arrays[selection]
        return tokens[rows], mask[rows]


def _sample_labels(selection: StoreRows) -> NDArray[np.bool_]:
    assert selection.store.desirable is not None
    return selection.store.desirable[selection.row_indices]


class SampleOrder:
    """The order of a job's samples in global batches (one per optimizer step), which is a pure function of
    the seed and the epoch. Every epoch has a new permutation of the rows, and the epoch's last batch may be
    smaller. A row is one sample, or the `group_size` samples of a pair.

    A weight of 2 shows a sample twice per epoch. With a weight of 0.5, one half of the samples is shown in
    one epoch and the other half in the next: each epoch continues in a fixed, seeded cycle of those samples.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        seed: int,
        weights: NDArray[np.floating] | None = None,
        group_size: int = 1,
    ) -> None:
        assert rows > 0
        assert batch_size > 0
        assert seed >= 0
        self._batch_size, self._together = batch_size, group_size
        self._seed = seed
        self._sampling_cycles = () if weights is None else _sampling_cycles(weights, seed)
        self._always_shown = np.arange(rows)
        if weights is not None:
            assert len(weights) == rows
            self._always_shown = np.repeat(np.arange(rows), np.floor(weights).astype(np.int64))
        self._per_epoch = len(self._always_shown) + sum(share for _, share in self._sampling_cycles)
        assert self._per_epoch > 0
        self.steps_per_epoch = -(-self._per_epoch // batch_size)
        self._latest_epoch: tuple[int, NDArray[np.int64]] | None = None

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the indices of the samples in the global batch of optimizer step `step`, counted from 1."""
        assert step >= 1
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        start = within * self._batch_size
        rows = self.rows_of_epoch(epoch)[start : start + self._batch_size]
        if self._together == 1:
            return rows
        return (rows[:, None] * self._together + np.arange(self._together)).ravel()

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed after step `step`, a fraction within an epoch."""
        assert step >= 0
        whole, within = divmod(step, self.steps_per_epoch)
        return whole + within * self._batch_size / self._per_epoch

    def rows_of_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of the rows of an epoch, counted from 0, in the order of training."""
        latest = self._latest_epoch  # two threads may request two epochs at once
        if latest is None or latest[0] != epoch:
            drawn = [self._always_shown]
            for circle, share in self._sampling_cycles:
                drawn.append(circle[(epoch * share + np.arange(share)) % len(circle)])
            everything = np.concatenate(drawn)
            latest = epoch, everything[_permutation(len(everything), self._seed, 1, epoch)]
            self._latest_epoch = latest
        return latest[1]


def _sampling_cycles(weights: NDArray[np.floating], seed: int) -> tuple[tuple[NDArray[np.int64], int], ...]:
    """Return, for each sample weight with a fractional part, the indices of its samples in random order, and
    the number of them that each epoch shows because of the fractional part."""
    circles = []
    for number, weight in enumerate(np.unique(weights)):
        part = float(weight) - float(np.floor(weight))
        members = np.flatnonzero(weights == weight)
        if part > 0:
            share = max(1, int(np.floor(part * len(members) + 0.5)))
            circles.append((members[_permutation(len(members), seed, 2, number)], share))
    return tuple(circles)


def _permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Return a random permutation. The permutation is computed from raw bits, so that it is equal in all
    versions of numpy."""
    return np.argsort(np.random.PCG64(list(key)).random_raw(count), kind="stable")
