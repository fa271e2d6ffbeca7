"""Supervised fine-tuning: the mean negative log-probability of a job's supervised tokens."""

from __future__ import annotations

from torch import Tensor

from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores


class SupervisedFineTuning:
    needs = Needs()

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        return -scores.logprobs_S.sum() / batch.supervised_tokens

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        return HeldOutSums(-scores.logprobs_S.sum(), len(scores.logprobs_S))

    def metrics(self, scores: SampleScores) -> Tensor | None:
        return None


SFT = SupervisedFineTuning()
