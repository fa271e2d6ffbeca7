"""Mixtures of experts: several jobs at once equal solo PEFT, and nobody's tokens are routed otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import bench, oracle
from tests.adapters.aboard import attach, empty_banks, together, weights_of
from tests.base.packs import random_samples
from tests.families import MIXTURES, tiny
from weftune import JobSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.routing import Routing
from weftune.ops.lora.routes import Route

STEPS = 12
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def jobs(family, dtype, folder):
    """Two that differ in rank, targets, batches and data; by default an adapter is on all of attention."""
    model = tiny(family, dtype)
    made = []
    for index, (rank, targets) in enumerate([(4, None), (6, ["q_proj", "v_proj"])]):
        config = oracle.lora_config(model, rank, 12.0, targets or ATTENTION)
        start = oracle.write_start(folder / f"start{index}", model, config, seed=index, b_scale=0.05)
        made.append((config, start, bench.samples(19, seed=index), targets))
    return made


def spec(index, made):
    config, start, samples, targets = made
    named = {} if targets is None else {"targets": targets}
    return JobSpec(
        name=f"job{index}",
        data=bench.rows(samples),
        adapter=dict(rank=config.r, alpha=12.0, init_from=str(start), **named),
        steps=STEPS,
        batch_size=3 + index,
        learning_rate=1e-3,
        seed=index,
    )


def by_peft(family, dtype, index, made, padded=True):
    config, start, samples, _ = made
    batches = bench.batches(samples, 3 + index, index, STEPS)
    recipe = oracle.Recipe(STEPS)
    return oracle.train_with_peft(tiny(family, dtype), config, start, batches, recipe, padded)


@pytest.mark.parametrize("family", MIXTURES)
def test_two_jobs_on_attention_equal_solo_peft_in_float64(family, tmp_path):
    made = jobs(family, torch.float64, tmp_path)
    bench.train(
        bench.base(family), tmp_path / "out", [spec(i, one) for i, one in enumerate(made)], capacity=64
    )
    for index, one in enumerate(made):
        got = bench.trained(tmp_path / "out", f"job{index}", bench.adapter(one[1]))
        oracle.assert_equal_float64(got, by_peft(family, torch.float64, index, one))


@pytest.mark.parametrize("family", MIXTURES)
def test_two_jobs_on_attention_equal_solo_peft_in_float32(family, tmp_path):
    """Here products are grouped by torch."""
    made = jobs(family, torch.float32, tmp_path)
    base = bench.base(family, torch.float32)
    assert base.model.config._experts_implementation == "grouped_mm"
    bench.train(base, tmp_path / "out", [spec(i, one) for i, one in enumerate(made)], capacity=64)
    for index, one in enumerate(made):
        got = bench.trained(tmp_path / "out", f"job{index}", bench.adapter(one[1]))
        runs = [by_peft(family, torch.float32, index, one, padded) for padded in (True, False)]
        oracle.assert_equal_float32(
            got, *runs, by_peft(family, torch.float64, index, one), floor=oracle.FLIPPED
        )


@pytest.mark.parametrize("family", MIXTURES)
def test_who_else_is_in_the_microbatch_changes_nobodys_experts(family):
    base, samples = bench.base(family), random_samples((9, 5, 12))
    banks = empty_banks(base)
    for seed, job in enumerate("abc"):
        lora = LoraSpec(rank=2 + seed)
        attach(banks, base, job, lora, torch.randn_like(weights_of(base, job, lora)) * 0.2)
    packed = decisions(base, banks, together("abc", samples))
    alone = [decisions(base, banks, together(job, [one])) for job, one in zip("abc", samples, strict=True)]
    assert len(packed) == 2, "one of every layer"
    for layer, mixed in enumerate(packed):
        for number, part in enumerate(zip(*(one[layer] for one in alone), strict=True)):
            if number == 2:
                assert torch.equal(mixed[number], torch.cat(part)), "the numbers of the experts"
            torch.testing.assert_close(
                mixed[number].double(), torch.cat(part).double(), rtol=1e-12, atol=1e-12
            )


def decisions(base, banks, microbatch):
    routing = Routing(base.model)
    with routing.recorded(), torch.no_grad(), banks.bound(microbatch, Route.segmented, training=False):
        base.hidden(microbatch)
    return [made for (made,) in routing._made.values()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_nan_of_one_job_reaches_nobody_who_shares_its_experts(family, dtype):
    base, samples = bench.base(family, dtype), random_samples((9, 5, 12))
    microbatch = together("abc", samples)
    wanted = gradients(base, microbatch, spoilt=None)
    got = gradients(base, microbatch, spoilt="b")
    assert bool(got["b"].isnan().any())
    for job in "ac":
        assert bool(wanted[job].norm() > 0)
        torch.testing.assert_close(
            got[job], wanted[job], rtol=0.0, atol=1e-6 if dtype is torch.float32 else 1e-12
        )


def gradients(base, microbatch, spoilt, **asked):
    banks = empty_banks(base)
    for job in "abc":
        lora = LoraSpec(rank=3, **asked)
        generator = torch.Generator().manual_seed(ord(job))
        weights = torch.randn(weights_of(base, job, lora).shape, generator=generator).to(base.dtype) * 0.2
        attach(banks, base, job, lora, weights.fill_(torch.nan) if job == spoilt else weights)
    try:
        with banks.bound(microbatch, Route.segmented, training=True):
            h_TD = base.hidden(replace(microbatch))
            (h_TD * torch.linspace(-1, 1, h_TD.numel()).view_as(h_TD)).sum().backward()
        return {job: banks.aboard[job].gradient.clone() for job in "abc"}
    finally:
        banks.unweave()
