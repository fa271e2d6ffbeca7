"""The values that adapters start from, and the matrices that jobs of one kind share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import bench
from weftune.adapters.bottleneck.spec import DOWN, BottleneckSpec
from weftune.adapters.kind import JobAdapter
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.adapters.registry import get_kind
from weftune.adapters.vera.spec import VeraSpec
from weftune.core.shapes import SiteShape
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training

WIDE = (
    SiteShape("model.layers.0.q_proj", 8, 8),
    SiteShape("model.layers.0.up_proj", 8, 24),
    SiteShape("model.layers.1.q_proj", 16, 16),
)
VERA = VeraSpec(rank=2, targets=("q_proj",), layers=0)


@pytest.mark.parametrize(
    "change", [{"rank": 3}, {"projection_prng_key": 1}, {"targets": ("up_proj",)}, {"layers": (0, 1)}]
)
def test_vera_jobs_with_other_matrices_do_not_share_them(change):
    kind, like, other = get_kind("vera"), torch.zeros(()), replace(VERA, **change)
    mine, theirs = (kind.constants(spec, WIDE, like) for spec in (VERA, other))
    assert any(not torch.equal(value, theirs[name]) for name, value in mine.items())
    assert kind.constants_key(other) != kind.constants_key(VERA)


def test_vera_jobs_that_differ_in_what_they_train_share_their_matrices():
    kind = get_kind("vera")
    assert kind.constants_key(replace(VERA, d_initial=0.5, dropout=0.1)) == kind.constants_key(VERA)


def started(spec, family="llama"):
    base = bench.base(family)
    adapter = JobAdapter("a", spec, seed=3)
    training = new_training(adapter, Recipe(1), base.shape.sites, base.dtype, bench.CPU)
    return training.layout.parameter_views(training.master)


def test_the_first_matrix_of_a_bottleneck_fills_the_bounds_of_a_linear_of_torch_and_the_rest_is_zero():
    for (_, name), value in started(BottleneckSpec(size=5)).items():
        bound = value.shape[-1] ** -0.5
        if name == DOWN:
            assert 0.9 * bound < value.abs().max() <= bound
        else:
            assert not value.any()


def test_no_two_keys_or_values_of_a_prefix_start_alike():
    values = list(started(PrefixSpec(num_virtual_tokens=3)).values())
    assert len(values) == 4, "keys and values of two layers"
    assert len({tuple(value.flatten().tolist()) for value in values}) == 4
    assert torch.cat(values).std() == pytest.approx(1.0, abs=0.25)
