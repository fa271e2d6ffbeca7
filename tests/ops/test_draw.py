"""Drawn numbers hang on (seed, site, parameter, index) alone, and look uniform."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.ops.test_dropout import fmix32
from weftune.ops import draw
from weftune.ops.draw import fill_uniform, fill_uniform_batch, parameter_key

SITES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj")
COUNT = 1 << 20


def drawn(key, count=COUNT, start=0, bound=1.0, dtype=torch.float64, device="cpu"):
    value = torch.full((count,), math.nan, dtype=dtype, device=device)
    fill_uniform(value, key, bound, start)
    return value.cpu()


def test_a_number_is_the_top_24_bits_of_the_hash_of_its_index():
    """The rule written once more, in unsigned arithmetic."""
    key = parameter_key(7, SITES[0], "a_rK")
    bits = fmix32(np.arange(1, 5001, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(key))
    share = ((bits ^ np.uint32(1 << 31)) >> np.uint32(8)) / 2**24
    assert (drawn(key, 5000, bound=0.25).numpy() == (2 * share - 1) * 0.25).all()


@pytest.mark.parametrize("size", [1, 300, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_parameters_drawn_at_once_have_the_bits_of_each_by_itself(size, dtype, monkeypatch):
    keys = [parameter_key(7, f"site.{at}", "a_rK") for at in range(5)]
    # Three at a time of those of 300.
    monkeypatch.setattr(draw, "CPU_CHUNK", 1000)
    values = [torch.full((1, size), math.nan, dtype=dtype) for _ in keys]
    fill_uniform_batch(values, keys, 0.0221)
    for value, key in zip(values, keys, strict=True):
        assert torch.equal(value[0], drawn(key, size, bound=0.0221, dtype=dtype))


def test_hundreds_of_matrices_of_an_adapter_take_as_many_launches_as_one(monkeypatch):
    launched = []
    mixed = draw.hash_bits
    monkeypatch.setattr(draw, "hash_bits", lambda value: (launched.append(value.shape), mixed(value))[1])
    values = [torch.empty(4, 8) for _ in range(200)]
    fill_uniform_batch(values, list(range(200)), 1.0)
    assert launched == [(200, 32)]


@pytest.mark.gpu
def test_many_parameters_drawn_at_once_on_a_gpu_have_the_bits_of_a_cpu():
    keys = [parameter_key(7, f"site.{at}", "a_rK") for at in range(70)]
    for home in ("cuda", "cpu"):
        values = [torch.full((8, 2048), math.nan, device=home) for _ in keys]
        fill_uniform_batch(values, keys, 0.0221, draw_device=torch.device("cuda", 0))
        for value, key in zip(values, keys, strict=True):
            assert torch.equal(value.flatten().cpu(), drawn(key, 8 * 2048, bound=0.0221, dtype=torch.float32))


def test_known_numbers():
    """They may never change: the adapters of jobs that were not saved yet would."""
    key = parameter_key(7, SITES[0], "a_rK")
    assert key == 0x4310B729
    assert (drawn(key, 4) * 2**23).tolist() == [868369.0, 7088641.0, -2932136.0, -4754473.0]


@pytest.mark.parametrize(("start", "count"), [(0, 1), (17, 100), (1 << 16, 5), ((1 << 16) - 3, 200_000)])
def test_a_part_has_the_bits_that_the_whole_has(start, count):
    whole = drawn(99, 300_000)
    assert torch.equal(drawn(99, count, start), whole[start : start + count])


def test_how_many_are_drawn_at_a_time_changes_nothing(monkeypatch):
    whole = drawn(5, 100_000)
    monkeypatch.setattr(draw, "CPU_CHUNK", 777)
    assert torch.equal(drawn(5, 100_000), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_dtype_holds_the_same_numbers_rounded(dtype):
    assert torch.equal(drawn(3, 1000, bound=0.0221, dtype=dtype), drawn(3, 1000, bound=0.0221).to(dtype))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 3])
def test_numbers_are_uniform_between_the_bounds(seed):
    values = drawn(parameter_key(seed, SITES[0], "a_rK"), bound=0.5).numpy()
    assert values.min() >= -0.5
    assert values.max() < 0.5
    assert abs(values.mean()) < 5 * (1 / math.sqrt(12 * COUNT))
    assert abs(values.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / COUNT)
    steps = np.arange(1, COUNT + 1) / COUNT
    apart = np.abs(np.sort(values) + 0.5 - steps).max()
    assert apart < 1.95 / math.sqrt(COUNT), "Kolmogorov and Smirnov would see this once in a thousand times"


def test_every_bit_is_set_as_often_as_not_and_hangs_on_no_other():
    numbers = (drawn(parameter_key(0, SITES[0], "a_rK")) * 2**23).long() + (1 << 23)
    bits = ((numbers[:, None] >> torch.arange(24)) & 1).double() - 0.5
    limit = 5 / math.sqrt(COUNT)
    assert (2 * bits.mean(0)).abs().max() < limit
    together = 4 * bits.T @ bits / COUNT
    assert (together - torch.eye(24, dtype=torch.float64)).abs().max() < limit


def test_seeds_sites_and_parameters_are_uncorrelated_at_every_small_shift():
    keys = [
        parameter_key(seed, site, name)
        for seed in (0, 1, 1 << 32)
        for site in SITES
        for name in ("a_rK", "b")
    ]
    assert len(set(keys)) == len(keys)
    values = torch.stack([drawn(key, 1 << 17) for key in keys]) * math.sqrt(3)
    for shift in (0, 1, 2, 64, 2048):
        moved = values.roll(shift, dims=1)
        together = values @ moved.T / values.shape[1]
        if shift == 0:
            together.fill_diagonal_(0.0)
        assert together.abs().max() < 5.5 / math.sqrt(values.shape[1]), shift


def test_neighbours_do_not_lie_on_planes():
    """Triples of consecutive numbers fill a cube evenly: chi square over 8 × 8 × 8 cells."""
    values = drawn(parameter_key(0, SITES[0], "a_rK")).numpy()[: COUNT // 3 * 3].reshape(-1, 3)
    cells = ((values + 1) * 4).astype(int)
    counts = np.bincount(cells @ np.array([64, 8, 1]), minlength=512)
    wanted = len(values) / 512
    square = ((counts - wanted) ** 2 / wanted).sum()
    assert abs(square - 511) < 5 * math.sqrt(2 * 511)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits(monkeypatch):
    monkeypatch.setattr(draw, "CHUNK", 60_000)
    for dtype, count in itertools.product((torch.float32, torch.float64, torch.bfloat16), (1, 200_001)):
        here, there = (drawn(11, count, 5, 0.0221, dtype, device) for device in ("cpu", "cuda"))
        assert torch.equal(here, there)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_for_a_parameter_in_host_memory():
    value = torch.full((200_001,), math.nan)
    fill_uniform(value, 11, 0.0221, start=5, draw_device=torch.device("cuda", 0))
    assert torch.equal(value, drawn(11, len(value), 5, 0.0221, torch.float32))


def test_a_parameter_of_more_numbers_than_can_be_counted_is_a_bug():
    value = torch.empty(3)
    fill_uniform(value, 1, 1.0)
    assert torch.equal(value, drawn(1, 3, start=0, dtype=torch.float32))
    fill_uniform(value, 1, 1.0, start=(1 << 31) - 4)
    with pytest.raises(AssertionError, match="fewer than"):
        fill_uniform(value, 1, 1.0, start=(1 << 31) - 3)
