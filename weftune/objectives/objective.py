"""The interface of an objective, which computes one loss per job from the log-probabilities of its samples.

The field `needs` lists what planners and executors must provide. The losses are plain torch, and autograd
computes their gradients. `weftune.run.passes.scorer` is the only caller.

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
    """The inputs that an objective needs besides the log-probabilities of its samples."""

    together: int = 1
    """Number of consecutive samples of a global batch that must share a microbatch (pairs, groups)."""
    references: tuple[str | None, ...] = ()
    """Reference models that also score each sample, without gradients, before its batch is trained: None for
    the base alone, OWN for the job's current adapter, otherwise the name of a job."""
    batch_mean: bool = False
    """Whether the loss needs a mean over the reference scores of the whole global batch."""
    makes_rows: bool = False
    """Whether the current adapter generates a batch's samples. A window then holds at most one such batch."""
    scalar_head: bool = False
    """Whether a trained vector maps the last hidden state of each sample to a scalar value."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """The log-probabilities and other scores of the samples of one segment."""

    logprobs_S: Tensor
    counts: tuple[int, ...]
    """Number of supervised rows of each sample."""
    offsets: tuple[int, ...]
    """Offset in tokens of each sample in its job's global batch, which identifies the sample."""
    references: Mapping[str | None, Tensor] = field(default_factory=dict)
    """Maps each reference adapter to the log-probabilities of the same rows, [S], without gradients."""
    values_B: Tensor | None = None
    """Output of the scalar head for each sample."""

    def sums(self, logprobs_S: Tensor | None = None) -> Tensor:
        """Return the sum of `logprobs_S`, by default the samples' own, over each sample, [B]."""
        parts = (self.logprobs_S if logprobs_S is None else logprobs_S).split(self.counts)
        return torch.stack([part.sum() for part in parts])


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Properties of the whole global batch that a segment's loss needs."""

    supervised: int
    samples: int | None = None
    mean: Tensor | None = None
    """Result of `Objective.mean`. None unless `Needs.batch_mean` is set."""


@dataclass(frozen=True, slots=True)
class HeldOutSums:
    """Sums over a segment of held-out samples. The loss and the accuracy are reported divided by `count`."""

    loss: Tensor
    count: int
    """Number of tokens, samples or pairs over which the loss is summed."""
    correct: Tensor | None = None
    """Number of correct predictions. None: the tokens whose prediction is the argmax are counted."""


class Objective(Protocol):
    needs: Needs

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        """Return a segment's part of its job's loss, which is the sum over all segments of a global batch."""

    def evaluated(self, scores: SampleScores) -> HeldOutSums:
        """Return the sums over the held-out samples of a segment."""

    def mean(self, references: Sequence[Mapping[str | None, Tensor]]) -> Tensor:
        """Return a mean over the reference scores of a whole global batch, for `Needs.batch_mean`."""


@dataclass(frozen=True, slots=True)
class ScalarHead:
    """A job's trained vector that maps the last hidden state of a sample to a scalar value."""

    weight_D: Tensor
    total_D: Tensor
    """Accumulator of the gradient of `weight_D`."""
    anchor: Tensor

    def values(self, h_BD: Tensor) -> Tensor:
        return h_BD @ accumulated(self.weight_D, self.total_D, self.anchor).to(h_BD.dtype)
