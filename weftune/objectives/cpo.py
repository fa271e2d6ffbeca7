"""Contrastive preference optimisation (CPO) and SimPO, without a reference policy, as in TRL's CPOTrainer.

Shapes: P pairs of a segment (a job's samples in one microbatch).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.objectives.pairs import (
    PairScores,
    answer_scores,
    chosen_loss,
    held_out_chosen_loss,
    held_out_sums,
    pair_metrics,
)
from weftune.objectives.spec import CpoSpec


class Cpo:
    needs = Needs(group_size=2)

    def __init__(self, spec: CpoSpec) -> None:
        self._spec = spec

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        loss = self._pair_losses(scores).sum() / (batch.samples // 2)
        alpha = self._spec.cpo_alpha
        return loss + alpha * chosen_loss(scores, batch) if alpha else loss

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        loss, alpha = self._pair_losses(scores).sum(), self._spec.cpo_alpha
        return held_out_sums(loss + alpha * held_out_chosen_loss(scores) if alpha else loss, scores)

    def metrics(self, scores: SampleScores) -> Tensor:
        logps, beta = self._answer_logprobs(scores), self._spec.beta
        return pair_metrics(PairScores(beta * logps.chosen_P, beta * logps.rejected_P), logps)

    def _answer_logprobs(self, scores: SampleScores) -> PairScores:
        return answer_scores(scores, divides_by_length=self._spec.loss_type in ("ipo", "simpo"))

    def _pair_losses(self, scores: SampleScores) -> Tensor:
        spec, logits_P = self._spec, self._answer_logprobs(scores).difference_P
        match spec.loss_type:
            case "hinge":
                return relu(1 - spec.beta * logits_P)
            case "ipo":
                return (logits_P - 1 / (2 * spec.beta)) ** 2
            case "simpo":
                logits_P = logits_P - spec.simpo_gamma / spec.beta
        logits_P, noise = spec.beta * logits_P, spec.label_smoothing
        return -logsigmoid(logits_P) * (1 - noise) - logsigmoid(-logits_P) * noise
