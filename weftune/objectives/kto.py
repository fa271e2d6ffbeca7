"""Kahneman-Tversky optimisation (KTO) with its losses `kto` and `apo_zero_unpaired`, as in TRL's KTOTrainer.

Shapes: B samples of a segment (a job's samples in one microbatch), M metrics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.objectives.spec import KtoSpec


class Kto:
    def __init__(self, spec: KtoSpec) -> None:
        self.needs = Needs(reference=True, mismatched_samples=spec.mismatched_samples)
        self._spec = spec

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        return self._answer_losses(scores).sum() / batch.samples

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        return HeldOutSums(self._answer_losses(scores).sum(), len(scores.counts))

    @torch.no_grad()
    def metrics(self, scores: SampleScores) -> Tensor:
        """Return the sums from which KTO's metrics are computed: the number of desirable answers, the rewards
        and log-probabilities of desirable and of undesirable answers, and the KL term of each sample."""
        rewards_B, logps_B = self._spec.beta * scores.log_ratios(), scores.logprob_sums()
        chosen_B = logps_B.new_tensor(scores.is_desirable)
        rejected_B, kl_B = 1 - chosen_B, torch.full_like(chosen_B, scores.kl)
        rows = (
            chosen_B,
            chosen_B * rewards_B,
            rejected_B * rewards_B,
            chosen_B * logps_B,
            rejected_B * logps_B,
            kl_B,
        )
        return torch.stack(rows).sum(dim=1)

    def _answer_losses(self, scores: SampleScores) -> Tensor:
        spec, ratios_B = self._spec, scores.log_ratios()
        chosen_B = ratios_B.new_tensor(scores.is_desirable)
        weights_B = chosen_B * spec.desirable_weight + (1 - chosen_B) * spec.undesirable_weight
        return weights_B * (1 - torch.sigmoid(spec.beta * (2 * chosen_B - 1) * (ratios_B - scores.kl)))
