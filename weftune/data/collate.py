"""Concatenation of samples into one microbatch: the rows of a job are contiguous, and nothing is padded.

Shapes: T rows (tokens of all samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weftune.core.batch import IGNORED, Microbatch, Segment
from weftune.data.samples import Samples


@dataclass(frozen=True, slots=True)
class Part:
    """One sample of a microbatch. `index` is its index among the samples of `job`, and `step` is the number
    of its global batch (optimizer step)."""

    job: str
    step: int
    samples: Samples
    index: int
    offset: int
    """Number of tokens before this sample in the job's global batch, whatever microbatches the batch is
    divided into."""
    rows_before: int = 0
    """Number of virtual tokens that the adapter inserts before the sample. The last one predicts the sample's
    first token."""
    first_position: int = 0
    rows: slice | None = None
    """Rows (tokens) of the sample that are in this microbatch, counted from the first virtual token. None for
    all rows."""


def collate(parts: Sequence[Part]) -> Microbatch:
    """Concatenate the samples into one microbatch of tensors."""
    whole = _collate_whole(parts)
    if (rows := parts[0].rows) is None:
        return whole
    assert len(parts) == 1, "a chunk of a sample is a microbatch of its own"
    return whole.chunk(rows)


def _collate_whole(parts: Sequence[Part]) -> Microbatch:
    assert parts, "a microbatch holds at least one sample"
    found = [part.samples.tokens_and_mask(part.index) for part in parts]
    tokens = [_prepend_zeros(part.rows_before, own) for part, (own, _) in zip(parts, found, strict=True)]
    masks = [_prepend_zeros(part.rows_before, own) for part, (_, own) in zip(parts, found, strict=True)]
    lengths = tuple(len(row) for row in tokens)
    stops = np.cumsum(lengths)
    tokens_T = np.concatenate(tokens).astype(np.int64)
    row_T = np.arange(len(tokens_T)) - np.repeat(stops - lengths, lengths)
    return Microbatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(row_T + np.repeat([part.first_position for part in parts], lengths)),
        targets_T=torch.from_numpy(_shift_targets(tokens_T, np.concatenate(masks), stops)),
        token_index_T=torch.from_numpy(np.repeat([part.offset for part in parts], lengths) + row_T),
        sample_lengths=lengths,
        segments=_job_segments(parts, lengths),
        references_S=_references(parts),
        answer_tokens=_answer_tokens(parts),
        desirable=_sample_labels(parts),
    )


def _references(parts: Sequence[Part]) -> torch.Tensor | None:
    """Return the log-probability of each sample under the reference policy, which is 0 for samples of jobs
    without a reference policy. None if no sample has a log-probability."""
    if all(part.samples.references is None for part in parts):
        return None
    known = [0.0 if (own := part.samples.references) is None else own[part.index] for part in parts]
    return torch.tensor(known, dtype=torch.float64)


def _answer_tokens(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the number of answer tokens of each sample, which is 0 for samples that are not part of a
    preference pair. The tuple is empty if there are no pairs."""
    if all(part.samples.group_size == 1 for part in parts):
        return ()
    return tuple(
        part.samples.answer_tokens(part.index) if part.samples.group_size > 1 else 0 for part in parts
    )


def _sample_labels(parts: Sequence[Part]) -> tuple[bool, ...]:
    """Return for each sample whether its answer is labelled desirable, which is True for samples without a
    label. The tuple is empty if no sample has a label."""
    if all(part.samples.desirable is None for part in parts):
        return ()
    return tuple((own := part.samples.desirable) is None or bool(own[part.index]) for part in parts)


def _prepend_zeros(rows: int, values: NDArray[Any]) -> NDArray[Any]:
    """Return the values with `rows` zeros in front."""
    return np.pad(values, (rows, 0)) if rows else values


def _shift_targets(
    tokens_T: NDArray[np.int64], mask_T: NDArray[np.bool_], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the target of each row: row t predicts token t + 1 of its own sample if that token is
    supervised, and the last row of a sample predicts nothing."""
    targets_T = np.full(len(tokens_T), IGNORED, dtype=np.int64)
    targets_T[:-1] = np.where(mask_T[1:], tokens_T[1:], IGNORED)
    targets_T[stops - 1] = IGNORED
    return targets_T


def _job_segments(parts: Sequence[Part], lengths: Sequence[int]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    row = 0
    for (job, step), run in groupby(
        zip(parts, lengths, strict=True), key=lambda one: (one[0].job, one[0].step)
    ):
        own = list(run)
        start, row = row, row + sum(length for _, length in own)
        segments.append(Segment(job, step, start, row, prefix_rows=sum(part.rows_before for part, _ in own)))
    jobs = [segment.job for segment in segments]
    assert len(set(jobs)) == len(jobs), f"the samples of a job must stand together and be of one step: {jobs}"
    return tuple(segments)
