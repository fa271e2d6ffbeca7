"""A microbatch as tensors: packed samples, rows of one job contiguous.

Shapes: T rows (tokens of all samples, end to end), S samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100
"""The label of a row that is not supervised, as torch and transformers write it."""


OWN = ""
"""Placeholder for a job's name: the adapter of the rows' own job."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of a microbatch belong to `job`, in its global batch `step` (counted from 1)."""

    job: str
    step: int
    start: int
    stop: int
    adapter: str | None = OWN
    """The job whose adapter scores the rows, if not their own job's. None selects the base alone."""
    before: int = 0
    """Number of rows that the adapter puts before samples. They are not tokens of the job's data."""

    @property
    def through(self) -> str | None:
        """The job whose adapter the rows pass through, or None."""
        return self.job if self.adapter == OWN else self.adapter

    @property
    def tokens(self) -> int:
        """Number of tokens of the job's data."""
        return self.stop - self.start - self.before

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Microbatch:
    tokens_T: Tensor
    positions_T: Tensor
    """Positions, which restart with every sample: at 0, or after the keys that its adapter puts before it."""
    targets_T: Tensor
    """Token that each row must predict: the next token of its sample if that is supervised, else IGNORED."""
    token_index_T: Tensor
    """Index of the row in its job's global batch before packing, used as the dropout counter."""
    sample_lengths: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return self.tokens_T.shape[0]

    def to(self, device: torch.device) -> Microbatch:
        if self.tokens_T.device == device:
            return self
        return replace(
            self,
            tokens_T=to_device(self.tokens_T, device),
            positions_T=to_device(self.positions_T, device),
            targets_T=to_device(self.targets_T, device),
            token_index_T=to_device(self.token_index_T, device),
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, pinned first for a GPU, so that the host does not wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to(into: Tensor, host: Tensor) -> None:
    """Copy a host tensor into one on any device, without waiting for the device."""
    into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)
