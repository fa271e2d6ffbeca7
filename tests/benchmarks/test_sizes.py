from __future__ import annotations

import pytest
import torch

from weftune.bench.baselines import BaselineWork
from weftune.bench.gpu_step import rows
from weftune.bench.processes import ProcessTask
from weftune.bench.sizes import SIZES, base_bytes, build, build_frozen, floor_seconds, toy_size
from weftune.bench.timing import Repeats, bench_hardware

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


@pytest.mark.parametrize("shape", ["8b", "32b", "qwen3-8b", "phi-4-mini", "gemma-3-4b"])
def test_a_base_has_the_linears_of_its_size_and_is_frozen(shape: str) -> None:
    hardware, toy = bench_hardware(toy=True), toy_size(SIZES[shape])
    assert hardware is not None
    model = build(toy, hardware)
    assert model.config.model_type == toy.family
    linears = [module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = sorted((m.in_features, m.out_features) for m in linears if m is not model.lm_head)
    assert found == sorted(toy.sites * toy.layers)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("qwen3-8b", 8.19), ("phi-4-mini", 3.84), ("gemma-3-4b", 3.88), ("qwen3-30b-a3b", 30.53)],
)
def test_shapes_have_the_parameters_of_the_models_that_they_are_named_after(
    shape: str, billions: float
) -> None:
    size = SIZES[shape]
    model = build_frozen(size, torch.device("meta"), torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert base_bytes(size) == pytest.approx(2 * parameters, rel=1e-3)


def test_the_floor_of_a_mixture_is_that_of_the_experts_of_a_token() -> None:
    size = SIZES["qwen3-30b-a3b"]
    active = size.layers * sum(k * n for k, n in size.sites) + 2 * size.hidden * size.vocabulary
    assert active / 1e9 == pytest.approx(3.3, abs=0.05)


@pytest.mark.parametrize("shape", ["qwen3-8b", "phi-4-mini", "gemma-3-4b", "qwen3-30b-a3b"])
def test_jobs_train_on_a_toy_of_every_shape_beside_the_frozen_base_and_peft(shape: str) -> None:
    hardware = bench_hardware(toy=True)
    assert hardware is not None
    work = BaselineWork(jobs=2, batch=1, length=16, rank=4)
    task = ProcessTask(toy_size(SIZES[shape]), work, hardware, Repeats(1, 1, 1))
    made = list(rows(task, ["frozen", "peft-bf16"], rate=1e12))
    assert len(made) == 3
    assert all(row.measured.seconds for row in made)
