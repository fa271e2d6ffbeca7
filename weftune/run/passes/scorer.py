"""Losses and scores of every job, computed from the last hidden states by the job's objective.

Shapes: T rows of a microbatch, D hidden width, S supervised rows among them, B samples of a segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from weftune.core.batch import Segment, to_device
from weftune.core.weights import Head, HeadRows
from weftune.objectives.objective import BatchFacts, Objective, SampleScores, ScalarHead
from weftune.objectives.sft import SFT
from weftune.ops.logprobs import run_counts, run_sums, target_logprobs
from weftune.run.passes.rows import LaidMicrobatch
from weftune.run.training.state import EvaluationSums


@dataclass(slots=True)
class Scores:
    """The result of a microbatch: for each segment its loss and its number of correct predictions."""

    segments: tuple[Segment, ...]
    leaf_TD: Tensor | None
    """Last hidden states, as the leaf tensor with respect to which losses are differentiated. None after
    `gradient_TD`."""
    losses: list[Tensor]
    correct: list[Tensor]

    def gradient_TD(self, dead: Collection[str] = ()) -> Tensor:
        """Return the gradient of all losses at the last hidden states, once, and drop the hidden states. The
        gradient is 0 in rows of dead jobs."""
        leaf_TD, self.leaf_TD = self.leaf_TD, None
        assert leaf_TD is not None
        alive = [
            loss for segment, loss in zip(self.segments, self.losses, strict=True) if segment.job not in dead
        ]
        if not alive:
            return torch.zeros_like(leaf_TD)
        torch.stack(alive).sum().backward()
        assert leaf_TD.grad is not None
        # Losses are only reported from now on.
        self.losses = [loss.detach() for loss in self.losses]
        return leaf_TD.grad


@dataclass(frozen=True, slots=True)
class _Scored:
    """A segment with its log-probabilities."""

    segment: Segment
    scores: SampleScores
    """Log-probabilities, with sample boundaries unless the objective is supervised fine-tuning."""
    correct_S: Tensor
    last_rows: list[int]
    """Last row of each sample; empty for supervised fine-tuning."""


class Scorer:
    """Computation of losses on the worker with the last stage; other workers have no head."""

    def __init__(
        self, head: Head | None, own_rows: Callable[[Segment], HeadRows | None] = lambda segment: None
    ) -> None:
        """`own_rows` returns the rows by which a segment's adapter replaces rows of the head, or None."""
        self._head, self._own_rows = head, own_rows
        self.objectives: dict[str, Objective] = {}
        """Maps each job to its objective, except jobs with supervised fine-tuning."""
        self.scalar_heads: dict[str, ScalarHead] = {}
        self._references: defaultdict[tuple[str, int, bool], _References] = defaultdict(dict)
        """Maps (job, step, held out) to reference log-probabilities, until a later step is trained."""

    def score(
        self,
        leaf_TD: Tensor,
        laid: LaidMicrobatch,
        supervised: Callable[[Segment], int],
        samples: Callable[[Segment], int] | None = None,
    ) -> Scores:
        """Return training losses. `supervised` and `samples` count tokens and samples of the global batch."""
        segments = laid.microbatch.segments
        if leaf_TD.is_cuda and not any(segment.job in self.objectives for segment in segments):
            return self.score_together(leaf_TD, laid, supervised)
        found = list(self._scored(leaf_TD, laid))
        losses = []
        for one in found:
            self._forget_before(one.segment)
            count = None if samples is None else samples(one.segment)
            batch = BatchFacts(supervised(one.segment), count, self._mean(one.segment))
            losses.append(self._objective(one).loss(self._samples(one, leaf_TD), batch))
        return Scores(laid.microbatch.segments, leaf_TD, losses, [one.correct_S.sum() for one in found])

    def score_together(
        self, leaf_TD: Tensor, laid: LaidMicrobatch, supervised: Callable[[Segment], int]
    ) -> Scores:
        """Return the losses of jobs that all use supervised fine-tuning, with a few kernel launches in total:
        with a thousand jobs in a microbatch, separate launches would take longer than the head."""
        segments = laid.microbatch.segments
        logprobs_S, correct_S = self._logprobs(leaf_TD, laid)
        edges = [0, *laid.sections, len(logprobs_S)]
        lengths = [stop - start for start, stop in pairwise(edges)]
        counts = torch.tensor([supervised(segment) for segment in segments], dtype=logprobs_S.dtype)
        losses_J = -run_sums(logprobs_S, lengths) / to_device(counts, leaf_TD.device)
        correct_J = run_counts(correct_S, lengths)
        return Scores(segments, leaf_TD, list(losses_J.unbind()), list(correct_J.unbind()))

    @torch.no_grad()
    def evaluate(self, h_TD: Tensor, laid: LaidMicrobatch) -> list[EvaluationSums]:
        """Return loss and accuracy sums over the held-out rows of each segment."""
        found = list(self._scored(h_TD, laid))
        sums = [self._objective(one).evaluated(self._samples(one, h_TD, held_out=True)) for one in found]
        correct = [
            one.correct_S.sum() if own.correct is None else own.correct
            for one, own in zip(found, sums, strict=True)
        ]
        losses, counts = torch.stack([own.loss for own in sums]).tolist(), torch.stack(correct).tolist()
        return [
            EvaluationSums(one.segment.job, one.segment.step, loss, count, own.count)
            for one, loss, count, own in zip(found, losses, counts, sums, strict=True)
        ]

    @torch.no_grad()
    def refer(self, h_TD: Tensor, laid: LaidMicrobatch, held_out: bool = False) -> None:
        """Keep log-probabilities of a microbatch's samples under the reference adapter of each segment, for
        training losses or, if `held_out`, for an evaluation."""
        for one in self._scored(h_TD, laid):
            kept = self._references[one.segment.job, one.segment.step, held_out]
            parts = one.scores.logprobs_S.split(one.scores.counts)
            for offset, part_S in zip(one.scores.offsets, parts, strict=True):
                kept.setdefault(offset, {})[one.segment.adapter] = part_S

    def forget(self) -> None:
        """Drop all reference log-probabilities, because their batches were abandoned."""
        self._references.clear()

    def _objective(self, one: _Scored) -> Objective:
        return self.objectives.get(one.segment.job, SFT)

    def _samples(self, one: _Scored, h_TD: Tensor, held_out: bool = False) -> SampleScores:
        """Return the scores of a segment in the form that its objective needs."""
        job = one.segment.job
        if job not in self.objectives:
            return one.scores
        needs, head = self.objectives[job].needs, self.scalar_heads.get(job)
        assert not needs.scalar_head or head is not None, f"{job} has no scalar head"
        kept = self._references[job, one.segment.step, held_out]
        references = {
            adapter: torch.cat([kept[offset][adapter] for offset in one.scores.offsets])
            for adapter in needs.references
        }
        values_B = None if head is None else head.values(h_TD[one.last_rows])
        return replace(one.scores, references=references, values_B=values_B)

    def _mean(self, segment: Segment) -> Tensor | None:
        objective = self.objectives.get(segment.job, SFT)
        if not objective.needs.batch_mean:
            return None
        kept = self._references[segment.job, segment.step, False]
        return objective.mean([kept[offset] for offset in sorted(kept)])

    def _forget_before(self, segment: Segment) -> None:
        for key in [*self._references]:
            if key[0] == segment.job and key[1] < segment.step:
                del self._references[key]

    def _scored(self, h_TD: Tensor, laid: LaidMicrobatch) -> Iterator[_Scored]:
        """Yield each segment's log-probabilities, and whether each target was the likeliest token."""
        logprobs_S, correct_S = self._logprobs(h_TD, laid)
        parts = logprobs_S.tensor_split(laid.sections), correct_S.tensor_split(laid.sections)
        for segment, own_S, own_correct_S in zip(laid.microbatch.segments, *parts, strict=True):
            offsets, counts, last_rows = self._samples_of(segment, laid)
            yield _Scored(segment, SampleScores(own_S, counts, offsets), own_correct_S, last_rows)

    def _logprobs(self, h_TD: Tensor, laid: LaidMicrobatch) -> tuple[Tensor, Tensor]:
        assert self._head is not None, "only the last stage has a head"
        h_SD = h_TD.index_select(0, laid.rows_S)
        targets_S = laid.microbatch.targets_T.index_select(0, laid.rows_S)
        own = [self._own_rows(segment) for segment in laid.microbatch.segments]
        if not any(own):
            return target_logprobs(h_SD, targets_S, self._head)
        parts = h_SD.tensor_split(laid.sections), targets_S.tensor_split(laid.sections)
        found = [
            target_logprobs(h, targets, self._head, rows)
            for h, targets, rows in zip(*parts, own, strict=True)
        ]
        logprobs, correct = zip(*found, strict=True)
        return torch.cat(logprobs), torch.cat(correct)

    def _samples_of(
        self, segment: Segment, laid: LaidMicrobatch
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Return offset, supervised rows and last row of each sample; empty for supervised fine-tuning."""
        if segment.job not in self.objectives:
            return (), (), []
        stops = list(accumulate(laid.microbatch.sample_lengths))
        spans = [
            (start, stop)
            for start, stop in zip([0, *stops[:-1]], stops, strict=True)
            if segment.start <= start < segment.stop
        ]
        offsets = tuple(int(laid.token_index[start]) for start, _ in spans)
        counts = tuple(laid.supervised_in(start, stop) for start, stop in spans)
        # A sample may be followed by rows of padding.
        return offsets, counts, [min(stop, segment.stop) - 1 for _, stop in spans]


_References = dict[int, dict[str | None, Tensor]]
"""Maps a sample's offset, then an adapter, to the log-probabilities of the sample's supervised rows."""
