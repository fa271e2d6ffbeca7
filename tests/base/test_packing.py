"""Packed samples against plain transformers, family by family, in float64.

Shapes: T rows of the pack, L rows of one sample, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.base.packs import LENGTHS, base_of, packed, random_samples
from tests.families import EVERY, MIXTURES, WINDOW, config, tiny
from weftune.base.model import Base

EXACT = {"rtol": 0.0, "atol": 1e-10}


@contextmanager
def embeddings_through(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run with the token embeddings replaced by what `change` makes of them."""
    hook = model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: change(out))
    try:
        yield
    finally:
        hook.remove()


def gradient_at_embeddings(model: PreTrainedModel, run: Callable[[], Tensor], weight_TV: Tensor) -> Tensor:
    leaves: list[Tensor] = []

    def leaf(embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    with embeddings_through(model, leaf):
        (run() * weight_TV).sum().backward()
    gradient = leaves[0].grad
    assert gradient is not None
    return gradient[0]


@pytest.mark.parametrize("family", EVERY)
def test_packed_logits_equal_separate_forwards(family: str) -> None:
    plain, base = tiny(family), base_of(tiny(family))
    samples = random_samples()
    logits_TV = base.head().logits(base.hidden(packed(samples)))
    with torch.no_grad():
        expected = torch.cat([plain(tokens_L[None]).logits[0] for tokens_L in samples])
    torch.testing.assert_close(logits_TV, expected, **EXACT)
    assert expected.std() > 0.1, "a model without spread proves nothing"


@pytest.mark.parametrize("family", EVERY)
def test_packed_gradients_equal_separate_backwards(family: str) -> None:
    plain, base = tiny(family).requires_grad_(False), base_of(tiny(family))
    samples = random_samples()
    microbatch = packed(samples)
    weight_TV = torch.randn(sum(LENGTHS), base.shape.vocabulary, dtype=torch.float64)
    gradient_TD = gradient_at_embeddings(
        base.model, lambda: base.head().logits(base.hidden(microbatch)), weight_TV
    )
    expected = torch.cat(
        [
            gradient_at_embeddings(
                plain, lambda tokens_L=tokens_L: plain(tokens_L[None]).logits[0], weight_LV
            )
            for tokens_L, weight_LV in zip(samples, weight_TV.split(LENGTHS), strict=True)
        ]
    )
    torch.testing.assert_close(gradient_TD, expected, **EXACT)


def assert_a_nan_stays_in_its_sample(base: Base, rtol: float = 0.0, atol: float = 0.0) -> None:
    microbatch = packed(random_samples()).to(base.device)
    start, stop = LENGTHS[0], LENGTHS[0] + LENGTHS[1]

    def poisoned(embedded: Tensor) -> Tensor:
        embedded = embedded.clone()
        embedded[0, start:stop] = torch.nan
        return embedded

    healthy_TD = base.hidden(microbatch)
    with embeddings_through(base.model, poisoned):
        sick_TD = base.hidden(microbatch)
    assert sick_TD[start:stop].isnan().all()
    torch.testing.assert_close(sick_TD[:start], healthy_TD[:start], rtol=rtol, atol=atol)
    torch.testing.assert_close(sick_TD[stop:], healthy_TD[stop:], rtol=rtol, atol=atol)


@pytest.mark.parametrize("family", EVERY)
def test_a_nan_in_one_sample_does_not_reach_the_others(family: str) -> None:
    assert_a_nan_stays_in_its_sample(base_of(tiny(family)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", EVERY)
def test_a_nan_in_one_sample_does_not_reach_the_others_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    base = base_of(tiny(family, dtype), device=torch.device("cuda", 0))
    # An expert has other rows when those of the sick sample go elsewhere, and a GPU's library sums otherwise.
    close = {"rtol": 1e-4, "atol": 1e-5} if family in MIXTURES else {}
    assert_a_nan_stays_in_its_sample(base, **close)


@pytest.mark.parametrize("family", EVERY)
def test_a_sample_does_not_depend_on_its_place_or_neighbours(family: str) -> None:
    base = base_of(tiny(family))
    first, second, third = random_samples((9, 13, 4))
    here_TD = base.hidden(packed([first, second, third]))[9:22]
    there_TD = base.hidden(packed([second, first]))[:13]
    torch.testing.assert_close(here_TD, there_TD, **EXACT)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_the_sliding_window_changes_what_long_samples_see(family: str) -> None:
    """Otherwise the families above would prove nothing about windows."""
    assert max(LENGTHS) > WINDOW == config(family).sliding_window
    windowed, unbounded = base_of(tiny(family)), tiny(family)
    for module in unbounded.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 64
    unbounded.config.sliding_window = 64
    [sample] = random_samples((13,))
    near_LD = windowed.hidden(packed([sample]))
    far_LD = base_of(unbounded).hidden(packed([sample]))
    torch.testing.assert_close(near_LD[:WINDOW], far_LD[:WINDOW], **EXACT)
    assert (near_LD[-1] - far_LD[-1]).abs().max() > 1e-3


def test_the_final_softcap_bounds_the_logits() -> None:
    base = base_of(tiny("gemma3"))
    head = base.head()
    assert head.softcap == 2.0
    logits_TV = head.logits(base.hidden(packed(random_samples())))
    assert 1.0 < logits_TV.abs().max() < 2.0


@pytest.mark.parametrize("family", EVERY)
def test_no_pass_asks_the_device_where_samples_begin(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that waits for an answer in every pass cannot lay out the next while the device computes."""

    def asked(*_: object) -> None:
        raise AssertionError("transformers looks for packed samples by itself")

    base = base_of(tiny(family))
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", asked)
    assert base.hidden(packed(random_samples(LENGTHS))).isfinite().all()
