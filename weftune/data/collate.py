"""Samples laid out as one microbatch: end to end, the rows of a job together, nothing padded.

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
    """One sample of a microbatch: `index` among the samples of `job`, in its global batch `step`."""

    job: str
    step: int
    samples: Samples
    index: int
    offset: int
    """Tokens of the job's global batch that stand before this sample before packing."""
    before: int = 0
    """Rows that its adapter puts before it; they have no tokens, and the last predicts the first token."""


def collate(parts: Sequence[Part]) -> Microbatch:
    assert parts, "a microbatch holds at least one sample"
    tokens = [_behind(part.before, part.samples.tokens(part.index)) for part in parts]
    lengths = tuple(len(row) for row in tokens)
    positions = [np.arange(length) for length in lengths]
    counters = [part.offset + position for part, position in zip(parts, positions, strict=True)]
    masks = [_behind(part.before, part.samples.mask(part.index)) for part in parts]
    targets = [_targets(row, mask) for row, mask in zip(tokens, masks, strict=True)]
    return Microbatch(
        tokens_T=_tensor(tokens),
        positions_T=_tensor(positions),
        targets_T=_tensor(targets),
        token_index_T=_tensor(counters),
        sample_lengths=lengths,
        segments=_segments(parts, lengths),
    )


def _behind(rows: int, values: NDArray[Any]) -> NDArray[Any]:
    """The values behind so many zeros."""
    return np.pad(values, (rows, 0)) if rows else values


def _targets(tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Row t predicts token t + 1 of its own sample; the last row predicts nothing."""
    targets = np.full(len(tokens), IGNORED, dtype=np.int64)
    targets[:-1] = np.where(mask[1:], tokens[1:], IGNORED)
    return targets


def _tensor(rows: Sequence[NDArray[np.integer]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))


def _segments(parts: Sequence[Part], lengths: Sequence[int]) -> tuple[Segment, ...]:
    stops = np.cumsum(lengths)
    segments: list[Segment] = []
    for (job, step), run in groupby(range(len(parts)), key=lambda at: (parts[at].job, parts[at].step)):
        places = list(run)
        start = int(stops[places[0]]) - lengths[places[0]]
        segments.append(Segment(job, step, start, int(stops[places[-1]])))
    jobs = [segment.job for segment in segments]
    assert len(set(jobs)) == len(jobs), f"the samples of a job must stand together and be of one step: {jobs}"
    return tuple(segments)
