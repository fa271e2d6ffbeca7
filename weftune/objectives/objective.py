"""What an objective is: log-probabilities of samples → one loss per job.

Its `needs` say what planners and executors must see to; its losses are plain torch, and autograd carries them
back. `weftune.run.passes.scorer` is the only caller.

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
    """What an objective asks for beside its samples' own log-probabilities."""

    together: int = 1
    """So many consecutive samples of a global batch must share a microbatch: pairs, groups."""
    references: tuple[str | None, ...] = ()
    """By whose adapter each sample is scored, too, without gradients and before its batch is trained: None is
    the base alone, OWN the job's adapter as it stands, anything else the name of a job."""
    batch_mean: bool = False
    """Whether the losses hang on a mean over the references of the whole global batch."""
    makes_rows: bool = False
    """Whether a batch's samples are made by the adapter as it stands: no window holds two of its batches."""
    scalar_head: bool = False
    """Whether each sample has a value, made of its last hidden state by a trained vector."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """What the samples of one segment came to."""

    logprobs_S: Tensor
    counts: tuple[int, ...]
    """How many supervised rows each sample has."""
    offsets: tuple[int, ...]
    """Where each sample stands in its job's global batch: what it is known by there."""
    references: Mapping[str | None, Tensor] = field(default_factory=dict)
    """By adapter: log-probabilities of the same rows [S], without gradients."""
    values_B: Tensor | None = None
    """Of the scalar head."""

    def sums(self, logprobs_S: Tensor | None = None) -> Tensor:
        """The log-probability of each sample's supervised tokens [B]: its own, or those that are given."""
        parts = (self.logprobs_S if logprobs_S is None else logprobs_S).split(self.counts)
        return torch.stack([part.sum() for part in parts])


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a segment's loss must know of its whole global batch."""

    supervised: int
    samples: int | None = None
    mean: Tensor | None = None
    """Of `Objective.mean`, where it is needed."""


@dataclass(frozen=True, slots=True)
class HeldOutSums:
    """Over a segment of held-out samples; what is reported are loss and hits by the count."""

    loss: Tensor
    count: int
    """Of tokens, samples or pairs: whatever the loss is summed over."""
    hits: Tensor | None = None
    """How many of them are as they should be; None: the tokens that are the likeliest."""


class Objective(Protocol):
    needs: Needs

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        """A segment's share of its job's loss: the shares of a global batch add up to it."""

    def evaluated(self, scores: SampleScores) -> HeldOutSums:
        """Of held-out samples."""

    def mean(self, references: Sequence[Mapping[str | None, Tensor]]) -> Tensor:
        """Of what was scored for a whole global batch, sample by sample; asked for where it is needed."""


@dataclass(frozen=True, slots=True)
class ScalarHead:
    """A job's own vector that makes a value of a sample's last hidden state."""

    weight_D: Tensor
    total_D: Tensor
    """Where its gradient adds up."""
    anchor: Tensor

    def values(self, h_BD: Tensor) -> Tensor:
        return h_BD @ accumulated(self.weight_D, self.total_D, self.anchor).to(h_BD.dtype)
