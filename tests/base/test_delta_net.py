"""Linear attention in a pack: samples do not see one another, in either direction of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tests.base.packs import base_of, packed, random_samples
from tests.families import config, randomised
from weftune.base import model as base_model
from weftune.base.check import use_attention
from weftune.base.delta_net import group_by_chunk_count
from weftune.core.deterministic import deterministic_kernels
from weftune.errors import BaseModelError

LENGTHS = (5, 64, 1, 70, 63, 130, 2)
"""Below, at and beyond the chunk that the recurrence takes at a time."""


def with_long_context() -> PreTrainedModel:
    shape = config("qwen3_5")
    shape.max_position_embeddings = 256
    return randomised(shape, torch.float32)


def test_packed_samples_give_the_logits_of_separate_ones() -> None:
    base, samples = base_of(with_long_context()), random_samples(LENGTHS)
    got = base.head().logits(base.hidden(packed(samples))).split(LENGTHS)
    with torch.no_grad(), use_attention(base.model, "sdpa"):
        for mine, tokens_L in zip(got, samples, strict=True):
            want = base.model(tokens_L[None], use_cache=False).logits[0]
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


def test_gradients_of_packed_samples_are_those_of_separate_ones() -> None:
    """Of the embedding, where every layer's part arrives; the loss weighs every row another way."""
    base, samples = base_of(with_long_context()), random_samples(LENGTHS)
    embedding = base.model.get_input_embeddings().weight.requires_grad_()
    rows = sum(LENGTHS)
    weigh_TD = torch.randn(rows, base.shape.hidden, generator=torch.Generator().manual_seed(1))
    (base.hidden(packed(samples)) * weigh_TD).sum().backward()
    got, embedding.grad = embedding.grad, None
    with use_attention(base.model, "sdpa"):
        for tokens_L, weigh_LD in zip(samples, weigh_TD.split(LENGTHS), strict=True):
            hidden_LD = base.model.base_model(tokens_L[None], use_cache=False).last_hidden_state[0]
            (hidden_LD * weigh_LD).sum().backward()
    assert (got - embedding.grad).norm() <= 1e-5 * embedding.grad.norm()


class FloatSums(TorchDispatchMode):
    """Counts running sums of floats, which torch refuses on a GPU where it is to be deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cumsum.default and args[0].is_floating_point()
        return func(*args, **kwargs or {})


def gradient_and_sums(packs: bool) -> tuple[torch.Tensor, int]:
    """Of the embedding; by packed samples, or by transformers' own forward over one."""
    base, samples = base_of(with_long_context()), random_samples((70, 70))
    embedding = base.model.get_input_embeddings().weight.requires_grad_()
    with FloatSums() as sums:
        if packs:
            base.hidden(packed(samples)).square().sum().backward()
        else:
            with use_attention(base.model, "sdpa"):
                base.model.base_model(samples[0][None], use_cache=False)[0].square().sum().backward()
    assert embedding.grad is not None
    return embedding.grad, sums.count


@pytest.mark.parametrize("packs", [True, False])
def test_deterministic_passes_make_no_running_sum_of_floats(packs: bool) -> None:
    usual, some = gradient_and_sums(packs)
    with deterministic_kernels():
        strict, none = gradient_and_sums(packs)
    assert (some > 0, none) == (True, 0)
    assert (strict - usual).norm() <= 1e-5 * usual.norm()


def test_a_nan_in_one_sample_reaches_no_other() -> None:
    base, samples = base_of(with_long_context()), random_samples(LENGTHS)
    samples = [tokens_L.clamp(max=90) for tokens_L in samples]
    want = base.hidden(packed(samples)).split(LENGTHS)
    samples[3][10] = 95
    with torch.no_grad():
        base.model.get_input_embeddings().weight[95] = torch.nan
    got = base.hidden(packed(samples)).split(LENGTHS)
    assert got[3][10:].isnan().all()
    for number in set(range(len(LENGTHS))) - {3}:
        assert torch.equal(got[number], want[number])


def test_the_check_at_load_notices_a_state_that_flows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "separate_samples", lambda _model: None)
    with pytest.raises(BaseModelError, match="computes something else when samples are packed together"):
        base_of(with_long_context())


def test_samples_of_equally_many_chunks_go_together() -> None:
    assert group_by_chunk_count((5, 64, 65, 1, 129, 128)) == [[0, 1, 3], [2, 5], [4]]
