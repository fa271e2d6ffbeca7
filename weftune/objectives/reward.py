"""Training of reward models, as in TRL's RewardTrainer.

Shapes: B samples of a segment (a job's samples in one microbatch), P pairs of them, M metrics.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.objectives.pairs import PairScores, held_out_sums, split_pairs
from weftune.objectives.spec import RewardSpec


class Reward:
    needs = Needs(group_size=2, scalar_head=True, max_metric_count=RewardSpec.max_metric_count)

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        return self._pair_losses(scores).sum() / (batch.samples // 2)

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        return held_out_sums(self._pair_losses(scores).sum(), scores)

    @torch.no_grad()
    def metrics(self, scores: SampleScores) -> Tensor:
        """Return the sums over the pairs of the mean reward, of whether the chosen answer has the higher
        reward, and of the margin between both rewards. These are followed by the maxima of the negative
        rewards and of the rewards, [M]."""
        rewards = _rewards(scores)
        chosen_P, rejected_P = rewards.chosen_P, rewards.rejected_P
        correct_P = (chosen_P > rejected_P).to(chosen_P.dtype)
        sums = torch.stack([(chosen_P + rejected_P) / 2, correct_P, rewards.difference_P]).sum(dim=1)
        values_B = torch.cat([chosen_P, rejected_P])
        return torch.cat([sums, torch.stack([-values_B, values_B]).amax(dim=1)])

    def _pair_losses(self, scores: SampleScores) -> Tensor:
        rewards, coefficient = _rewards(scores), self._spec.center_rewards_coefficient
        losses_P = -logsigmoid(rewards.difference_P)
        if coefficient is None:
            return losses_P
        return losses_P + coefficient * (rewards.chosen_P + rewards.rejected_P) ** 2


def _rewards(scores: SampleScores) -> PairScores:
    assert scores.values_B is not None, "a reward model has a scalar head"
    return split_pairs(scores.values_B)
