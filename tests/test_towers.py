"""Adapters of text towers: trained as PEFT trains them on the wrapper, and applied by PEFT to the wrapper."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests import bench, oracle
from tests.adapters.attached_banks import banks_with, logits, together
from tests.base.folders import wrapper_folder
from tests.base.packs import CPU, random_samples
from tests.cases import slow_but
from tests.families import WRAPPERS, tiny_wrapper, with_exact_norms
from tests.outputs import Crash, assert_same_results
from weftune import JobSpec, train
from weftune.adapters.lora.spec import read_spec
from weftune.base.load import load_base, load_plain
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.data.tokenise import prompt_tokens
from weftune.generate.answers import generate_answers
from weftune.trainer.export import write_merged, write_portable

STEPS = 6
SAMPLES = random_samples((9, 4, 13))
TOWER = r"model\.language_model\..*"


@pytest.mark.parametrize("family", [family for family in WRAPPERS if family != "qwen3_5"])
def test_two_jobs_on_a_text_tower_equal_solo_peft_on_its_wrapper_in_float64(family, tmp_path):
    wrapper = tiny_wrapper(family)
    spec = BaseSpec(model=str(wrapper_folder(tmp_path / "base", family, torch.float64)), dtype="float64")
    base = Base.from_model(with_exact_norms(load_plain(spec, CPU)), spec, CPU)
    jobs, wanted = [], []
    for seed, targets in enumerate(["all-linear", ["q_proj", "v_proj"]]):
        made, rank = bench.samples(11, seed=seed), 4 + 3 * seed
        ending = "_proj" if targets == "all-linear" else "(q_proj|v_proj)"
        config = oracle.lora_config(wrapper, rank, 8.0, f"{TOWER}{ending}")
        start = oracle.write_start(tmp_path / f"start{seed}", wrapper, config, seed=seed, b_scale=0.02)
        jobs.append(
            JobSpec(
                name=f"job{seed}",
                data=bench.rows(made),
                adapter=dict(rank=rank, alpha=8.0, targets=targets, init_from=str(start)),
                steps=STEPS,
                batch_size=4,
                learning_rate=1e-3,
                warmup=2,
                seed=seed,
            )
        )
        recipe = oracle.Recipe(STEPS, 1e-3, warmup=2)
        batches = bench.batches(made, 4, seed, STEPS)
        wanted.append(oracle.train_with_peft(wrapper, config, start, batches, recipe))
    bench.train(base, tmp_path / "out", jobs, capacity=64)
    for seed, want in enumerate(wanted):
        got = bench.trained(tmp_path / "out", f"job{seed}", bench.adapter(tmp_path / f"start{seed}"))
        assert got.end.keys() == want.end.keys()
        oracle.assert_equal_float64(got, want)


@pytest.mark.slow
def test_a_text_tower_with_linear_attention_equals_solo_peft_on_its_wrapper_in_float32(tmp_path):
    """Its recurrence computes in float32 whatever it is given, so the comparison is that of float32."""
    wrapper, precise = (tiny_wrapper("qwen3_5", dtype) for dtype in (torch.float32, torch.float64))
    base = load_base(BaseSpec(model=str(wrapper_folder(tmp_path / "base", "qwen3_5")), dtype="float32"), CPU)
    made = bench.samples(11)
    config = oracle.lora_config(wrapper, 4, 8.0, f"{TOWER}_proj(_qkv|_z|_b|_a)?")
    start = oracle.write_start(tmp_path / "start", wrapper, config, b_scale=0.02)
    adapter = dict(rank=4, alpha=8.0, init_from=str(start))
    keys = dict(steps=STEPS, batch_size=4, learning_rate=1e-3, warmup=2, seed=3)
    bench.train(base, tmp_path / "out", [JobSpec(name="a", data=bench.rows(made), adapter=adapter, **keys)])
    recipe, batches = oracle.Recipe(STEPS, 1e-3, warmup=2), bench.batches(made, 4, 3, STEPS)
    padded = oracle.train_with_peft(wrapper, config, start, batches, recipe)
    one_by_one = oracle.train_with_peft(wrapper, config, start, batches, recipe, padded=False)
    exact = oracle.train_with_peft(precise, config, start, batches, recipe)
    got = bench.trained(tmp_path / "out", "a", bench.adapter(start))
    assert got.end.keys() == padded.end.keys()
    oracle.assert_equal_float32(got, padded, one_by_one, exact)


JOBS = """base: {model: base, dtype: float32}
output: out
defaults: {data: rows.jsonl, steps: 3, batch_size: 3, learning_rate: 0.05, warmup: 0}
jobs:
- {name: every, adapter: {rank: 4}, save_every: 1}
- {name: some, adapter: {rank: 4, targets: [q_proj, v_proj], rslora: true, rank_pattern: {q_proj: 6}}}
- {name: matched, adapter: {rank: 4, targets: '.*\\.1\\..*(q_proj|down_proj)', dropout: 0.1}}
"""


@pytest.fixture(scope="module", params=WRAPPERS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def project(family, tmp_path_factory):
    """A wrapper's folder, and jobs that were trained on it as a user trains them."""
    folder = tmp_path_factory.mktemp("project")
    wrapper_folder(folder / "base", family)
    (folder / "rows.jsonl").write_text('{"prompt": "w10 w20", "completion": "w30 w40 w50"}\n' * 6)
    (folder / "jobs.yaml").write_text(JOBS)
    train(folder / "jobs.yaml", progress=False)
    return folder


@torch.no_grad()
def by_transformers(model):
    return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in SAMPLES]


def by_peft(family, folder):
    """PEFT on the whole wrapper."""
    return by_transformers(PeftModel.from_pretrained(tiny_wrapper(family, torch.float32), folder).eval())


def by_weftune(project, folder):
    base = load_base(BaseSpec(model=str(project / "base"), dtype="float32"), CPU)
    banks = banks_with(base, {"a": replace(read_spec(folder), init_from=str(folder))})
    return logits(base, banks, together(["a"] * len(SAMPLES), SAMPLES))


def assert_same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("job", slow_but(["every", "some", "matched"], ["some"]))
def test_peft_applies_an_adapter_to_the_wrapper_and_to_nothing_but_its_text_tower(family, project, job):
    folder = project / "out" / job
    wrapper = PeftModel.from_pretrained(tiny_wrapper(family, torch.float32), folder).eval()
    want = by_transformers(wrapper)
    assert_same(by_weftune(project, folder), want)
    bare = by_transformers(tiny_wrapper(family, torch.float32))
    assert max((a - b).abs().max() for a, b in zip(want, bare, strict=True)) > 1e-2
    adapted = {name for name, module in wrapper.named_modules() if hasattr(module, "lora_A")}
    stored = {name.rpartition(".lora_")[0] for name in bench.adapter(folder)}
    assert adapted == stored
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in stored)


def test_a_portable_export_and_a_merged_wrapper_compute_the_same(family, project, tmp_path):
    folder = project / "out" / "some"
    want = by_peft(family, folder)
    write_portable(folder, tmp_path / "portable")
    assert_same(by_peft(family, tmp_path / "portable"), want)
    spec = BaseSpec(model=str(project / "base"), dtype="float32")
    assert write_merged(folder, spec, tmp_path / "merged") is torch.float32
    merged, loading = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(loading.values()), "nothing missing, nothing left over"
    assert_same(by_transformers(merged.eval()), want)
    untouched = tiny_wrapper(family, torch.float32).state_dict()
    for name, value in merged.state_dict().items():
        if "language_model" not in name:
            assert torch.equal(value, untouched[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_a_merged_wrapper_in_shards_and_another_dtype(project, family, tmp_path):
    tiny_wrapper(family, torch.float32).save_pretrained(tmp_path / "base", max_shard_size="30KB")
    shutil.copy(project / "base" / "tokenizer.json", tmp_path / "base")
    spec = BaseSpec(model=str(tmp_path / "base"))
    assert write_merged(project / "out" / "every", spec, tmp_path / "low", "bfloat16") is torch.bfloat16
    assert json.loads((tmp_path / "low" / "config.json").read_text())["dtype"] == "bfloat16"
    low, loading = AutoModelForImageTextToText.from_pretrained(tmp_path / "low", output_loading_info=True)
    assert low.dtype is torch.bfloat16
    assert not any(loading.values())
    peft = PeftModel.from_pretrained(tiny_wrapper(family, torch.float32), project / "out" / "every")
    full = peft.merge_and_unload().state_dict()
    for name, value in low.state_dict().items():
        torch.testing.assert_close(value.float(), full[name], rtol=2**-7, atol=2**-8)


def test_generate_says_what_the_wrapper_says_with_the_adapter(family, project):
    folder, tokenizer = project / "out" / "every", AutoTokenizer.from_pretrained(project / "base")
    spec = BaseSpec(model=str(project / "base"), dtype="float32")
    said = generate_answers(spec, {"a": folder}, "w10 w20", max_tokens=6, device=CPU)
    wrapper = PeftModel.from_pretrained(tiny_wrapper(family, torch.float32), folder).eval()
    tokens = list(prompt_tokens(tokenizer, "w10 w20"))
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + 6 and tokens[-1] != tokenizer.eos_token_id:
            tokens.append(int(wrapper(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert said["a"] == tokenizer.decode(tokens[start:], skip_special_tokens=True).strip()
    assert said["a"] != said["base"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_adapters_that_it_would_have_had(project, tmp_path):
    for name in ("base", "rows.jsonl", "jobs.yaml"):
        (tmp_path / name).symlink_to(project / name)

    def crash(event):
        if getattr(event, "step", 0) == 2:
            raise Crash

    with pytest.raises(Crash):
        train(tmp_path / "jobs.yaml", output=tmp_path / "out", progress=False, callback=crash)
    train(tmp_path / "jobs.yaml", output=tmp_path / "out", progress=False, resume=True)
    assert_same_results(tmp_path / "out", project / "out")
