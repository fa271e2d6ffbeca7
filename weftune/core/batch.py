"""A microbatch as tensors: samples packed end to end, with the rows of each job contiguous.

Shapes: T rows (tokens of all samples), S samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

IGNORED = -100
"""Target of a row that does not count in the loss, as in torch and transformers."""


OWN_ADAPTER = ""
"""Placeholder for the name of an adapter: rows use the adapter of the job that they belong to."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of a microbatch, all of global batch `step` (counted from 1) of `job`."""

    job: str
    step: int
    start: int
    stop: int
    adapter: str | None = OWN_ADAPTER
    """Name of the job whose adapter is applied to the rows, by default the job that they belong to. None
    applies no adapter."""
    prefix_rows: int = 0
    """Number of rows (virtual tokens) that the adapter inserts before the samples."""
    kl_purpose: Literal["", "batch", "held_out"] = ""
    """Loss whose KL term is estimated from the rows, if these are prompts with the answers of other samples:
    `batch` is the loss of the job's next global batch, `held_out` that of the held-out samples. Empty for all
    other rows."""

    @property
    def adapter_job(self) -> str | None:
        """Name of the job whose adapter is applied to the rows. None if the base is used alone."""
        return self.job if self.adapter == OWN_ADAPTER else self.adapter

    @property
    def tokens(self) -> int:
        """Number of tokens of the segment, without rows that the adapter inserts."""
        return self.stop - self.start - self.prefix_rows

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Microbatch:
    tokens_T: Tensor
    positions_T: Tensor
    """Positions, which restart with every sample: at 0, or after the keys that an adapter inserts."""
    targets_T: Tensor
    """Target of each row: the next token of its sample if that token is supervised, otherwise `IGNORED`."""
    token_index_T: Tensor
    """Index of each row in its job's global batch, whatever the packing. This index is the counter of the
    random numbers for dropout."""
    sample_lengths: tuple[int, ...]
    segments: tuple[Segment, ...]
    answer_tokens: tuple[int, ...] = ()
    """Number of answer tokens of each sample, whether or not a row predicts them. 0 for samples that are not
    part of a preference pair. Empty if there are no pairs."""
    desirable: tuple[bool, ...] = ()
    """Whether each sample is labelled as desirable (as in KTO). True for samples without a label. Empty if no
    sample has a label."""
    references_S: Tensor | None = None
    """Sum of the reference policy's log-probabilities over the supervised rows of each sample; 0 for samples
    of jobs without a reference policy. None if no job of the microbatch has a reference policy."""

    @property
    def rows(self) -> int:
        return self.tokens_T.shape[0]

    def part(self, rows: slice) -> Microbatch:
        """Return a range of rows as a microbatch. The rows may begin or end within samples and count as one
        sample."""
        first, last = rows.start, rows.stop
        segments = (
            replace(one, start=max(one.start, first) - first, stop=min(one.stop, last) - first)
            for one in self.segments
        )
        return Microbatch(
            self.tokens_T[rows],
            self.positions_T[rows],
            self.targets_T[rows],
            self.token_index_T[rows],
            (last - first,),
            tuple(one for one in segments if one.start < one.stop),
        )

    def chunk(self, rows: slice) -> Microbatch:
        """Return consecutive rows of a microbatch with a single sample. The rows keep their positions and
        targets. Rows that the adapter inserts belong to the first chunk."""
        (segment,) = self.segments
        part = self.part(rows)
        prefix_rows = 0 if rows.start else segment.prefix_rows
        return replace(part, segments=(replace(part.segments[0], prefix_rows=prefix_rows),))

    def to(self, device: torch.device) -> Microbatch:
        if self.tokens_T.device == device:
            return self
        return replace(
            self,
            tokens_T=to_device(self.tokens_T, device),
            positions_T=to_device(self.positions_T, device),
            targets_T=to_device(self.targets_T, device),
            token_index_T=to_device(self.token_index_T, device),
            references_S=None if self.references_S is None else to_device(self.references_S, device),
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. A tensor for a GPU is copied to pinned memory first, so that the host does
    not wait for the transfer."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to(target: Tensor, source: Tensor) -> None:
    """Copy a host tensor into a tensor on any device, without waiting for the device."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
