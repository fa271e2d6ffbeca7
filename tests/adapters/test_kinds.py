"""Several kinds in one microbatch: each job computes, and learns, what it would alone in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.adapters.attached_banks import attach, empty_banks, together
from tests.adapters.toys import GateSpec, TiedSpec, plain_model, toys  # noqa: F401 (a fixture)
from tests.base.packs import random_samples
from tests.bench import base as tiny_base
from tests.interpreter import interpret
from weftune.adapters.banks import Banks
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.adapters.tiled import TiledBank
from weftune.errors import AdapterError
from weftune.ops.lora.routes import Route

EVERY = {"gpt2": ("c_attn", "c_proj", "c_fc"), "qwen2": ("proj",), "llama": ("proj",)}
EXACT = 1e-9


def all_kinds(family):
    every = EVERY[family]
    return {
        "lora": LoraSpec(rank=3, alpha=6.0),
        "gate": GateSpec(every),
        "tied": TiedSpec(every),
        "gate-and-bias": GateSpec(every, scales_bias=True),
        "few": LoraSpec(rank=2, alpha=2.0, targets=("q_proj", "c_attn")),
    }


def drawn(base, spec, seed):
    """Weights near one, so that a gate shuts nothing."""
    size = get_kind(spec.kind).layout(spec, base.shape.sites).size
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=base.dtype)
    return noise * 0.2 + (0.0 if spec.kind == "lora" else 0.7)


def gradients(base, banks, microbatch, route):
    """Logits, and the gradient of every job aboard, of one pass whose loss is the sum over all rows."""
    with banks.bind(microbatch, route, training=True):
        logits_TV = base.head().logits(base.hidden(microbatch))
        logits_TV.pow(2).mean(dim=1).sum().backward()
    return logits_TV.detach(), {job: attached.gradient.clone() for job, attached in banks.attached.items()}


def alone(family, adapter, weights, tokens_L):
    flat = weights.clone().requires_grad_()
    logits_LV = plain_model(family, adapter, flat, weights.dtype)(input_ids=tokens_L[None]).logits[0]
    logits_LV.pow(2).mean(dim=1).sum().backward()
    return logits_LV.detach(), flat.grad


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_kinds_that_add_and_kinds_that_scale_share_a_site_on_every_route(family, route):
    base = tiny_base(family)
    specs, banks = all_kinds(family), empty_banks(base)
    weights = {job: drawn(base, spec, seed) for seed, (job, spec) in enumerate(specs.items())}
    for job, spec in specs.items():
        attach(banks, base, job, spec, weights[job])
    samples = random_samples((5, 8, 3, 6, 7))
    microbatch = together([*specs], samples)
    logits_TV, found = gradients(base, banks, microbatch, route)
    for job, got, tokens in zip(specs, logits_TV.split(microbatch.sample_lengths), samples, strict=True):
        want, gradient = alone(family, JobAdapter(job, specs[job], 0), weights[job], tokens)
        torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
        assert (found[job] - gradient).norm() <= EXACT * gradient.norm()
        assert gradient.norm() > 1e-2


@pytest.mark.usefixtures("toys")
def test_where_lora_is_alone_in_a_microbatch_its_kernels_run_though_others_are_aboard(monkeypatch):
    interpret(monkeypatch)
    base = tiny_base("llama", torch.float32)
    banks, name = empty_banks(base), "model.layers.1.self_attn.k_proj"
    for job in ("lora", "gate"):
        spec = all_kinds("llama")[job]
        attach(banks, base, job, spec, drawn(base, spec, 0))
    kernels = []
    linear = TiledBank.linear
    monkeypatch.setattr(TiledBank, "linear", lambda *given: kernels.append(given) or linear(*given))
    x_TK, samples = torch.randn(7, 32), random_samples((4, 3))
    for jobs, expected in ((("lora", "nobody"), 1), (("lora", "gate"), 1), (("nobody", "gate"), 1)):
        with banks.bind(together(jobs, samples), Route.tiled, training=False), torch.no_grad():
            banks.linear(name)(x_TK, None)
        assert len(kernels) == expected


@pytest.mark.usefixtures("toys")
def test_a_captured_pass_refuses_rows_of_a_kind_without_kernels_and_no_others():
    base = tiny_base("llama")
    specs, banks = all_kinds("llama"), empty_banks(base)
    limits = []
    for job in ("lora", "gate"):
        attach(banks, base, job, specs[job], drawn(base, specs[job], 0))
        limits.append(banks.limits())
    samples = random_samples((4, 3))
    assert banks.is_capturable(together(["lora", "stranger"], samples))
    assert not banks.is_capturable(together(["lora", "gate"], samples))
    # Who has no kernels changes nothing for the passes that are captured.
    assert limits[0] == limits[1]


@pytest.mark.usefixtures("toys")
def test_sites_that_share_their_input_are_scaled_each_by_itself():
    """A group of sites, as fused layers have them: its outputs stand side by side, the residual is added."""
    base = tiny_base("qwen2")
    stem = "model.layers.0.self_attn"
    names = tuple(f"{stem}.{end}_proj" for end in "qkv")
    banks = Banks(base.sites(), base.shape.sites, next(base.model.parameters()), [names])
    gate, lora = GateSpec(("k_proj", "v_proj")), LoraSpec(rank=2, targets=("q_proj", "v_proj"))
    specs = {"gate": gate, "lora": lora}
    weights = {job: drawn(base, spec, seed) for seed, (job, spec) in enumerate(specs.items())}
    for job, spec in specs.items():
        attach(banks, base, job, spec, weights[job])
    microbatch = together(["gate", "lora"], random_samples((4, 3)))
    x_TK = torch.randn(7, 32, dtype=torch.float64)
    residual_TN = torch.randn(
        7, sum(base.shape.site(name).out_features for name in names), dtype=torch.float64
    )
    with banks.bind(microbatch, Route.tiled, training=False), torch.no_grad():
        got = banks.linear(names[0])(x_TK, residual_TN)
    for job, segment in zip(specs, microbatch.segments, strict=True):
        modules = plain_model("qwen2", JobAdapter(job, specs[job], 0), weights[job])
        want = torch.cat([modules.get_submodule(name)(x_TK[segment.rows]) for name in names], dim=1)
        torch.testing.assert_close(
            got[segment.rows], residual_TN[segment.rows] + want, rtol=EXACT, atol=EXACT
        )


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("route", [Route.segmented, Route.tiled])
def test_a_nan_of_one_kind_stays_with_its_owner(route):
    base = tiny_base("llama")
    specs = {job: all_kinds("llama")[job] for job in ("lora", "gate", "tied")}
    microbatch = together([*specs], random_samples((5, 4, 6)))

    def run(sick):
        banks = empty_banks(base)
        for seed, (job, spec) in enumerate(specs.items()):
            weights = drawn(base, spec, seed)
            attach(banks, base, job, spec, weights * float("nan") if job == sick else weights)
        logits_TV, found = gradients(base, banks, microbatch, route)
        banks.restore_base()
        return dict(zip(specs, logits_TV.split(microbatch.sample_lengths), strict=True)), found

    healthy = run(None)
    for sick in specs:
        for before, after in zip(healthy, run(sick), strict=True):
            assert not after[sick].isfinite().all()
            assert all(torch.equal(before[job], after[job]) for job in specs if job != sick)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("toys")
def test_beside_other_kinds_the_error_is_at_most_twice_that_of_plain_torch_in_the_same_dtype(dtype):
    base = tiny_base("qwen2", dtype)
    specs = {job: all_kinds("qwen2")[job] for job in ("lora", "gate", "tied")}
    banks, samples = empty_banks(base), random_samples((9, 8, 10))
    weights = {job: drawn(base, spec, seed) for seed, (job, spec) in enumerate(specs.items())}
    for job, spec in specs.items():
        attach(banks, base, job, spec, weights[job])
    name = "model.layers.1.self_attn.k_proj"
    x_TK = torch.randn(27, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    microbatch = together([*specs], samples)
    with banks.bind(microbatch, Route.tiled, training=False), torch.no_grad():
        got = banks.linear(name)(x_TK, None)
    for job, segment in zip(specs, microbatch.segments, strict=True):
        adapter, x_LK = JobAdapter(job, specs[job], 0), x_TK[segment.rows]
        plain = plain_model("qwen2", adapter, weights[job], dtype).get_submodule(name)(x_LK)
        exact = tiny_base("qwen2", dtype).model.double().state_dict()
        model = plain_model("qwen2", adapter, weights[job].double())
        model.load_state_dict(exact)
        want = model.get_submodule(name)(x_LK.double())
        error = (got[segment.rows].double() - want).norm()
        assert error <= 2 * (plain.double() - want).norm() + 1e-30


def test_constants_are_made_once_for_all_jobs_of_a_key_and_go_with_the_last(toys):  # noqa: F811
    base = tiny_base("llama")
    banks = empty_banks(base)
    for job, draw in (("a", 1), ("b", 1), ("c", 2)):
        attach(banks, base, job, TiedSpec(draw=draw), drawn(base, TiedSpec(), 0))
    assert toys["tied"].drawn == 2
    for job in "abc":
        banks.detach(job)
    attach(banks, base, "a", TiedSpec(draw=1), drawn(base, TiedSpec(), 0))
    assert toys["tied"].drawn == 3


@pytest.mark.usefixtures("toys")
def test_what_all_sites_share_is_refused_where_not_all_sites_are_or_where_it_would_travel():
    base = tiny_base("llama")
    modules, sites, like = base.sites(), base.shape.sites, next(base.model.parameters())
    weights = drawn(base, TiedSpec(), 0)
    half = Banks(modules, sites[:7], like, whole_sites=sites)
    with pytest.raises(
        AdapterError, match="that all layers share, which cannot be trained where the base is divided"
    ):
        attach(half, base, "a", TiedSpec(), weights)
    banks = empty_banks(base)
    layout = get_kind("tied").layout(TiedSpec(), sites)
    views = layout.parameter_views(weights)
    with pytest.raises(AdapterError, match="kept in host memory"):
        banks.attach(JobAdapter("a", TiedSpec(), 0), layout, weights, weights.clone(), views, views)
    assert not banks.attached
