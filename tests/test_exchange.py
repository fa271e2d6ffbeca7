"""What Weftune trains PEFT loads with the same logits, and the other way round; exports keep both."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import bench, oracle
from tests.adapters.attached_banks import banks_with, logits, together
from tests.base.folders import model_folder
from tests.base.packs import random_samples
from tests.cases import slow_but
from tests.families import FAMILIES, tiny
from weftune import JobSpec, train
from weftune.adapters.lora.spec import read_spec
from weftune.base.model import Base
from weftune.base.spec import DEMO_HUB_ID, BaseSpec
from weftune.cli.generate import recorded_base
from weftune.jobs.store.status import State
from weftune.trainer.export import write_merged, write_portable

SAMPLES = random_samples((9, 4, 13))
FLOAT32 = ("llama", "gpt2", "qwen2")
CASES = [(family, torch.float64) for family in FAMILIES] + [(family, torch.float32) for family in FLOAT32]
STARTS = ({}, {"use_rslora": True, "rank_pattern": {r".*\.1\..*": 3}})
"""Keys of adapters that a job starts from."""
JOBS = ("plain", "rslora", "patterns", "wide")
CLOSE = 1e-6
"""In float64 too: most families normalise in float32 whatever the dtype, where a last bit can flip."""


def adapters(family: str) -> dict[str, dict]:
    """Every way to state a scale and a rank; the names are those that the family has."""
    sites = [site.name for site in bench.base(family).shape.sites]
    ending = next(name for name in sites if ".1." in name).rpartition(".")[2]
    return {
        "plain": dict(rank=4, alpha=6.0),
        "rslora": dict(rank=5, alpha=7.5, rslora=True, targets=rf".*\.1\..*{ending}"),
        "patterns": dict(
            rank=3,
            alpha=6.0,
            rank_pattern={ending: 6, sites[-1]: 2},
            alpha_pattern={ending: 2.5, sites[-2]: 11.0},
        ),
        "wide": dict(
            rank=20,
            alpha=8.0,
            targets=[ending],
            rslora=True,
            rank_pattern={rf".*\.1\..*{ending}": 24},
            dropout=0.1,
        ),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output folder of all four jobs trained together for three steps, once for each family and dtype."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def output(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}".replace(".", "-"))
            rows = bench.rows(bench.samples(8))
            jobs = [
                JobSpec(
                    name=name, data=rows, adapter=adapter, steps=3, batch_size=3, learning_rate=2e-2, warmup=0
                )
                for name, adapter in adapters(family).items()
            ]
            results = bench.train(bench.base(family, dtype), folder, jobs)
            assert all(result.state is State.SUCCEEDED for result in results.values())
            made[family, dtype] = folder
        return made[family, dtype]

    return output


def by_weftune(family, dtype, folder):
    """Logits from the packed pass of Weftune, the folder's adapter aboard as `init_from`."""
    base = bench.base(family, dtype)
    spec = replace(read_spec(folder), init_from=str(folder))
    banks = banks_with(base, {"a": spec})
    return logits(base, banks, together(["a"] * len(SAMPLES), SAMPLES))


@torch.no_grad()
def by_transformers(model):
    return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in SAMPLES]


def by_peft(family, dtype, folder):
    return by_transformers(PeftModel.from_pretrained(tiny(family, dtype), folder).eval())


def assert_same(got, want, tolerance):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def gap(first, second):
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_but(CASES, [one for one in CASES if one[1] == torch.float64 or one[0] == "gpt2"]),
)
def test_peft_loads_what_weftune_trained_and_computes_the_same(family, dtype, trained):
    bare = by_transformers(tiny(family, dtype))
    for job in JOBS:
        folder = trained(family, dtype) / job
        mine, theirs = by_weftune(family, dtype, folder), by_peft(family, dtype, folder)
        assert_same(mine, theirs, CLOSE if dtype is torch.float64 else 1e-5)
        assert gap(theirs, bare) > 1e-2, "the adapter must do something, or anything would be equal"


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["llama", "phi3", "gpt2"]))
def test_a_portable_export_computes_the_same_with_one_rank_and_no_scale(family, trained, tmp_path):
    for job in JOBS:
        folder, target = trained(family, torch.float64) / job, tmp_path / job
        rank = write_portable(folder, target)
        assert_same(by_peft(family, torch.float64, target), by_peft(family, torch.float64, folder), CLOSE)
        assert_portable(target, rank)


def assert_portable(folder: Path, rank: int) -> None:
    """What CONVENTIONS.md says that vLLM and SGLang read, want and ignore."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], type(config["lora_alpha"])) == (rank, rank, int)
    assert (config["use_rslora"], config["use_dora"], config["bias"]) == (False, False, "none")
    assert (config["rank_pattern"], config["alpha_pattern"], config["modules_to_save"]) == ({}, {}, None)
    assert isinstance(config["target_modules"], list)
    weights = bench.adapter(folder)
    for name, value in weights.items():
        assert name.startswith("base_model.model.")
        part = name.rpartition(".lora_")[2]
        assert value.shape[0 if part == "A.weight" else 1] == rank
        assert part in ("A.weight", "B.weight")
    sites = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in weights}
    assert all(any(site.endswith(target) for target in config["target_modules"]) for site in sites)


def test_a_scale_that_is_one_percent_off_would_be_seen(trained, tmp_path):
    folder = trained("llama", torch.float64) / "patterns"
    rank = write_portable(folder, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 1.01 * rank}))
    wrong = by_peft("llama", torch.float64, tmp_path)
    assert gap(wrong, by_peft("llama", torch.float64, folder)) > 1e-3


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["gemma3", "phi3", "gpt2"]))
def test_a_merged_export_is_a_plain_model_that_computes_the_same(family, trained, tmp_path):
    base = model_folder(tmp_path / "base", family)
    for job in ("rslora", "patterns"):
        folder, target = trained(family, torch.float32) / job, tmp_path / job
        assert write_merged(folder, BaseSpec(model=str(base)), target) is torch.float32
        merged, loading = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert not any(loading.values()), "nothing missing, nothing left over"
        assert_same(by_transformers(merged.eval()), by_peft(family, torch.float32, folder), 1e-5)
        assert AutoTokenizer.from_pretrained(target).get_vocab() == bench.tokenizer().get_vocab()


@pytest.mark.parametrize("family", slow_but(FLOAT32, ["gpt2"]))
def test_portable_and_merged_agree_in_float32(family, trained, tmp_path):
    folder = trained(family, torch.float32) / "wide"
    base = model_folder(tmp_path / "base", family)
    write_portable(folder, tmp_path / "portable")
    write_merged(folder, BaseSpec(model=str(base)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    want = by_peft(family, torch.float32, folder)
    assert_same(by_peft(family, torch.float32, tmp_path / "portable"), want, 1e-5)
    assert_same(by_transformers(merged), want, 1e-5)


@pytest.mark.parametrize(
    ("family", "keys"),
    slow_but(product(FLOAT32, STARTS), [("llama", STARTS[1]), ("gpt2", STARTS[0]), ("qwen2", STARTS[1])]),
)
def test_a_peft_adapter_is_where_a_job_starts_and_goes_on_from(family, keys, tmp_path):
    model = tiny(family)
    config = oracle.lora_config(model, 4, 6.0, "all-linear", **keys)
    start = oracle.write_start(tmp_path / "start", model, config, b_scale=0.2)
    assert_same(by_weftune(family, torch.float64, start), by_peft(family, torch.float64, start), CLOSE)
    made = bench.samples(6)
    adapter = dict(
        rank=4,
        alpha=6.0,
        rslora=bool(keys),
        rank_pattern=keys.get("rank_pattern", {}),
        init_from=str(start),
    )
    job = JobSpec(name="on", data=bench.rows(made), adapter=adapter, steps=3, batch_size=6, warmup=0)
    bench.train(bench.base(family), tmp_path / "out", [job])
    batches = bench.batches(made, 6, job.seed, 3)
    recipe = oracle.Recipe(3, job.learning_rate, job.schedule, 0, job.weight_decay, job.clip)
    want = oracle.train_with_peft(model, config, start, batches, recipe)
    got = bench.trained(tmp_path / "out", "on", bench.adapter(start))
    assert got.losses == pytest.approx(want.losses, rel=CLOSE)
    assert oracle.distance(got.moved(), want.moved()) < 1e-3


def test_the_base_is_named_as_the_user_wrote_it_through_every_export(tmp_path):
    project = tmp_path / "project"
    model_folder(project / "models" / "tiny")
    (project / "rows.jsonl").write_text('{"text": "w10 w20 w30 w40"}\n' * 4)
    (project / "jobs.yaml").write_text(
        "base: models/tiny\noutput: out\njobs:\n- {name: a, data: rows.jsonl, steps: 1, batch_size: 2}\n"
    )
    train(project / "jobs.yaml")
    folder = project / "out" / "a"
    write_portable(folder, tmp_path / "portable")
    for made in (folder, tmp_path / "portable"):
        config = json.loads((made / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "models/tiny"
        assert sorted(config["target_modules"]) == sorted(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        )
    known = recorded_base(folder)
    assert (known.published_name, known.model) == ("models/tiny", str(project / "models" / "tiny"))
    assert yaml.safe_load((folder / "job.yaml").read_text())["base"]["written"] == "models/tiny"


def test_an_adapter_for_the_demo_names_the_hub_id(tmp_path):
    base = Base.from_model(tiny("llama", torch.float32), BaseSpec(model="demo"), bench.CPU)
    job = JobSpec(name="a", data=bench.rows(bench.samples(4)), steps=1, batch_size=2)
    bench.train(base, tmp_path, [job])
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == DEMO_HUB_ID
