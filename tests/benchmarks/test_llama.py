from __future__ import annotations

import pytest
import torch

from weftune.bench.llama import SIZES, build, floor_seconds
from weftune.bench.timing import here

TOY = SIZES["toy"]


def test_the_floor_of_the_8b_shape_is_the_one_that_was_reckoned_before() -> None:
    """8 × 1024 tokens at 787 TFLOP/s: 316 ms bare, 331 ms with attention, adapters on top."""
    lengths = [1024] * 8
    bare, whole = (floor_seconds(SIZES["8b"], 787e12, lengths, rank) for rank in (0, 16))
    assert 0.316 < bare < 0.331
    assert whole / bare == pytest.approx(1 + 1.5 * 16 * (81920 / 218103808), rel=0.1)


def test_the_floor_counts_the_attention_within_samples_only() -> None:
    apart, together = floor_seconds(TOY, 1.0, [8, 8], 0), floor_seconds(TOY, 1.0, [16], 0)
    assert together - apart == 3.5 * 2 * TOY.layers * TOY.hidden * (16**2 - 2 * 8**2)


def test_a_base_has_the_linears_of_its_size_and_is_frozen() -> None:
    place = here(toy=True)
    assert place is not None
    model = build(TOY, place)
    linears = [module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = sorted((m.in_features, m.out_features) for m in linears if m is not model.lm_head)
    assert found == sorted(TOY.sites * TOY.layers)
    assert not any(parameter.requires_grad for parameter in model.parameters())
