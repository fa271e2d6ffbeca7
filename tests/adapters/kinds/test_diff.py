"""Diff-Pruning equals a plain torch model with the same formula, in both phases and however it is packed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from tests import bench, oracle
from tests.adapters.kinds.cases import GATES, PRUNED, STEPS, job, samples
from tests.cases import slow_but
from tests.families import tiny
from weftune.adapters.diff.spec import DiffSpec
from weftune.adapters.folder import read_config
from weftune.adapters.registry import get_kind
from weftune.base.shape import model_shape, site_modules
from weftune.errors import AdapterError
from weftune.jobs.spec.checks import warnings
from weftune.ops.dropout import mask_key
from weftune.ops.hard_concrete import DrawnGates, difference_product, uniform_noise
from weftune.ops.hard_concrete import Gated as Values
from weftune.trainer.export import read_finished_kind, write_portable

RELAXED = 3


class Gated(nn.Module):
    """A linear of the base and a gated difference beside it; told which step comes next."""

    def __init__(self, base: nn.Module, site: str, spec: DiffSpec, transposed: bool) -> None:
        super().__init__()
        self.base, self.site, self.spec, self.step = base, site, spec, 0
        weight = (base.weight.T if transposed else base.weight).contiguous()
        self.w = nn.Parameter(torch.zeros_like(weight))
        self.alpha = nn.Parameter(torch.full_like(weight, 5.0))
        self.group = nn.Parameter(weight.new_full((1,), 5.0)) if spec.structured else None
        self.mask = None

    def forward(self, x):
        return self.base(x) + x @ self.delta(self.drawn).T

    def drawn(self, alpha, name):
        shape = alpha.shape if alpha.ndim == 2 else (1, 1)
        u = uniform_noise(mask_key(2, self.step, f"{self.site}.{name}"), *shape, alpha).view(alpha.shape)
        return torch.sigmoid(torch.log(u) - torch.log(1 - u) + alpha)

    def delta(self, draw):
        if self.mask is not None:
            return self.mask * self.w
        return self.w * self.gate(self.alpha, "alpha_NK", draw) * self.gate(self.group, "group_alpha", draw)

    def gate(self, alpha, name, draw):
        return 1.0 if alpha is None else (draw(alpha, name) * 3.0 - 1.5).clamp(0.0, 1.0)

    def penalty(self):
        p = torch.sigmoid(self.alpha) * (1.0 if self.group is None else torch.sigmoid(self.group))
        return self.spec.l0_weight * p.sum() if self.mask is None else 0.0

    def fix(self):
        with torch.no_grad():
            whole = self.delta(lambda alpha, _: torch.sigmoid(alpha))
            kept = whole.abs().flatten().topk(round(self.spec.sparsity * whole.numel())).indices
            self.mask = torch.zeros_like(whole)
            self.mask.view(-1)[kept] = 1.0
            self.w.copy_(whole * self.mask)


def by_torch(spec, family):
    """Losses without the penalty, and the difference at every site in the end."""
    base, model = bench.base(family), tiny(family, torch.float64).requires_grad_(False)
    gated = {}
    for site in base.shape.sites:
        if spec.adapter.targets_site(site.name):
            path, _, last = site.name.rpartition(".")
            inner = model.get_submodule(site.name)
            gated[site.name] = Gated(inner, site.name, spec.adapter, site.fan_in_fan_out)
            setattr(model.get_submodule(path), last, gated[site.name])
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    rates = [2e-3 * (1.0 if name.endswith(".w") else spec.adapter.mask_lr_ratio) for name, _ in named]
    groups = [{"params": [value], "lr": rate} for (_, value), rate in zip(named, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    scheduler = get_scheduler("linear", optimizer, 2, STEPS)
    losses = []
    for step, batch in enumerate(bench.batches(samples(spec.name), 3, 2, STEPS), start=1):
        optimizer.zero_grad()
        for one in gated.values():
            one.step = step
        loss = oracle._loss_sum(model, batch) / sum(sum(mask[1:]) for _, mask in batch)
        (loss + sum(one.penalty() for one in gated.values())).backward()
        torch.nn.utils.clip_grad_norm_([value for _, value in named], 1.0)
        if step == RELAXED:
            for one in gated.values():
                one.fix()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {site: one.delta(None).detach() for site, one in gated.items()}


def differences(folder, family):
    """What a folder holds, by site."""
    sites = bench.base(family).shape.sites
    found = get_kind("diff").read(folder, DiffSpec(targets=tuple(read_config(folder)["targets"])), sites)
    return {site: value for (site, _), value in found.items()}


@pytest.mark.parametrize(
    ("family", "capacity"),
    slow_but(product(("llama", "gpt2"), (512, 24)), [("llama", 24), ("gpt2", 512)]),
)
def test_beside_others_it_equals_plain_torch_however_its_batches_are_split(family, capacity, tmp_path):
    jobs = [job(kind, family) for kind in PRUNED]
    trainer = bench.trainer(
        bench.base(family),
        tmp_path / "out",
        [*jobs, job("lora", family)],
        options=bench.Options(capacity=capacity),
    )
    trainer.run()
    if capacity == 24:
        parts = [s for run in trainer.programs for one in run.microbatches for s in one.segments]
        assert len([s for s in parts if s.job == "diff"]) > STEPS
    for spec in jobs:
        losses, want = by_torch(spec, family)
        assert bench.losses(tmp_path / "out", spec.name) == pytest.approx(losses, rel=1e-9)
        got = differences(tmp_path / "out" / spec.name, family)
        assert got.keys() == want.keys()
        for site, delta in want.items():
            assert (got[site] - delta).norm() <= 1e-8 * delta.norm()
            assert delta.any()


def test_its_file_holds_the_share_of_elements_that_was_asked_for(tmp_path):
    bench.train(bench.base("llama"), tmp_path / "out", [job("diff", "llama")])
    tensors = bench.adapter(tmp_path / "out" / "diff")
    for site in bench.base("llama").shape.sites:
        if job("diff", "llama").adapter.targets_site(site.name):
            indices = tensors[f"base_model.model.{site.name}.diff_indices"]
            values = tensors[f"base_model.model.{site.name}.diff_values"]
            assert len(indices) == len(values) == round(0.05 * site.in_features * site.out_features)
    assert read_config(tmp_path / "out" / "diff")["weftune_kind"] == "diff"


def test_the_penalty_shuts_gates():
    """So much of it that nothing else counts: the expected number of open gates falls."""
    torch.manual_seed(0)
    values = Values(torch.randn(4, 5), torch.full((4, 5), 1.0), torch.full((1,), 1.0))
    totals = Values(torch.zeros(4, 5), torch.zeros(4, 5), torch.zeros(1))
    anchor = torch.zeros((), requires_grad=True)
    for bears, falls in ((0.0, False), (1.0, True)):
        drawn = DrawnGates(7, 8, 100.0, torch.tensor(bears))
        difference_product(torch.zeros(3, 5), values, totals, drawn, anchor).sum().backward()
        assert bool((totals.alpha_NK > 0).all()) is falls


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_into_the_base_it_computes_what_was_evaluated(family, tmp_path):
    rows = samples("held out")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench.rows(rows)))
    spec = job("diff", family, eval={"path": str(tmp_path / "rows.jsonl")}, learning_rate=0.02)
    bench.train(bench.base(family), tmp_path / "out", [spec])
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [one["eval_loss"] for one in map(json.loads, lines) if "eval_loss" in one]
    merged = tiny(family, torch.float64)
    assert first == pytest.approx(oracle.mean_loss(merged, rows), rel=1e-9)
    folder = tmp_path / "out" / "diff"
    read_finished_kind(folder).merge(folder, site_modules(merged), model_shape(merged, merged.dtype).sites)
    assert last == pytest.approx(oracle.mean_loss(merged, rows), rel=1e-9)
    assert abs(last - first) > 1e-4


def test_servers_do_not_load_it_and_it_says_so(tmp_path):
    bench.train(bench.base("llama"), tmp_path / "out", [job("diff", "llama")])
    with pytest.raises(AdapterError, match=r"is a diff adapter, which servers do not load; .* --merged"):
        write_portable(tmp_path / "out" / "diff", tmp_path / "portable")


def test_a_job_goes_on_from_what_another_was_saved_as(tmp_path):
    bench.train(bench.base("llama"), tmp_path / "out", [job("diff", "llama")])
    after = job("diff", "llama", tmp_path / "out" / "diff", steps=1, learning_rate=1e-12)
    bench.train(bench.base("llama"), tmp_path / "again", [after])
    before, now = (differences(tmp_path / name / "diff", "llama") for name in ("out", "again"))
    for site, delta in before.items():
        torch.testing.assert_close(now[site], delta, rtol=1e-6, atol=1e-9)


def correlation(one, other):
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_the_noise_is_uniform_and_hangs_on_seed_step_site_and_place_only():
    like = torch.zeros(0)
    drawn = uniform_noise(mask_key(2, 1, "a"), 300, 400, like)
    assert torch.equal(drawn[:100, :70], uniform_noise(mask_key(2, 1, "a"), 100, 70, like))
    for other in (mask_key(3, 1, "a"), mask_key(2, 2, "a"), mask_key(2, 1, "b")):
        assert abs(correlation(drawn, uniform_noise(other, 300, 400, like))) < 0.02
    assert drawn.min() > 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, 20, 0.0, 1.0) / drawn.numel()
    assert (counts - 0.05).abs().max() < 0.005
    assert abs(correlation(drawn[:, :-1], drawn[:, 1:])) < 0.02


def test_its_memory_is_told_when_the_job_is_read():
    base, spec = bench.base("llama"), job("diff", "llama")
    (told,) = [one for one in warnings([spec], base.shape) if "optimizer state" in one]
    weights = sum(
        s.in_features * s.out_features for s in base.shape.sites if spec.adapter.targets_site(s.name)
    )
    sites = sum(spec.adapter.targets_site(site.name) for site in base.shape.sites)
    assert f"a diff adapter on {sites} targets has {2 * weights + sites:,} parameters" in told


def test_phases_may_be_told_in_steps_or_as_a_share():
    assert DiffSpec(relaxed=0.07).relaxed_steps(100) == 7
    assert DiffSpec(relaxed=20).relaxed_steps(100) == 20
    assert DiffSpec(relaxed=1e-6).relaxed_steps(100) == 1
    assert replace(DiffSpec(), **GATES).relaxed_steps(STEPS) == RELAXED
