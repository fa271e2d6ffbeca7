"""Functions that objectives over preference pairs share. Samples 2n and 2n + 1 of a segment (a job's samples
in one microbatch) are the chosen and the rejected sample of a pair.

Shapes: B samples of a segment, P pairs of them, M metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.objectives.objective import BatchFacts, HeldOutSums, SampleScores


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of the chosen and of the rejected answers of preference pairs, such as log-probabilities."""

    chosen_P: Tensor
    rejected_P: Tensor

    @property
    def difference_P(self) -> Tensor:
        return self.chosen_P - self.rejected_P


def answer_scores(scores: SampleScores, divides_by_length: bool) -> PairScores:
    """Return the log-probability of each answer: the sum over the answer's tokens or, if `divides_by_length`,
    their mean."""
    logps_B = scores.answer_logprob_sums()
    if divides_by_length:
        counts = map(min, zip(scores.counts, scores.answer_lengths, strict=True))
        logps_B = logps_B / logps_B.new_tensor(list(counts))
    return split_pairs(logps_B)


def split_pairs(values_B: Tensor) -> PairScores:
    return PairScores(values_B[0::2], values_B[1::2])


def chosen_loss(scores: SampleScores, batch: BatchFacts) -> Tensor:
    """Return the contribution of a segment (the job's samples in one microbatch) to the mean negative
    log-probability of supervised tokens, over all chosen samples of the global batch."""
    return -scores.logprob_sums()[0::2].sum() / sum(batch.counts[0::2])


def held_out_chosen_loss(scores: SampleScores) -> Tensor:
    """Return the mean negative log-probability of the supervised tokens of each chosen sample, summed over a
    job's samples in one microbatch. TRL reports the same for evaluation batches of one pair."""
    sums_P = scores.logprob_sums()[0::2]
    return -(sums_P / sums_P.new_tensor(scores.counts[0::2])).sum()


def held_out_sums(loss: Tensor, scores: SampleScores) -> HeldOutSums:
    return HeldOutSums(loss, len(scores.counts) // 2)


@torch.no_grad()
def pair_metrics(rewards: PairScores, logps: PairScores) -> Tensor:
    """Return the sums of the metrics `PAIR_METRICS` over the pairs, [M], from the rewards and
    log-probabilities of the answers."""
    rows = (
        rewards.chosen_P,
        rewards.rejected_P,
        rewards.difference_P,
        (rewards.chosen_P > rewards.rejected_P).to(rewards.chosen_P.dtype),
        logps.chosen_P,
        logps.rejected_P,
    )
    return torch.stack(rows).sum(dim=1)
