"""Direct preference optimisation (DPO) with its losses `sigmoid`, `hinge`, `ipo` and `robust`, as in TRL's
DPOTrainer.

Shapes: B samples of a segment (a job's samples in one microbatch), P pairs of them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.objectives.pairs import PairScores, held_out_sums, pair_metrics, split_pairs
from weftune.objectives.spec import DpoSpec


class Dpo:
    needs = Needs(group_size=2, reference=True)

    def __init__(self, spec: DpoSpec) -> None:
        self._spec = spec

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        return self._pair_losses(scores).sum() / (batch.samples // 2)

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        return held_out_sums(self._pair_losses(scores).sum(), scores)

    def metrics(self, scores: SampleScores) -> Tensor:
        ratios, beta = split_pairs(scores.log_ratios()), self._spec.beta
        rewards = PairScores(beta * ratios.chosen_P, beta * ratios.rejected_P)
        return pair_metrics(rewards, split_pairs(scores.logprob_sums()))

    def _pair_losses(self, scores: SampleScores) -> Tensor:
        spec, ratios_B = self._spec, scores.log_ratios()
        if spec.loss_type == "ipo":
            # As in TRL, an answer token that nothing predicts is counted, too.
            lengths_B = ratios_B.new_tensor([max(1, answer) for answer in scores.answer_lengths])
            return (split_pairs(ratios_B / lengths_B).difference_P - 1 / (2 * spec.beta)) ** 2
        logits_P = spec.beta * split_pairs(ratios_B).difference_P
        match spec.loss_type:
            case "sigmoid":
                return -logsigmoid(logits_P)
            case "hinge":
                return relu(1 - logits_P)
            case "robust":
                noise = spec.label_smoothing
                return (noise * logsigmoid(-logits_P) - (1 - noise) * logsigmoid(logits_P)) / (1 - 2 * noise)
