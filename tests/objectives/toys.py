"""Toy objectives, and microbatches of samples that are scored by one adapter or another.

Shapes: S supervised rows of a segment, B samples, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.base.packs import CPU
from weftune.core.batch import IGNORED, OWN_ADAPTER, Microbatch, Segment
from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.run.passes.rows import DeviceMicrobatch, to_device_microbatch


@dataclass(frozen=True)
class Sample:
    """Of a job's global batch: the tokens, and how many tokens of the batch stand before them."""

    tokens_L: Tensor
    offset: int

    @property
    def targets_L(self) -> Tensor:
        """All but the first three tokens are supervised."""
        targets = self.tokens_L.roll(-1)
        targets[:2] = targets[-1] = IGNORED
        return targets


def global_batch(lengths: Sequence[int], seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 97, (length,), generator=generator) for length in lengths]
    return [Sample(tokens, sum(lengths[:number])) for number, tokens in enumerate(drawn)]


def microbatch(
    parts: Sequence[tuple[str, Sequence[Sample]]],
    adapter: str | None = OWN_ADAPTER,
    references_S: Tensor | None = None,
) -> DeviceMicrobatch:
    """(job, samples) in one microbatch, all of step 1, through the adapter of their own jobs or another."""
    segments, lengths, row = [], [], 0
    for job, samples in parts:
        lengths += [len(sample.tokens_L) for sample in samples]
        stop = row + sum(len(sample.tokens_L) for sample in samples)
        segments.append(Segment(job, 1, row, stop, adapter))
        row = stop
    every = [sample for _, samples in parts for sample in samples]
    positions = [torch.arange(length) for length in lengths]
    made = Microbatch(
        tokens_T=torch.cat([sample.tokens_L for sample in every]),
        positions_T=torch.cat(positions),
        targets_T=torch.cat([sample.targets_L for sample in every]),
        token_index_T=torch.cat([s.offset + p for s, p in zip(every, positions, strict=True)]),
        sample_lengths=tuple(lengths),
        segments=tuple(segments),
        references_S=references_S,
    )
    return to_device_microbatch(made, made.rows, CPU)


class Preference:
    """The first sample of each pair is preferred, more than the reference policy prefers it."""

    needs = Needs(group_size=2, reference=True)

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        return self._total(scores) / (batch.samples // 2)

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        wins = self._gaps(scores) > 0
        return HeldOutSums(self._total(scores), len(wins))

    def metrics(self, scores: SampleScores) -> Tensor:
        """Return the number of pairs whose first sample is preferred."""
        return (self._gaps(scores) > 0).sum()[None]

    def _total(self, scores: SampleScores) -> Tensor:
        return -logsigmoid(0.3 * self._gaps(scores)).sum()

    def _gaps(self, scores: SampleScores) -> Tensor:
        assert scores.references_B is not None
        margin_B = scores.logprob_sums() - scores.references_B
        return margin_B[0::2] - margin_B[1::2]


class Value:
    """The scalar head is to say how long a sample is."""

    needs = Needs(scalar_head=True)

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        assert scores.values_B is not None
        return (scores.values_B - torch.tensor(scores.counts)).pow(2).sum() / batch.samples

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        raise NotImplementedError

    def metrics(self, scores: SampleScores) -> None:
        return None


# -- the oracle ----------------------------------------------------------------------------------------------


def plain_sums(model: Callable[..., object], samples: Sequence[Sample]) -> Tensor:
    """The log-probability of each sample's supervised tokens, one sample at a time."""
    sums = []
    for sample in samples:
        logits_LV = model(input_ids=sample.tokens_L[None]).logits[0]  # type: ignore[attr-defined]
        wanted = sample.targets_L != IGNORED
        chosen = logits_LV.log_softmax(-1)[wanted, sample.targets_L[wanted]]
        sums.append(chosen.sum())
    return torch.stack(sums)
