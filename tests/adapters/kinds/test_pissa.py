"""PiSSA: PEFT trains it on a base without its principal part; here the base stays as it is."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests import bench, oracle
from tests.adapters.kinds.cases import STEPS, job, peft_config, samples
from tests.families import tiny
from tests.outputs import assert_same_results
from weftune import Options
from weftune.adapters.folder import read_config
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import A, B
from weftune.adapters.pissa.apply import principal_factors, randomised_svd
from weftune.adapters.pissa.spec import FIRST_A, FIRST_B
from weftune.errors import AdapterError
from weftune.run.events import Stepped
from weftune.run.training import checkpoint
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training
from weftune.trainer.export import write_portable

KINDS = ("pissa", "pissa-dropped", "pissa-plus")
MORE = {"pissa-dropped": {"dropout": 0.25}, "pissa-plus": {"loraplus_lr_ratio": 4.0, "rslora": True}}


class Crash(Exception):
    pass


def one(kind, family, **more):
    made = job("pissa", family, **more)
    return replace(made, name=kind, adapter=replace(made.adapter, **MORE.get(kind, {})))


def begun(base, spec):
    adapter = JobAdapter(spec.name, spec.adapter, spec.seed)
    return new_training(
        adapter, Recipe(1), base.shape.sites, base.dtype, torch.device("cpu"), frozen=base.weight_reader()
    )


def start(base, spec):
    training = begun(base, spec)
    return {place: value.clone() for place, value in training.layout.parameter_views(training.master).items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_starts_where_peft_does_up_to_the_signs_of_vectors(family):
    base, model = bench.base(family, torch.float32), tiny(family, torch.float32)
    whole = {name: value.clone() for name, value in model.named_parameters()}
    peft = get_peft_model(model, peft_config("pissa", family))
    ours = start(base, one("pissa", family))
    sites = dict.fromkeys(site for site, _ in ours)
    assert sites
    for site in sites:
        layer = peft.get_submodule(f"base_model.model.{site}")
        a_rK, b_Nr = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
        torch.testing.assert_close(ours[site, A].abs(), a_rK.abs(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[site, B].T @ ours[site, A], b_Nr @ a_rK, rtol=1e-4, atol=1e-5)
        taken = whole[f"{site}.weight"] - layer.base_layer.weight.data
        change = 2.0 * ours[site, FIRST_B].T @ ours[site, FIRST_A]
        torch.testing.assert_close(change.T if family == "gpt2" else change, taken, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours[site, A], ours[site, FIRST_A])


def by_peft(spec, family, first):
    """Plain LoRA of PEFT on a base that the principal part was taken out of, as PEFT's own start does it:
    that one refuses float64."""
    model, adapter = tiny(family, torch.float64), spec.adapter
    sites = dict.fromkeys(site for site, _ in first)
    for site in sites:
        weight = model.get_submodule(site).weight
        taken = adapter.scale_at(site) * first[site, B].T @ first[site, A]
        weight.data -= taken.T if family == "gpt2" else taken
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        target_modules=list(adapter.targets),
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(model, config).double().eval()
    for site in sites:
        layer = peft.get_submodule(f"base_model.model.{site}")
        layer.lora_A["default"].weight.data = first[site, A].clone()
        layer.lora_B["default"].weight.data = first[site, B].T.clone()
    drops = oracle.HashedDropout(seed=2) if adapter.dropout else None
    if drops is not None:
        drops.install(peft, adapter.dropout)
    batches = bench.batches(samples("pissa"), 3, 2, STEPS)
    recipe = oracle.Recipe(STEPS, 2e-3, "linear", 2)
    ratio = adapter.loraplus_lr_ratio
    losses = oracle.train_model(peft, batches, recipe, drops is None, drops, b_ratio=ratio)
    pairs = {site: peft.get_submodule(f"base_model.model.{site}") for site in sites}
    return losses, {
        site: (layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data)
        for site, layer in pairs.items()
    }


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beside_lora_it_trains_as_in_peft_and_is_saved_as_peft_converts_it(family, tmp_path):
    base, jobs = bench.base(family), [one(kind, family) for kind in KINDS]
    firsts = {spec.name: start(base, spec) for spec in jobs}
    bench.train(base, tmp_path / "out", [*jobs, job("lora", family)], capacity=512)
    for spec in jobs:
        first, saved = firsts[spec.name], bench.adapter(tmp_path / "out" / spec.name)
        losses, end = by_peft(spec, family, first)
        assert bench.losses(tmp_path / "out", spec.name) == pytest.approx(losses, rel=1e-9)
        for site, (a_rK, b_Nr) in end.items():
            both_a = saved[f"base_model.model.{site}.lora_A.weight"]
            both_b = saved[f"base_model.model.{site}.lora_B.weight"]
            want_a = torch.cat([a_rK, first[site, A]])
            want_b = torch.cat([b_Nr, -first[site, B].T], dim=1)
            for got, want in ((both_a, want_a), (both_b, want_b)):
                assert (got - want).norm() <= 1e-8 * want.norm()
            assert torch.equal(both_a[spec.adapter.rank :], first[site, FIRST_A])
        config = read_config(tmp_path / "out" / spec.name)
        assert (config["peft_type"], config["r"], config["use_dora"]) == ("LORA", 6, False)
        assert config["init_lora_weights"] is True


def test_it_goes_to_servers_as_a_lora_adapter_of_twice_the_rank(tmp_path):
    bench.train(bench.base("llama"), tmp_path / "out", [one("pissa-plus", "llama")])
    assert write_portable(tmp_path / "out" / "pissa-plus", tmp_path / "portable") == 6
    tokens = torch.tensor([samples("pissa")[0][0]])
    with torch.no_grad():
        want, got = (
            PeftModel.from_pretrained(tiny("llama", torch.float64), folder).double().eval()(tokens).logits
            for folder in (tmp_path / "out" / "pissa-plus", tmp_path / "portable")
        )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_job_goes_on_from_what_another_was_saved_as(tmp_path):
    base, spec = bench.base("llama"), one("pissa", "llama")
    bench.train(base, tmp_path / "out", [spec])
    saved = bench.adapter(tmp_path / "out" / "pissa")
    after = job("pissa", "llama", tmp_path / "out" / "pissa")
    for (site, name), value in start(base, after).items():
        matrix = "A" if name in (A, FIRST_A) else "B"
        stored = saved[f"base_model.model.{site}.lora_{matrix}.weight"]
        both = stored if matrix == "A" else stored.T
        want = {A: both[:3], B: both[:3], FIRST_A: both[3:], FIRST_B: -both[3:]}[name]
        assert torch.equal(value, want)


def test_what_it_started_from_comes_back_from_a_checkpoint_to_the_same_bits(tmp_path):
    base, spec = bench.base("llama"), one("pissa", "llama")
    training = begun(base, spec)
    checkpoint.save(tmp_path, training)
    other = bench.base("llama", seed=1)
    resumed = begun(other, spec)
    assert not torch.equal(resumed.master, training.master)
    assert checkpoint.restore(tmp_path, resumed)
    assert torch.equal(resumed.master, training.master)


def test_a_job_that_goes_on_does_not_decompose_the_base_again(tmp_path, monkeypatch):
    jobs = [one("pissa", "llama", save_every=2)]
    bench.train(bench.base("llama"), tmp_path / "whole", jobs)

    def crash(event):
        if isinstance(event, Stepped) and event.step == 4:
            while not list((tmp_path / "out" / "pissa" / "checkpoints").glob("step-*")):
                time.sleep(0.01)
            raise Crash

    with pytest.raises(Crash):
        bench.trainer(bench.base("llama"), tmp_path / "out", jobs).run(crash)
    monkeypatch.setattr("weftune.adapters.pissa.apply.decompose", None)
    bench.trainer(bench.base("llama"), tmp_path / "out", jobs, options=Options(resume=True)).run()
    assert_same_results(tmp_path / "out", tmp_path / "whole")


def test_a_rank_above_the_number_of_singular_values_is_refused():
    base = bench.base("llama")
    spec = one("pissa", "llama")
    wide = replace(spec, adapter=replace(spec.adapter, rank=4096))
    with pytest.raises(AdapterError, match=r"adapter\.rank is 4096, but .* singular values to start from"):
        begun(base, wide)


# -- a randomised SVD ------------------------------------------------------------------------------------


def low_rank(found, rank):
    """The best approximation of that rank."""
    a_rK, b_rN = principal_factors(found, rank, 1.0)
    return b_rN.T @ a_rK


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_a_randomised_svd_comes_as_near_as_the_exact_one_where_singular_values_fall(shape):
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(shape[0], 40))[0], torch.linalg.qr(torch.randn(shape[1], 40))[0]
    weight_NK = (left * 0.7 ** torch.arange(40.0)) @ right.T
    exact = low_rank(torch.linalg.svd(weight_NK, full_matrices=False), 4)
    gaps = [(low_rank(randomised_svd(weight_NK, 4, n, 3), 4) - exact).norm() for n in (0, 4)]
    assert gaps[1] <= 1e-5 * exact.norm() < gaps[0]
    assert torch.equal(*(low_rank(randomised_svd(weight_NK, 4, 4, 3), 4) for _ in range(2)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_enough_iterations_it_starts_where_peft_does(family):
    """Singular values of random weights hardly differ, so that many are needed."""
    base, model = bench.base(family, torch.float32), tiny(family, torch.float32)
    spec = one("pissa", family)
    ours = start(base, replace(spec, adapter=replace(spec.adapter, svd_iterations=100)))
    peft = get_peft_model(model, peft_config("pissa", family))
    for site in dict.fromkeys(site for site, _ in ours):
        layer = peft.get_submodule(f"base_model.model.{site}")
        want = layer.lora_B["default"].weight.data @ layer.lora_A["default"].weight.data
        torch.testing.assert_close(ours[site, B].T @ ours[site, A], want, rtol=1e-4, atol=1e-4)


def test_few_iterations_train_as_well_as_any_start(tmp_path):
    """A and B start from what was found, and its product is subtracted: so the first loss is the base's."""
    spec = one("pissa", "llama")
    quick = replace(spec, name="quick", adapter=replace(spec.adapter, svd_iterations=2))
    bench.train(bench.base("llama"), tmp_path / "out", [spec, quick])
    mine, theirs = (bench.losses(tmp_path / "out", name) for name in ("quick", "pissa"))
    assert mine[0] == pytest.approx(theirs[0], rel=1e-9)
    assert mine[-1] == pytest.approx(theirs[-1], rel=1e-2)
    assert read_config(tmp_path / "out" / "quick")["r"] == 6
