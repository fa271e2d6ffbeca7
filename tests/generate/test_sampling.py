"""The next token: truncation and penalties beside transformers, frequencies beside the softmax."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weftune.errors import UserError
from weftune.generate.sampling import SampledRow, Sampling, sample_tokens

VOCABULARY = 50
LOGITS = 2.0 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))


def drawn(sampling: Sampling, logits_V: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens of `count` sequences with the same logits, each with its own seed, [count]."""
    rows = [SampledRow(Sampling(**settings(sampling), seed=seed), (1,), ()) for seed in range(count)]
    return sample_tokens(logits_V.expand(count, -1), rows)[0]


def settings(sampling: Sampling) -> dict:
    names = ("temperature", "top_k", "top_p")
    return {name: getattr(sampling, name) for name in names}


def test_frequencies_are_the_softmax_of_the_logits_over_the_temperature():
    count = 40_000
    tokens = drawn(Sampling(temperature=0.7), LOGITS[0], count)
    expected_V = (LOGITS[0] / 0.7).softmax(-1)
    got_V = torch.bincount(tokens, minlength=VOCABULARY) / count
    error_V = (expected_V * (1 - expected_V) / count).sqrt()
    assert ((got_V - expected_V).abs() < 5 * error_V + 1e-4).all()


@pytest.mark.parametrize(
    "chosen", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 7, "top_p": 0.8}, {"top_p": 1e-6}]
)
def test_only_the_tokens_that_transformers_leaves_are_drawn(chosen):
    left_1V = LOGITS[1:2] / 1.3
    if "top_k" in chosen:
        left_1V = TopKLogitsWarper(chosen["top_k"])(None, left_1V)
    if "top_p" in chosen:
        left_1V = TopPLogitsWarper(chosen["top_p"])(None, left_1V)
    expected = set(left_1V[0].isfinite().nonzero().squeeze(1).tolist())
    assert set(drawn(Sampling(temperature=1.3, **chosen), LOGITS[1], 4000).tolist()) == expected


def test_a_repetition_penalty_is_that_of_transformers_and_a_presence_penalty_a_difference():
    prompt, completion = (3, 4, 9), (int(LOGITS[2].argmax()), 9)
    ids_1T = torch.tensor([[*prompt, *completion]])
    expected = RepetitionPenaltyLogitsProcessor(5.0)(ids_1T, LOGITS[2:3].clone()).argmax(-1)
    assert expected.item() != completion[0]
    row = SampledRow(Sampling(repetition_penalty=5.0), prompt, completion)
    assert sample_tokens(LOGITS[2:3], [row])[0].tolist() == expected.tolist()
    penalised_V = LOGITS[2].clone()
    penalised_V[list(completion)] -= 100.0
    row = SampledRow(Sampling(presence_penalty=100.0), prompt, completion)
    assert sample_tokens(LOGITS[2:3], [row])[0].item() == penalised_V.argmax().item()


def test_rows_of_a_batch_do_not_change_one_another():
    choices = [
        Sampling(),
        Sampling(temperature=1.1, seed=3),
        Sampling(temperature=0.8, top_k=9, seed=4),
        Sampling(temperature=0.9, top_p=0.7, repetition_penalty=1.4, presence_penalty=0.5, seed=5),
    ]
    rows = [SampledRow(sampling, (1, 2), (5, 7)) for sampling in choices]
    tokens_B, logprobs_B = sample_tokens(LOGITS, rows)
    for index, row in enumerate(rows):
        token, logprob = sample_tokens(LOGITS[index : index + 1], [row])
        assert (token.item(), logprob.item()) == (tokens_B[index].item(), logprobs_B[index].item())
    assert torch.allclose(
        logprobs_B, LOGITS.log_softmax(-1).gather(1, tokens_B[:, None]).squeeze(1), atol=1e-6
    )


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"temperature": -1.0}, {"max_tokens": 0}, {"top_k": -1}])
def test_a_setting_out_of_bounds_is_a_sentence(wrong):
    with pytest.raises(UserError, match=f"{next(iter(wrong))} cannot be"):
        Sampling(**wrong)
