"""From last hidden states to what every job's rows come to: the only caller of an objective.

Shapes: T rows of a microbatch, D hidden width, S supervised rows among them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.batch import Segment
from weftune.core.head import Head
from weftune.objectives import sft
from weftune.ops.logprobs import target_logprobs
from weftune.run.passes.rows import LaidMicrobatch
from weftune.run.training.evaluation import EvaluationSums


@dataclass(frozen=True, slots=True)
class Scores:
    """What a microbatch came to, one loss and one count of hits for each segment."""

    segments: tuple[Segment, ...]
    leaf_TD: Tensor
    """The last hidden states, as a leaf of the losses."""
    losses: list[Tensor]
    hits: list[Tensor]

    def gradient_TD(self, dead: Collection[str] = ()) -> Tensor:
        """Of all losses with respect to the last hidden states; the rows of dead jobs weigh nothing."""
        alive = [
            loss for segment, loss in zip(self.segments, self.losses, strict=True) if segment.job not in dead
        ]
        if not alive:
            return torch.zeros_like(self.leaf_TD)
        torch.stack(alive).sum().backward()
        assert self.leaf_TD.grad is not None
        return self.leaf_TD.grad


class Scorer:
    """Of the worker that has the last stage; others have no head, and score nothing."""

    def __init__(self, head: Head | None) -> None:
        self._head = head

    def score(self, leaf_TD: Tensor, laid: LaidMicrobatch, supervised: Callable[[Segment], int]) -> Scores:
        """Training: `supervised` counts the supervised tokens of a segment's whole global batch."""
        logprobs, hits = self._logprobs(leaf_TD, laid)
        segments = laid.microbatch.segments
        losses = [
            sft.loss(part_S, supervised(segment)) for segment, part_S in zip(segments, logprobs, strict=True)
        ]
        return Scores(segments, leaf_TD, losses, [part_S.sum() for part_S in hits])

    @torch.no_grad()
    def evaluate(self, h_TD: Tensor, laid: LaidMicrobatch) -> list[EvaluationSums]:
        """Sums over the supervised rows of each segment."""
        logprobs, hits = self._logprobs(h_TD, laid)
        losses = torch.stack([-part_S.sum() for part_S in logprobs]).tolist()
        counts = torch.stack([part_S.sum() for part_S in hits]).tolist()
        return [
            EvaluationSums(loss, count, len(part_S))
            for loss, count, part_S in zip(losses, counts, hits, strict=True)
        ]

    def _logprobs(self, h_TD: Tensor, laid: LaidMicrobatch) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities of the supervised targets, and which were the likeliest, segment by segment."""
        assert self._head is not None, "only the last stage has a head"
        h_SD = h_TD.index_select(0, laid.rows_S)
        targets_S = laid.microbatch.targets_T.index_select(0, laid.rows_S)
        logprobs_S, hits_S = target_logprobs(h_SD, targets_S, self._head)
        return list(logprobs_S.tensor_split(laid.sections)), list(hits_S.tensor_split(laid.sections))
