"""Losses and scores of every job, computed from the last hidden states by the job's objective.

Mismatched samples, which the KL term of KTO needs, are prompts with the completion of another sample.

Shapes: T rows of a microbatch, D hidden width, S supervised rows among them, B samples of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.adapters.target import HEAD
from weftune.core.batch import Segment, to_device
from weftune.core.shapes import SCORE
from weftune.core.weights import Head, HeadRows
from weftune.objectives.objective import BatchFacts, Objective, SampleScores, ScalarHead, mean_metrics
from weftune.objectives.sft import SFT
from weftune.ops.logprobs import range_counts, range_sums, target_logprobs
from weftune.run.passes.rows import DeviceMicrobatch
from weftune.run.training.state import EvaluationSums

PURPOSES = "batch", "held_out"
"""Values of `Segment.kl_purpose` for mismatched samples (prompts with the completion of another sample, for
the KL term of KTO). They say whether the KL term is that of a global batch or that of the held-out
samples."""


@dataclass(slots=True)
class Scores:
    """The losses and the numbers of correct predictions of a microbatch, for each segment (the rows of one
    job)."""

    segments: tuple[Segment, ...]
    leaf_TD: Tensor | None
    """Last hidden states as a detached leaf tensor, with respect to which losses are differentiated. None
    after `gradient_TD`."""
    losses: list[Tensor]
    correct: list[Tensor]
    metrics: list[Tensor | None]
    """For each segment (rows of one job), its contributions [M] to the means of the objective's metrics over
    the global batch. None for supervised fine-tuning."""

    def gradient_TD(self, failed_jobs: Collection[str] = ()) -> Tensor:
        """Return the gradient of all losses with respect to the last hidden states, and drop these states, so
        that this can be called only once. The gradient is 0 in the rows of `failed_jobs`."""
        leaf_TD, self.leaf_TD = self.leaf_TD, None
        assert leaf_TD is not None
        alive = [
            loss
            for segment, loss in zip(self.segments, self.losses, strict=True)
            if segment.job not in failed_jobs
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
    """A segment (rows of one job) with the log-probabilities of its target tokens."""

    segment: Segment
    scores: SampleScores
    """Log-probabilities of the target tokens in the segment (the rows of one job). They include sample
    boundaries, unless the objective is supervised fine-tuning."""
    correct_S: Tensor
    last_rows: list[int]
    """Index of the last row of each sample in the segment (the rows of one job). Empty if the objective is
    supervised fine-tuning."""


class Scorer:
    """The part of an executor that computes losses and scores with the model's head. Only the worker with the
    last stage has a head."""

    def __init__(
        self,
        head: Head | None,
        trained_head_rows: Callable[[Segment], HeadRows | None] = lambda segment: None,
    ) -> None:
        """Create a scorer for this head. `trained_head_rows` returns the rows of the head that the adapter of
        a segment's job replaces by trained ones, or None."""
        self._head, self._own_rows = head, trained_head_rows
        self.objectives: dict[str, Objective] = {}
        """Maps each job to its objective. Jobs whose objective is supervised fine-tuning are not
        contained."""
        self.scalar_heads: dict[str, ScalarHead] = {}
        self._log_ratios: dict[tuple[str, str, int], list[float]] = {}
        """Maps (job, purpose, step) to the values from which the KL term of KTO after this step is computed:
        for each mismatched sample (a prompt with the completion of another sample), its log-probability minus
        its log-probability under the reference policy."""

    def attach_head(self, banks: Banks, job: str) -> None:
        """Use the scalar head of an attached job (as in reward models, a linear layer with one output), if
        the job has one on this worker."""
        attached, name = banks.attached[job], (SCORE, HEAD)
        if name in attached.read_parameters:
            self.scalar_heads[job] = ScalarHead(
                attached.read_parameters[name], attached.totals[name], banks.anchor
            )

    def begin_window(self) -> None:
        """Drop the scores for the KL term of KTO, since a new Program begins: scores are used only in the
        Program that computes them."""
        self._log_ratios.clear()

    def record_mismatched_scores(
        self, sums: Sequence[Sequence[float]], device_microbatch: DeviceMicrobatch
    ) -> None:
        """Store the scores of mismatched samples (prompts with the completion of another sample), from which
        later losses compute the KL term of KTO. `sums` contains, for each segment (the rows of one job), the
        log-probability of each sample."""
        references_S = device_microbatch.microbatch.references_S
        known = iter([] if references_S is None else references_S.tolist())
        for segment, logprobs in zip(device_microbatch.microbatch.segments, sums, strict=True):
            ratios = [logprob - next(known, math.nan) for logprob in logprobs]
            if segment.kl_purpose:
                key = segment.job, segment.kl_purpose, segment.step
                self._log_ratios.setdefault(key, []).extend(ratios)

    def kl_sums(self, job: str, step: int) -> list[float]:
        """Return four numbers for the KL term of a KTO job after a step: the sum and the number of the stored
        log-ratios for the next global batch, then both for the held-out samples."""
        noted = [self._log_ratios.get((job, purpose, step), []) for purpose in PURPOSES]
        return [value for ratios in noted for value in (math.fsum(ratios), float(len(ratios)))]

    def set_kl_sums(self, job: str, step: int, sums: Sequence[float]) -> None:
        """Replace the log-ratios stored for the KL term of a KTO job after a step by their mean over all
        replicas. `sums` are the sums over all replicas, in the order of `kl_sums`."""
        for purpose, total, count in zip(PURPOSES, sums[::2], sums[1::2], strict=True):
            if count:
                self._log_ratios[job, purpose, step] = [total / count]

    def _kl_term(self, job: str, purpose: str, step: int) -> float:
        """Return the KL term of a KTO job's loss. Its value does not depend on how samples were packed into
        microbatches."""
        ratios = self._log_ratios.get((job, purpose, step), [math.nan])
        mean = math.fsum(ratios) / len(ratios)
        return mean if math.isnan(mean) else max(0.0, mean)

    def score(
        self,
        leaf_TD: Tensor,
        device_microbatch: DeviceMicrobatch,
        supervised_tokens: Callable[[Segment], int],
        sample_token_counts: Callable[[Segment], tuple[int, ...]] = lambda segment: (),
    ) -> Scores:
        """Return the training losses of all segments (the rows of one job each). `supervised_tokens` returns
        the number of supervised tokens in the global batch that a segment belongs to, and
        `sample_token_counts` their number in each sample of that batch."""
        segments = device_microbatch.microbatch.segments
        if leaf_TD.is_cuda and not any(segment.job in self.objectives for segment in segments):
            return self.score_segments_together(leaf_TD, device_microbatch, supervised_tokens)
        found = list(self._score_segments(leaf_TD, device_microbatch))
        losses: list[Tensor] = []
        metrics: list[Tensor | None] = []
        for one in found:
            objective, scores = (
                self.objectives.get(one.segment.job),
                self._complete_scores(one, leaf_TD, "batch"),
            )
            if objective is None:
                losses.append(SFT.loss(scores, BatchFacts(supervised_tokens(one.segment))))
                metrics.append(None)
                continue
            batch = BatchFacts(supervised_tokens(one.segment), sample_token_counts(one.segment))
            losses.append(objective.loss(scores, batch))
            sums_M = objective.metrics(scores)
            needs = objective.needs
            rows = batch.samples // needs.group_size
            metrics.append(None if sums_M is None else mean_metrics(sums_M, rows, needs.max_metric_count))
        return Scores(segments, leaf_TD, losses, [one.correct_S.sum() for one in found], metrics)

    def score_segments_together(
        self, leaf_TD: Tensor, device_microbatch: DeviceMicrobatch, supervised: Callable[[Segment], int]
    ) -> Scores:
        """Return the losses of jobs that all use supervised fine-tuning, with a few kernel launches for all
        jobs together. With a thousand jobs in a microbatch, separate launches would take longer than the head
        itself."""
        segments = device_microbatch.microbatch.segments
        logprobs_S, correct_S = self._logprobs(leaf_TD, device_microbatch)
        edges = [0, *device_microbatch.sections, len(logprobs_S)]
        lengths = [stop - start for start, stop in pairwise(edges)]
        counts = torch.tensor([supervised(segment) for segment in segments], dtype=logprobs_S.dtype)
        losses_J = -range_sums(logprobs_S, lengths) / to_device(counts, leaf_TD.device)
        correct_J = range_counts(correct_S, lengths)
        no_metrics: list[Tensor | None] = [None] * len(segments)
        return Scores(segments, leaf_TD, list(losses_J.unbind()), list(correct_J.unbind()), no_metrics)

    @torch.no_grad()
    def evaluate(self, h_TD: Tensor, device_microbatch: DeviceMicrobatch) -> list[EvaluationSums]:
        """Return the loss and accuracy sums over the held-out rows of each segment (the rows of one job)."""
        found = list(self._score_segments(h_TD, device_microbatch))
        scores = [self._complete_scores(one, h_TD, "held_out") for one in found]
        objectives = [self.objectives.get(one.segment.job, SFT) for one in found]
        sums = [objective.evaluation_sums(own) for objective, own in zip(objectives, scores, strict=True)]
        losses = torch.stack([own.loss for own in sums]).tolist()
        correct = torch.stack([one.correct_S.sum() for one in found]).tolist()
        metrics = [objective.metrics(own) for objective, own in zip(objectives, scores, strict=True)]
        return [
            EvaluationSums(
                job=one.segment.job,
                step=one.segment.step,
                loss=losses[number],
                correct=correct[number],
                tokens=len(one.correct_S),
                count=sums[number].count,
                metrics=() if (sums_M := metrics[number]) is None else tuple(sums_M.tolist()),
                maxima=objectives[number].needs.max_metric_count,
            )
            for number, one in enumerate(found)
        ]

    @torch.no_grad()
    def sample_logprobs(self, h_TD: Tensor, device_microbatch: DeviceMicrobatch) -> list[tuple[float, ...]]:
        """Return, for each segment (the rows of one job), one number per sample: the sum of the
        log-probabilities of the sample's supervised tokens."""
        logprobs_S, _ = self._logprobs(h_TD, device_microbatch)
        spans = list(pairwise([0, *accumulate(device_microbatch.microbatch.sample_lengths)]))
        sums = range_sums(
            logprobs_S.double(), [device_microbatch.count_supervised(*span) for span in spans]
        ).tolist()
        return [
            tuple(
                total
                for (start, _), total in zip(spans, sums, strict=True)
                if segment.start <= start < segment.stop
            )
            for segment in device_microbatch.microbatch.segments
        ]

    @torch.no_grad()
    def scalar_values(self, h_TD: Tensor, device_microbatch: DeviceMicrobatch) -> list[Tensor]:
        """Return, for each segment (the rows of one job), the outputs [B] of the job's scalar head, one per
        sample."""
        return [
            self.scalar_heads[segment.job].values(h_TD[_last_rows(segment, device_microbatch)])
            for segment in device_microbatch.microbatch.segments
        ]

    def _complete_scores(
        self, scored_segment: _Scored, h_TD: Tensor, purpose: Literal["batch", "held_out"]
    ) -> SampleScores:
        """Return the log-probabilities of a segment (the rows of one job) together with the KL term and the
        outputs of the scalar head, if its objective needs these. `purpose` says whether the samples are for
        training or evaluation."""
        job = scored_segment.segment.job
        if job not in self.objectives:
            return scored_segment.scores
        needs, head = self.objectives[job].needs, self.scalar_heads.get(job)
        assert not needs.scalar_head or head is not None, f"{job} has no scalar head"
        assert not needs.reference or scored_segment.scores.references_B is not None, (
            f"{job} has no reference scores"
        )
        scores = scored_segment.scores
        if needs.mismatched_samples:
            # Those of a batch were scored after the step before it.
            step = scored_segment.segment.step - (purpose == "batch")
            scores = replace(scores, kl=self._kl_term(job, purpose, step))
        return (
            scores if head is None else replace(scores, values_B=head.values(h_TD[scored_segment.last_rows]))
        )

    def _score_segments(self, h_TD: Tensor, device_microbatch: DeviceMicrobatch) -> Iterator[_Scored]:
        """Yield each segment (the rows of one job) with the log-probability of each target token, and whether
        the target was the likeliest token."""
        logprobs_S, correct_S = self._logprobs(h_TD, device_microbatch)
        parts = (
            logprobs_S.tensor_split(device_microbatch.sections),
            correct_S.tensor_split(device_microbatch.sections),
        )
        for segment, own_S, own_correct_S in zip(device_microbatch.microbatch.segments, *parts, strict=True):
            if segment.job in self.objectives:
                yield self._split_samples(segment, device_microbatch, own_S, own_correct_S)
            else:
                yield _Scored(segment, SampleScores(own_S, ()), own_correct_S, [])

    def _logprobs(self, h_TD: Tensor, device_microbatch: DeviceMicrobatch) -> tuple[Tensor, Tensor]:
        assert self._head is not None, "only the last stage has a head"
        h_SD = h_TD.index_select(0, device_microbatch.rows_S)
        targets_S = device_microbatch.microbatch.targets_T.index_select(0, device_microbatch.rows_S)
        own = [self._own_rows(segment) for segment in device_microbatch.microbatch.segments]
        if not any(own):
            return target_logprobs(h_SD, targets_S, self._head)
        parts = (
            h_SD.tensor_split(device_microbatch.sections),
            targets_S.tensor_split(device_microbatch.sections),
        )
        found = [
            target_logprobs(h, targets, self._head, rows)
            for h, targets, rows in zip(*parts, own, strict=True)
        ]
        logprobs, correct = zip(*found, strict=True)
        return torch.cat(logprobs), torch.cat(correct)

    def _split_samples(
        self, segment: Segment, device_microbatch: DeviceMicrobatch, logprobs_S: Tensor, correct_S: Tensor
    ) -> _Scored:
        """Return a segment (the rows of one job) with its log-probabilities, the boundaries of its samples,
        and the samples' log-probabilities under the reference policy."""
        stops = list(accumulate(device_microbatch.microbatch.sample_lengths))
        spans = {
            index: (start, stop)
            for index, (start, stop) in enumerate(pairwise([0, *stops]))
            if segment.start <= start < segment.stop
        }
        counts = tuple(device_microbatch.count_supervised(start, stop) for start, stop in spans.values())
        own, references_S = slice(min(spans), max(spans) + 1), device_microbatch.microbatch.references_S
        references_B = None if references_S is None else references_S[own].to(logprobs_S.dtype)
        answers, desirable = (
            device_microbatch.microbatch.answer_tokens[own],
            device_microbatch.microbatch.desirable[own],
        )
        scores = SampleScores(logprobs_S, counts, answers, references_B, is_desirable=desirable)
        return _Scored(segment, scores, correct_S, _last_rows(segment, device_microbatch))


def _last_rows(segment: Segment, device_microbatch: DeviceMicrobatch) -> list[int]:
    """Return the index of the last row of each sample of a segment (the rows of one job). The last row of a
    sample may be followed by rows of padding."""
    spans = pairwise([0, *accumulate(device_microbatch.microbatch.sample_lengths)])
    return [min(stop, segment.stop) - 1 for start, stop in spans if segment.start <= start < segment.stop]
