"""The interface of an objective, which computes one loss per job from the log-probabilities of its samples.

The field `needs` lists what planners and executors must provide. The losses are plain torch, and autograd
computes their gradients. `weftune.run.passes.scorer` is the only caller.

Shapes: S supervised rows of a segment (a job's samples in one microbatch), in row order; B samples of a
segment; D hidden width; M metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weftune.ops.accumulate import accumulate_gradient


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of an objective beyond the log-probabilities of its samples."""

    group_size: int = 1
    """Number of consecutive samples of a global batch that must be in the same microbatch: 2 for preference
    pairs, 1 for single samples."""
    mismatched_samples: bool = False
    """Whether mismatched samples, each a prompt with the answer to another prompt, are scored after the step
    before each global batch, and before each evaluation."""
    reference: bool = False
    """Whether each sample is also scored, without gradients and before the job's first step, by the reference
    policy: the base with the adapter that the job starts from, or the base alone."""
    generates_rows: bool = False
    """Whether the current adapter generates a batch's samples. A window (the few global batches that are
    planned together) then has at most one such batch."""
    scalar_head: bool = False
    """Whether a trained vector maps the last hidden state of each sample to a scalar value."""
    max_metric_count: int = 0
    """Number of metrics, at the end of the objective's metrics, that are maxima over rows. All others are
    sums."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """The log-probabilities and other scores of one segment (a job's samples in one microbatch)."""

    logprobs_S: Tensor
    counts: tuple[int, ...]
    """Number of supervised rows of each sample."""
    answer_lengths: tuple[int, ...] = ()
    """Number of answer tokens of each sample, which are its last tokens. The first token of a sample is
    counted too if it belongs to the answer, although no row predicts it."""
    references_B: Tensor | None = None
    """Sum of the reference policy's log-probabilities over the supervised rows of each sample, without
    gradients. None unless `Needs.reference` is set."""
    values_B: Tensor | None = None
    """Output of the scalar head (a trained vector) for each sample. None if the job has no scalar head."""
    is_desirable: tuple[bool, ...] = ()
    """Whether the answer of each sample is desirable. Empty if answers have no labels."""
    kl: float = 0.0
    """KL term of KTO: the mean log-probability of mismatched samples (prompts with the answers to other
    prompts) under the current policy minus that under the reference policy, but at least 0. NaN if they were
    not scored. 0 unless `Needs.mismatched_samples` is set."""

    def logprob_sums(self) -> Tensor:
        """Return the sum of the log-probabilities of each sample's supervised tokens, [B]."""
        return torch.stack([part.sum() for part in self.logprobs_S.split(self.counts)])

    def log_ratios(self) -> Tensor:
        """Return the log-probability of each sample under the current policy minus that under the reference
        policy, [B]."""
        assert self.references_B is not None
        return self.logprob_sums() - self.references_B

    def answer_logprob_sums(self) -> Tensor:
        """Return the sum of the log-probabilities of each sample's answer, [B]."""
        parts = zip(self.logprobs_S.split(self.counts), self.counts, self.answer_lengths, strict=True)
        return torch.stack([part[max(0, count - answer) :].sum() for part, count, answer in parts])


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Properties of a job's whole global batch, on which the loss of each of its segments (the parts in one
    microbatch each) depends."""

    supervised_tokens: int
    counts: tuple[int, ...] = ()
    """Number of supervised rows of each sample. Empty for supervised fine-tuning, which does not need it."""

    @property
    def samples(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True)
class HeldOutSums:
    """The sum of a job's loss over its held-out samples in one microbatch. A reported loss is the total of
    these sums divided by the total of `count`."""

    loss: Tensor
    count: int
    """Number of tokens, samples or pairs over which the loss and the metrics are summed."""


class Objective(Protocol):
    needs: Needs

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        """Return the contribution of a segment (the job's samples in one microbatch) to the loss of a global
        batch, which is the sum over its segments."""

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        """Return the sum of the loss over a job's held-out samples in one microbatch, and the number of
        tokens, samples or pairs in the sum."""

    def metrics(self, scores: SampleScores) -> Tensor | None:
        """Return the metrics named by the objective's spec, each summed over a job's samples in one
        microbatch, [M], without gradients. None if the spec names none. The last `Needs.max_metric_count`
        metrics are maxima instead of sums."""


def add_metrics(first_M: Tensor, second_M: Tensor, max_metric_count: int) -> Tensor:
    """Combine the metrics of two sets of rows. The last `max_metric_count` metrics are maxima, all others are
    sums."""
    sums = len(first_M) - max_metric_count
    largest = torch.maximum(first_M[sums:], second_M[sums:])
    return torch.cat([first_M[:sums] + second_M[:sums], largest])


def mean_metrics(metrics_M: Tensor, count: int, max_metric_count: int) -> Tensor:
    """Return the metrics with all sums divided by `count`. The last `max_metric_count` metrics are maxima and
    are not divided."""
    sums = len(metrics_M) - max_metric_count
    return torch.cat([metrics_M[:sums] / count, metrics_M[sums:]])


@dataclass(frozen=True, slots=True)
class ScalarHead:
    """A job's trained vector that maps the last hidden state of a sample to a scalar value."""

    weight_D: Tensor
    total_D: Tensor
    """Accumulator of the gradient of `weight_D`."""
    anchor: Tensor

    def values(self, h_BD: Tensor) -> Tensor:
        return h_BD @ accumulate_gradient(self.weight_D, self.total_D, self.anchor).to(h_BD.dtype)
