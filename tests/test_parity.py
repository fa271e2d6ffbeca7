"""PEFT is the oracle: two jobs trained together equal each trained alone by PEFT on the same batches."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import bench, oracle
from tests.cases import asks_for_every_case, slow_but
from tests.families import FAMILIES, tiny
from weftune import JobSpec, Options, Trainer
from weftune.core.files import cache_folder
from weftune.data.prepare import prepare
from weftune.data.samples import SampleOrder
from weftune.data.spec import DataSpec

STEPS, REAL_STEPS = (20 if asks_for_every_case() else 10), 20


def two_jobs(family, folder):
    """Different rank, alpha, targets, data, batch size, schedule and optimizer; each from a PEFT start."""
    narrow = {"gpt2": ["c_attn"], "phi3": ["qkv_proj", "o_proj"]}.get(family, ["q_proj", "v_proj"])
    settings = [
        dict(
            rank=4, alpha=8.0, targets="all-linear", seed=3, batch_size=5, schedule="linear", warmup=3, wd=0.0
        ),
        dict(
            rank=7,
            alpha=21.0,
            targets=narrow,
            seed=4,
            batch_size=3,
            schedule="cosine",
            warmup=0,
            wd=0.1,
            betas=(0.8, 0.95),
            eps=1e-5,
        ),
    ]
    model = tiny(family, torch.float64)
    for index, s in enumerate(settings):
        s["samples"] = bench.samples(23, seed=index)
        s["config"] = oracle.lora_config(model, s["rank"], s["alpha"], s["targets"])
        s["start"] = oracle.write_start(
            folder / f"start{index}", model, s["config"], seed=index, b_scale=0.02
        )
    return settings


def spec(index, s, **changes):
    adapter = dict(rank=s["rank"], alpha=s["alpha"], targets=s["targets"], init_from=str(s["start"]))
    return JobSpec(
        name=f"job{index}",
        data=bench.rows(s["samples"]),
        adapter=adapter | changes,
        steps=STEPS,
        batch_size=s["batch_size"],
        learning_rate=1e-3,
        schedule=s["schedule"],
        warmup=s["warmup"],
        weight_decay=s["wd"],
        betas=s.get("betas", (0.9, 0.999)),
        eps=s.get("eps", 1e-8),
        seed=s["seed"],
    )


def by_peft(family, s):
    adam = {key: s[key] for key in ("betas", "eps") if key in s}
    recipe = oracle.Recipe(STEPS, 1e-3, s["schedule"], s["warmup"], s["wd"], **adam)
    batches = bench.batches(s["samples"], s["batch_size"], s["seed"], STEPS)
    return oracle.train_with_peft(tiny(family, torch.float64), s["config"], s["start"], batches, recipe)


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["llama", "gemma3", "phi3", "opt", "gpt2"]))
def test_two_jobs_together_equal_solo_peft_in_float64(family, tmp_path):
    settings = two_jobs(family, tmp_path)
    bench.train(
        bench.base(family), tmp_path / "out", [spec(i, s) for i, s in enumerate(settings)], capacity=64
    )
    for index, s in enumerate(settings):
        start = bench.adapter(s["start"])
        oracle.assert_equal_float64(bench.trained(tmp_path / "out", f"job{index}", start), by_peft(family, s))


def test_the_comparison_fails_when_the_scale_is_one_percent_off(tmp_path):
    settings = two_jobs("llama", tmp_path)
    wrong = spec(0, settings[0], alpha=settings[0]["alpha"] * 1.01)
    bench.train(bench.base("llama"), tmp_path / "out", [wrong])
    got = bench.trained(tmp_path / "out", "job0", bench.adapter(settings[0]["start"]))
    with pytest.raises(AssertionError):
        oracle.assert_equal_float64(got, by_peft("llama", settings[0]))


def test_the_comparison_fails_when_one_site_is_left_untrained(tmp_path):
    s = two_jobs("llama", tmp_path)[0]
    left_out = "model.layers.1.mlp.up_proj"
    partial = tmp_path / "partial"
    shutil.copytree(s["start"], partial)
    kept = {k: v for k, v in load_file(s["start"] / "adapter_model.safetensors").items() if left_out not in k}
    save_file(kept, partial / "adapter_model.safetensors")
    job = spec(0, s, targets=rf"(?!{left_out}$).*_proj", init_from=str(partial))
    bench.train(bench.base("llama"), tmp_path / "out", [job])
    got = oracle.Trained(
        bench.losses(tmp_path / "out", "job0"),
        kept | {k: v for k, v in bench.adapter(s["start"]).items() if left_out in k},
        bench.adapter(tmp_path / "out" / "job0"),
    )
    want = by_peft("llama", s)
    assert oracle.distance(got.moved(), want.moved()) > 0.5
    with pytest.raises(AssertionError):
        oracle.assert_equal_float64(got, want)


@pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here")
@pytest.mark.parametrize("steps", slow_but([3, REAL_STEPS], [3]))
def test_two_jobs_together_equal_solo_peft_on_stories15m_in_float32(steps, tmp_path):
    batch_size, characters = (4, 160) if steps == REAL_STEPS else (2, 64)
    real_model_equals_peft(
        {"model": str(bench.STORIES), "dtype": "float32"},
        str(bench.STORIES),
        bench.questions(2 * batch_size, characters),
        tmp_path,
        steps,
        batch_size,
    )


def real_model_equals_peft(base, folder, rows, tmp_path, steps=REAL_STEPS, batch_size=4):
    """Two jobs at 1e-3 equal PEFT; in 20 steps their losses fall by a fifth, and in any number they fall."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    precise = copy.deepcopy(model).double()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = Trainer(base, output=tmp_path / "out", options=Options(device="cpu"))
    jobs = []
    for index, (rank, targets) in enumerate([(8, "all-linear"), (16, ["q_proj", "v_proj"])]):
        config = oracle.lora_config(model, rank, 16.0, targets)
        start = oracle.write_start(tmp_path / f"start{index}", model, config, seed=index)
        jobs.append((config, start))
        trainer.add(
            JobSpec(
                name=f"job{index}",
                data=rows,
                adapter=dict(rank=rank, alpha=16.0, targets=targets, init_from=str(start)),
                steps=steps,
                batch_size=batch_size,
                learning_rate=1e-3,
                seed=index,
            )
        )
    trainer.run()
    made = prepare(DataSpec(rows=rows), None, tokenizer, cache_folder()).train
    every = [(made.tokens(i).tolist(), made.mask(i).tolist()) for i in range(len(made))]
    for index, (config, start) in enumerate(jobs):
        order = SampleOrder(len(every), batch_size, index)
        batches = [[every[i] for i in order.batch(step)] for step in range(1, steps + 1)]
        recipe = oracle.Recipe(steps)
        want = oracle.train_with_peft(model, copy.deepcopy(config), start, batches, recipe)
        twin = oracle.train_with_peft(model, copy.deepcopy(config), start, batches, recipe, padded=False)
        exact = oracle.train_with_peft(precise, copy.deepcopy(config), start, batches, recipe)
        got = bench.trained(tmp_path / "out", f"job{index}", bench.adapter(start))
        oracle.assert_equal_float32(got, want, twin, exact)
        assert got.losses[-1] < (0.8 if steps >= REAL_STEPS else 1.0) * got.losses[0]
