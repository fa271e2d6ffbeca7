"""The interface of an objective: log-probabilities of samples → one loss per job.

Its `needs` say what planners and executors must provide; its losses are plain torch, and autograd computes
their gradients. `weftune.run.passes.scorer` is the only caller.

Shapes: S supervised rows of a segment, in row order; B samples of a segment; D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weftune.ops.accumulate import accumulated


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of an objective besides its samples' log-probabilities."""

    together: int = 1
    """Number of consecutive samples of a global batch that must share a microbatch (pairs, groups)."""
    references: tuple[str | None, ...] = ()
    """The adapters that also score each sample, without gradients and before its batch is trained: None is
    the base alone, OWN the job's current adapter, anything else the name of a job."""
    batch_mean: bool = False
    """Whether the losses need a mean over the references of the whole global batch."""
    makes_rows: bool = False
    """Whether the current adapter generates a batch's samples. A window then holds at most one such batch."""
    scalar_head: bool = False
    """Whether a trained vector computes a value of each sample from its last hidden state."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """The scores of one segment's samples."""

    logprobs_S: Tensor
    counts: tuple[int, ...]
    """Number of supervised rows of each sample."""
    offsets: tuple[int, ...]
    """Offset of each sample in its job's global batch, in tokens, which identifies it there."""
    references: Mapping[str | None, Tensor] = field(default_factory=dict)
    """Adapter → log-probabilities of the same rows [S], without gradients."""
    values_B: Tensor | None = None
    """Values from the scalar head."""

    def sums(self, logprobs_S: Tensor | None = None) -> Tensor:
        """Return the log-probability of each sample's supervised tokens [B], its own or from given values."""
        parts = (self.logprobs_S if logprobs_S is None else logprobs_S).split(self.counts)
        return torch.stack([part.sum() for part in parts])


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Facts about a whole global batch that a segment's loss needs."""

    supervised: int
    samples: int | None = None
    mean: Tensor | None = None
    """Result of `Objective.mean`, if it is needed."""


@dataclass(frozen=True, slots=True)
class HeldOutSums:
    """Sums over a segment of held-out samples. Loss and correct predictions are reported per count."""

    loss: Tensor
    count: int
    """Number of tokens, samples or pairs over which the loss is summed."""
    correct: Tensor | None = None
    """Number of correct ones among them. None counts the tokens that are the likeliest."""


class Objective(Protocol):
    needs: Needs

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        """Return a segment's share of its job's loss: the shares of a global batch add up to it."""

    def evaluated(self, scores: SampleScores) -> HeldOutSums:
        """Return the sums over held-out samples."""

    def mean(self, references: Sequence[Mapping[str | None, Tensor]]) -> Tensor:
        """Return a mean over the scores of a whole global batch, if it is needed."""


@dataclass(frozen=True, slots=True)
class ScalarHead:
    """A job's trained vector that computes a value from a sample's last hidden state."""

    weight_D: Tensor
    total_D: Tensor
    """Accumulator of its gradient."""
    anchor: Tensor

    def values(self, h_BD: Tensor) -> Tensor:
        return h_BD @ accumulated(self.weight_D, self.total_D, self.anchor).to(h_BD.dtype)
