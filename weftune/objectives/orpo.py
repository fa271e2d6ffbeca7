"""Odds ratio preference optimisation (ORPO), as in TRL's ORPOTrainer: the negative log-probability covers the
prompt and the answer of chosen samples, and the odds ratio only the answers.

Shapes: P pairs of a segment (a job's samples in one microbatch).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.objectives.pairs import (
    PairScores,
    answer_scores,
    chosen_loss,
    held_out_chosen_loss,
    held_out_sums,
    pair_metrics,
)
from weftune.objectives.spec import OrpoSpec


class Orpo:
    needs = Needs(group_size=2)

    def __init__(self, spec: OrpoSpec) -> None:
        self._beta = spec.beta

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        return chosen_loss(scores, batch) + self._penalties(scores).sum() / (batch.samples // 2)

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        return held_out_sums(held_out_chosen_loss(scores) + self._penalties(scores).sum(), scores)

    def metrics(self, scores: SampleScores) -> Tensor:
        logps = answer_scores(scores, divides_by_length=True)
        return pair_metrics(PairScores(self._beta * logps.chosen_P, self._beta * logps.rejected_P), logps)

    def _penalties(self, scores: SampleScores) -> Tensor:
        logps = answer_scores(scores, divides_by_length=True)
        log_odds_P = logps.difference_P - (log1mexp(logps.chosen_P) - log1mexp(logps.rejected_P))
        return -self._beta * logsigmoid(log_odds_P)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, precise near 0 and for large negative values."""
    # The branch that is not taken must have a finite gradient too.
    near = x > -math.log(2)
    below = torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-below.exp()))
