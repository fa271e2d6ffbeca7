"""The kernel that chooses tokens, in Triton's interpreter or on a GPU, beside plain torch."""

from __future__ import annotations

import pytest
import torch

from weftune.generate import sampling as by_torch
from weftune.generate.sampling import SampledRow, Sampling, sample_tokens

VOCABULARY = 2100
SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "a narrow top-p": {"temperature": 1.2, "top_p": 1e-6},
    "a wide top-p": {"temperature": 1.5, "top_p": 0.999},
    "penalties": {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5},
}
COUNT = 4
"""Sequences with each of the settings."""


def logits(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3.0 * torch.randn(COUNT, VOCABULARY, generator=generator).to(device)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_log_probabilities_are_those_of_torch(name, device):
    rows = [SampledRow(Sampling(**SETTINGS[name], seed=seed), (1, 2), (5,) * seed) for seed in range(COUNT)]
    logits_BV = logits(device)
    tokens_B, logprobs_B = sample_tokens(logits_BV, rows)
    scores_BV = by_torch._apply_penalties(logits_BV, rows)
    expected_B, expected_logprobs_B = by_torch._sample_by_torch(scores_BV, logits_BV, rows)
    assert tokens_B.tolist() == expected_B.tolist()
    assert torch.allclose(logprobs_B, expected_logprobs_B, atol=1e-5)


def test_exactly_the_tokens_of_top_p_are_drawn_with_all_that_are_as_probable_as_the_last(device):
    logits_V = torch.tensor([0.6, -9.0, 0.8, 1.0, 0.7, 0.7, float("-inf")])
    for top_p, count, expected in ((0.4, 12, {2, 3}), (0.5, 16, {2, 3, 4, 5})):
        rows = [row_of(top_p, seed) for seed in range(count)]
        drawn = sample_tokens(logits_V.to(device).expand(count, -1), rows)[0]
        assert set(drawn.tolist()) == expected
        kept_V = by_torch._truncate_scores(logits_V[None], rows[:1])[0].isfinite()
        assert set(kept_V.nonzero().squeeze(1).tolist()) == expected


def row_of(top_p: float, seed: int) -> SampledRow:
    return SampledRow(Sampling(temperature=1.0, top_p=top_p, seed=seed), (1,), ())
