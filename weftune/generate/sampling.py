"""Selection of the next token of every sequence from its logits.

Random numbers are a pure function of a sequence's seed, the index of the new token and the token's id. So the
tokens of a sequence depend neither on the other sequences of a batch nor on the order of passes.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.batch import to_device
from weftune.errors import UserError
from weftune.ops.dropout import STRIDE, hash_bits, step_key, to_signed
from weftune.ops.fallback import run_with_fallback
from weftune.ops.sampling import Draw, sample_rows
from weftune.ops.triton import kernels_available


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The settings by which the next tokens of a sequence are sampled. The defaults decode greedily."""

    max_tokens: int = 128
    temperature: float = 0.0
    """Divisor of the logits. 0 selects the most probable token."""
    top_k: int = 0
    """Number of most probable tokens to choose from. 0 means all."""
    top_p: float = 1.0
    """Total probability of the smallest set of most probable tokens to choose from."""
    repetition_penalty: float = 1.0
    """Factor that makes tokens of the prompt or the completion less probable: positive logits are divided by
    the factor, and negative logits are multiplied by it."""
    presence_penalty: float = 0.0
    """Value subtracted from the logits of tokens that the completion contains."""
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence. The token that ends a sequence is part of the generated tokens."""
    prompt_logprobs: bool = False
    """Whether the log-probabilities of the prompt's tokens are computed."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0

    def __post_init__(self) -> None:
        bounds = {
            "max_tokens": self.max_tokens >= 1,
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
        }
        for name, holds in bounds.items():
            if not holds:
                raise UserError(f"{name} cannot be {getattr(self, name)}; see weftune generate --help.")


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row of logits, with the sampling settings and the earlier tokens of its sequence."""

    sampling: Sampling
    prompt: Sequence[int]
    completion: Sequence[int]


def sample_tokens(logits_BV: Tensor, rows: Sequence[SampledRow]) -> tuple[Tensor, Tensor]:
    """Return the next token of every sequence and its log-probability, both [B]. The log-probability is that
    of the model itself: temperature, penalties and truncation do not change it."""
    scores_BV = _apply_penalties(logits_BV, rows)
    has_kernel = logits_BV.dtype == torch.float32 and kernels_available(logits_BV)
    if not has_kernel or any(row.sampling.top_k for row in rows):
        return _sample_by_torch(scores_BV, logits_BV, rows)
    return run_with_fallback(
        "sampling", logits_BV.device, _sample_by_kernel, _sample_by_torch, scores_BV, logits_BV, rows
    )


def _sample_by_kernel(
    scores_BV: Tensor, logits_BV: Tensor, rows: Sequence[SampledRow]
) -> tuple[Tensor, Tensor]:
    draws = [Draw(row.sampling.temperature, row.sampling.top_p, _random_key(row)) for row in rows]
    return sample_rows(scores_BV, logits_BV, draws)


def _sample_by_torch(
    scores_BV: Tensor, logits_BV: Tensor, rows: Sequence[SampledRow]
) -> tuple[Tensor, Tensor]:
    if any(row.sampling.temperature for row in rows):
        scores_BV = _perturb_scores(_truncate_scores(scores_BV, rows), rows)
    tokens_B = scores_BV.argmax(dim=-1)
    own_B = logits_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B, own_B - logits_BV.logsumexp(dim=-1)


def _apply_penalties(logits_BV: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    used = [index for index, row in enumerate(rows) if row.sampling.has_penalties]
    if not used:
        return logits_BV
    scores_BV = logits_BV.clone()
    for index in used:
        row, scores_V = rows[index], scores_BV[index]
        seen = to_device(torch.tensor(sorted({*row.prompt, *row.completion})), scores_V.device)
        factor, own_s = row.sampling.repetition_penalty, scores_V[seen]
        scores_V[seen] = torch.where(own_s > 0, own_s / factor, own_s * factor)
        if row.completion and row.sampling.presence_penalty:
            said = to_device(torch.tensor(sorted(set(row.completion))), scores_V.device)
            scores_V[said] -= row.sampling.presence_penalty
    return scores_BV


def _truncate_scores(scores_BV: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Divide the scores of tokens by the sequences' temperatures, and set those of tokens outside top-k and
    top-p to -inf. The most probable token always remains, and so do tokens that tie with the least probable
    remaining one. Rows that decode greedily are unchanged."""
    settings = [row.sampling for row in rows]
    device, vocabulary = scores_BV.device, scores_BV.shape[1]
    temperature_B1 = _to_column([one.temperature or 1.0 for one in settings], device)
    scores_BV = scores_BV / temperature_B1
    if all(one.top_k == 0 and one.top_p == 1.0 for one in settings):
        return scores_BV
    sorted_BV = scores_BV.sort(dim=-1, descending=True).values
    top_k_B1 = _to_column([one.top_k or vocabulary for one in settings], device)
    is_kept_BV = torch.arange(vocabulary, device=device) < top_k_B1
    # As in transformers and vLLM, top-p counts the probabilities of what top-k has left.
    probability_BV = sorted_BV.masked_fill(~is_kept_BV, -torch.inf).softmax(dim=-1)
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    top_p_B1 = _to_column([one.top_p if one.top_p < 1.0 else 2.0 for one in settings], device)
    is_kept_BV &= before_BV < top_p_B1
    is_kept_BV[:, 0] = True
    last_B1 = sorted_BV.masked_fill(~is_kept_BV, torch.inf).amin(dim=-1, keepdim=True)
    return scores_BV.masked_fill(scores_BV < last_B1, -torch.inf)


def _perturb_scores(scores_BV: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Add Gumbel noise to the scores of tokens: the argmax of the result is then a sample of their softmax.
    Rows that decode greedily get no noise."""
    device = scores_BV.device
    keys = torch.tensor([_random_key(row) for row in rows], dtype=torch.int32)
    key_B1 = to_device(keys, device)[:, None]
    count_V = torch.arange(1, scores_BV.shape[1] + 1, dtype=torch.int32, device=device)
    bits_BV = hash_bits(count_V * to_signed(STRIDE) ^ key_B1)
    # Shifted arithmetically, the top 23 bits are a whole number from −2²² up to 2²² − 1. With 24 bits, the
    # largest would be rounded to 1 in float32, and its noise infinite.
    uniform_BV = ((bits_BV >> 9).to(scores_BV.dtype) + (2.0**22 + 0.5)) * 2.0**-23
    is_random_B1 = _to_column([float(row.sampling.temperature > 0) for row in rows], device) > 0
    return torch.where(is_random_B1, scores_BV - (-uniform_BV.log()).log(), scores_BV)


def _random_key(row: SampledRow) -> int:
    """Return the seed of the random numbers of a row. Rows that decode greedily need no random numbers."""
    if not row.sampling.temperature:
        return 0
    return to_signed(step_key(row.sampling.seed, len(row.completion)))


def _to_column(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values), device)[:, None]
