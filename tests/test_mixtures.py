"""Mixtures of experts: several jobs at once equal solo PEFT, and nobody's tokens are routed otherwise."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests import bench, oracle
from tests.adapters.attached_banks import attach, banks_with, empty_banks, logits, together, weights_of
from tests.base.folders import model_folder
from tests.base.packs import random_samples
from tests.cases import slow_but, some_of
from tests.families import MIXTURES, tiny
from tests.interpreter import interpret
from weftune import JobSpec
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import A, LoraSpec, read_spec
from weftune.adapters.registry import get_kind
from weftune.base.check import Routing
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.errors import AdapterError
from weftune.ops.lora.routes import Route
from weftune.run.training.state import master_dtype
from weftune.trainer.export import write_merged, write_portable

pytestmark = pytest.mark.filterwarnings("ignore:The following \\w+ keys did not match:RuntimeWarning")
"""PEFT looks for them among modules only, and heeds them at parameters all the same."""

STEPS = 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EXPERTS = [GATE_UP, DOWN]


@dataclass(frozen=True)
class Case:
    """A job, and where it starts."""

    rank: int
    adapter: dict
    start: Path
    samples: list
    index: int

    @property
    def config(self):
        targets = self.adapter.get("targets", ATTENTION)
        more = {key: value for key, value in self.adapter.items() if key == "target_parameters"}
        more |= {"use_rslora": self.adapter.get("rslora", False)}
        more |= {key: dict(self.adapter[key]) for key in ("rank_pattern",) if key in self.adapter}
        return oracle.lora_config(tiny(self.family), self.rank, 12.0, targets, **more)

    family: str = ""

    @property
    def batch_size(self):
        return 3 + self.index

    def spec(self):
        return JobSpec(
            name=f"job{self.index}",
            data=bench.rows(self.samples),
            adapter=dict(rank=self.rank, alpha=12.0, init_from=str(self.start), **self.adapter),
            steps=STEPS,
            batch_size=self.batch_size,
            learning_rate=1e-3,
            seed=self.index,
        )

    def by_peft(self, dtype, padded=True):
        batches = bench.batches(self.samples, self.batch_size, self.index, STEPS)
        model, recipe = tiny(self.family, dtype), oracle.Recipe(STEPS)
        return oracle.train_with_peft(model, self.config, self.start, batches, recipe, padded)


ON_ATTENTION = [(4, {}), (6, {"targets": ["q_proj", "v_proj"]})]
"""Rank, and what the job says of its targets; by default an adapter is on all of attention."""
ON_EXPERTS = [
    (3, {"target_parameters": EXPERTS}),
    (2, {"targets": [], "target_parameters": [DOWN], "rslora": True}),
    (4, {"targets": ["q_proj"], "target_parameters": EXPERTS, "rank_pattern": {GATE_UP: 2}}),
    (5, {"targets": ["o_proj"]}),
]


def cases(family, asked, folder):
    made = []
    for index, (rank, adapter) in enumerate(asked):
        case = Case(rank, adapter, folder / f"start{index}", bench.samples(19, seed=index), index, family)
        oracle.write_start(case.start, tiny(family), case.config, seed=index, b_scale=0.05)
        made.append(case)
    return made


@pytest.mark.parametrize(
    ("family", "asked"),
    slow_but(
        product(MIXTURES, (ON_ATTENTION, ON_EXPERTS)),
        [(MIXTURES[0], ON_EXPERTS), (MIXTURES[1], ON_ATTENTION)],
    ),
)
def test_jobs_together_equal_solo_peft_in_float64(family, asked, tmp_path):
    made = cases(family, asked, tmp_path)
    bench.train(bench.base(family), tmp_path / "out", [case.spec() for case in made], capacity=64)
    for case in made:
        got = bench.trained(tmp_path / "out", f"job{case.index}", bench.adapter(case.start))
        oracle.assert_equal_float64(got, case.by_peft(torch.float64))


@pytest.mark.parametrize(("family", "asked"), slow_but(product(MIXTURES, (ON_ATTENTION, ON_EXPERTS)), []))
def test_jobs_together_equal_solo_peft_in_float32(family, asked, tmp_path):
    """Here transformers' products are grouped by torch."""
    made = cases(family, asked, tmp_path)
    base = bench.base(family, torch.float32)
    assert base.model.config._experts_implementation == "grouped_mm"
    bench.train(base, tmp_path / "out", [case.spec() for case in made], capacity=64)
    for case in made:
        got = bench.trained(tmp_path / "out", f"job{case.index}", bench.adapter(case.start))
        runs = [case.by_peft(torch.float32, padded) for padded in (True, False)]
        oracle.assert_equal_float32(got, *runs, case.by_peft(torch.float64), floor=oracle.FLIPPED)


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
    with (
        routing.record_decisions(),
        torch.no_grad(),
        banks.bind(microbatch, Route.segmented, training=False),
    ):
        base.hidden(microbatch)
    return [made for (made,) in routing._decisions.values()]


@pytest.mark.parametrize(
    ("family", "dtype", "parameters"),
    slow_but(
        product(MIXTURES, (torch.float64, torch.float32), ((), tuple(EXPERTS))),
        [
            (MIXTURES[0], torch.float64, ()),
            (MIXTURES[0], torch.float32, tuple(EXPERTS)),
            (MIXTURES[1], torch.float64, tuple(EXPERTS)),
            (MIXTURES[1], torch.float32, ()),
        ],
    ),
)
def test_a_nan_of_one_job_reaches_nobody_who_shares_its_experts(family, dtype, parameters):
    base, samples = bench.base(family, dtype), random_samples((9, 5, 12))
    microbatch = together("abc", samples)
    wanted = gradients(base, microbatch, None, target_parameters=parameters)
    got = gradients(base, microbatch, "b", target_parameters=parameters)
    assert bool(got["b"].isnan().any())
    for job in "ac":
        assert bool(wanted[job].norm() > 0)
        torch.testing.assert_close(
            got[job], wanted[job], rtol=0.0, atol=1e-6 if dtype is torch.float32 else 1e-12
        )


def gradients(base, microbatch, spoilt, route=Route.segmented, **asked):
    banks = empty_banks(base)
    for job in "abc":
        lora = LoraSpec(rank=3, **asked)
        layout = get_kind("lora").layout(lora, base.shape.sites)
        drawn = torch.randn(layout.size, generator=torch.Generator().manual_seed(ord(job))) * 0.2
        weights = drawn.fill_(torch.nan) if job == spoilt else drawn
        total = torch.zeros(layout.size, dtype=master_dtype(base.dtype), device=base.device)
        banks.attach(JobAdapter(job, lora, seed=0), layout, weights.to(base.device, base.dtype), total)
    try:
        with banks.bind(microbatch, route, training=True):
            h_TD = base.hidden(replace(microbatch))
            slope_TD = torch.linspace(-1, 1, h_TD.numel(), device=base.device).view_as(h_TD)
            (h_TD * slope_TD).sum().backward()
        return {job: banks.attached[job].gradient.clone() for job in "abc"}
    finally:
        banks.restore_base()


@pytest.mark.parametrize("family", slow_but([(family,) for family in MIXTURES], []))
def test_kernels_give_the_gradients_of_plain_torch(family, monkeypatch):
    """In Triton's interpreter."""
    base, microbatch = bench.base(family, torch.float32), together("abc", random_samples((9, 5, 12)))
    asked = {"targets": (), "target_parameters": EXPERTS}
    wanted = gradients(base, microbatch, None, **asked)
    interpret(monkeypatch)
    got = gradients(base, microbatch, None, Route.tiled, **asked)
    for job in "abc":
        assert bool(wanted[job].norm() > 0)
        assert (got[job] - wanted[job]).norm() < 1e-5 * wanted[job].norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype"),
    some_of(
        product(MIXTURES, (torch.float32, torch.bfloat16)),
        zip(MIXTURES, (torch.float32, torch.bfloat16), strict=True),
    ),
)
def test_gradients_on_a_gpu_are_as_near_to_float64_as_those_on_a_cpu(family, dtype):
    """In bfloat16 a GPU multiplies all groups at once."""
    microbatch, asked = together("abc", random_samples((9, 5, 12))), {"target_parameters": EXPERTS}
    exact = bench.base(family)
    routing = Routing(exact.model)
    with routing.record_decisions():
        wanted = gradients(exact, microbatch, None, **asked)
    errors = {}
    for place, route in (("cpu", Route.segmented), ("cuda", Route.tiled)):
        device = torch.device(place)
        base = Base.from_model(tiny(family, dtype), BaseSpec(model=f"tiny/{family}"), device)
        for router, ((_, _, chosen_Tk),) in zip(
            Routing(base.model)._decisions, routing._decisions.values(), strict=True
        ):
            router.register_forward_hook(partial(sent_to, chosen_Tk.to(device)))
        got = gradients(base, microbatch.to(device), None, route, **asked)
        errors[place] = {job: (got[job].cpu().double() - wanted[job]).norm() for job in wanted}
    for job in wanted:
        assert errors["cuda"][job] <= 2 * errors["cpu"][job] + 1e-4 * wanted[job].norm()


def sent_to(chosen_Tk, router, _, decision):
    """What a router returns where it chooses these experts."""
    logits_TE = decision[0]
    weights_Tk = logits_TE.float().softmax(dim=-1).gather(1, chosen_Tk)
    return logits_TE, (weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)).to(logits_TE.dtype), chosen_Tk


@pytest.mark.gpu
@pytest.mark.parametrize("family", some_of(MIXTURES, ["qwen3_moe"]))
def test_jobs_have_the_losses_on_a_gpu_that_they_have_on_the_cpu(family, tmp_path):
    """One on experts, one on attention; in float32, where no rounding sends a token elsewhere."""
    model_folder(tmp_path / "base", family)
    adapters = [dict(rank=4, target_parameters=EXPERTS), dict(rank=8, targets=["q_proj", "v_proj"])]
    keys = dict(data=bench.rows(bench.samples(6)), steps=5, batch_size=3, learning_rate=1e-2)
    spec = BaseSpec(model=str(tmp_path / "base"), dtype="float32")
    for device in ("cpu", "cuda"):
        base = load_base(spec, torch.device(device))
        jobs = [JobSpec(name=f"job{at}", adapter=one, **keys) for at, one in enumerate(adapters)]
        bench.train(base, tmp_path / device, jobs)
    for job in ("job0", "job1"):
        want = bench.losses(tmp_path / "cpu", job)
        assert bench.losses(tmp_path / "cuda", job) == pytest.approx(want, rel=1e-3)


def test_a_row_meets_the_adapters_of_its_own_experts_only():
    """What passes are predicted by; steps update all of it."""
    sites, kind = bench.base("qwen3_moe").shape.sites, get_kind("lora")
    attention = kind.layout(LoraSpec(rank=2), sites)
    both = kind.layout(LoraSpec(rank=2, target_parameters=EXPERTS), sites)
    assert attention.active_size == attention.size
    assert 2 * (both.active_size - attention.active_size) == both.size - attention.size, (
        "three of six experts"
    )
    spec = LoraSpec(rank=2, target_parameters=EXPERTS)
    adapted = [site for site in sites if spec.adapts(site)]
    assert (
        sum(site.inactive_parameters(spec.parameters_at(site)) for site in adapted)
        == both.size - both.active_size
    )


# -- files -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a job with adapters on attention and experts, trained in float32, for each family."""
    made: dict[str, Path] = {}

    def folder(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            adapter = dict(rank=3, rslora=True, target_parameters=EXPERTS, rank_pattern={DOWN: 2})
            rows = bench.rows(bench.samples(8))
            keys = dict(steps=3, batch_size=3, learning_rate=2e-2)
            job = JobSpec(name="job", data=rows, adapter=adapter, **keys)
            bench.train(bench.base(family, torch.float32), made[family], [job])
        return made[family] / "job"

    return folder


SAMPLES = random_samples((9, 4, 13))


@torch.no_grad()
def by_transformers(model):
    return torch.cat([model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in SAMPLES])


@pytest.mark.parametrize("family", MIXTURES)
def test_peft_loads_what_was_trained_and_computes_the_same(family, trained):
    folder, model = trained(family), tiny(family, torch.float32)
    bare = by_transformers(model)
    theirs = by_transformers(PeftModel.from_pretrained(model, folder).eval())
    base = bench.base(family, torch.float32)
    banks = banks_with(base, {"a": replace(read_spec(folder), init_from=str(folder))})
    mine = torch.cat(logits(base, banks, together("aaa", SAMPLES)))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - bare).abs().max() > 1e-2
    only_experts = {name for name in bench.adapter(folder) if "experts" in name}
    assert len(only_experts) == 8, "A and B of two parameters in two layers"


def test_what_is_on_experts_is_stored_as_peft_stores_it(trained):
    """PEFT wraps the module of the experts twice; the outer one is down_proj's."""
    stored, path = bench.adapter(trained("qwen3_moe")), "base_model.model.model.layers.1.mlp.experts"
    assert stored[f"{path}.base_layer.lora_A.weight"].shape == (6 * 3, 32)
    assert stored[f"{path}.base_layer.lora_B.weight"].shape == (48, 6 * 3)
    assert stored[f"{path}.lora_A.weight"].shape == (6 * 2, 24)
    config = json.loads((trained("qwen3_moe") / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == sorted(EXPERTS)
    assert sorted(config["target_modules"]) == sorted(ATTENTION)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_merged_export_computes_the_same_and_a_portable_one_is_refused(family, trained, tmp_path):
    folder, base = trained(family), model_folder(tmp_path / "base", family)
    write_merged(folder, BaseSpec(model=str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    theirs = by_transformers(PeftModel.from_pretrained(tiny(family, torch.float32), folder).eval())
    torch.testing.assert_close(by_transformers(merged), theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(AdapterError, match=r"has adapters on experts, which servers do not load .* --merged"):
        write_portable(folder, tmp_path / "portable")


@pytest.mark.parametrize("family", MIXTURES)
def test_a_start_whose_targets_peft_took_for_experts_computes_the_same(family, tmp_path):
    """The names that experts' linears had are parameters to PEFT, with ranks of their own."""
    linears = {"mixtral": ["w1", "w2", "w3"], "qwen3_moe": ["gate_proj", "up_proj", "down_proj"]}[family]
    model = tiny(family, torch.float32)
    config = oracle.lora_config(model, 4, 6.0, ["q_proj", *linears])
    start = oracle.write_start(tmp_path, model, config, b_scale=0.2)
    spec = read_spec(start)
    assert spec.target_parameters == ("down_proj", "gate_up_proj")
    assert (spec.rank_at(f"x.{GATE_UP}"), spec.rank_at(f"x.{DOWN}")) == (8, 4)
    base = bench.base(family, torch.float32)
    banks = banks_with(base, {"a": replace(spec, init_from=str(start))})
    mine = torch.cat(logits(base, banks, together("aaa", SAMPLES)))
    theirs = by_transformers(PeftModel.from_pretrained(tiny(family, torch.float32), start).eval())
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_an_adapter_for_other_experts_is_no_start(trained):
    lora = replace(read_spec(trained("qwen3_moe")), init_from=str(trained("qwen3_moe")))
    four = [
        replace(site, experts=4) if site.experts else site for site in bench.base("qwen3_moe").shape.sites
    ]
    with pytest.raises(AdapterError, match=r"has rank 4.5 at model.layers.0.mlp.experts.gate_up_proj"):
        get_kind("lora").check_start(lora, four)
    with pytest.raises(
        AdapterError, match=r"set adapter.targets and adapter.target_parameters as the folder"
    ):
        get_kind("lora").check_start(replace(lora, target_parameters=()), bench.base("qwen3_moe").shape.sites)


@pytest.mark.parametrize("expression", [r".*\.1\..*[qv]_proj", "all-linear"])
def test_targets_that_peft_would_seek_among_experts_are_written_as_names(expression, tmp_path):
    """An expression that names one layer would be all layers to PEFT, and all-linear the router too."""
    base, kind = bench.base("mixtral", torch.float32), get_kind("lora")
    lora = LoraSpec(rank=2, targets=expression)
    layout = kind.layout(lora, base.shape.sites)
    views = layout.parameter_views(torch.randn(layout.size))
    kind.save(tmp_path, lora, views, base.shape.sites, "b")
    peft = PeftModel.from_pretrained(tiny("mixtral", torch.float32), tmp_path)
    names = {name for name, _ in peft.named_parameters() if "lora_A" in name}
    assert names == {f"base_model.model.{site}.lora_A.default.weight" for site, name in views if name == A}
