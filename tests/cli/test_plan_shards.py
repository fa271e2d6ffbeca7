"""`weftune plan --shards`: what a run would refuse is refused with the same sentence, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data import families
from tests.plan.outlooks import CONFIG
from weftune.base.architecture import refuse_shards
from weftune.base.spec import BaseSpec
from weftune.cli import early, train
from weftune.cli.plan import read_cluster
from weftune.errors import BaseModelError
from weftune.launch.choice import choose_planned_layout, planner_chooses_division
from weftune.launch.plan_case import read_case
from weftune.plan.cost import cluster
from weftune.run.measure import memory

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
SPEC = BaseSpec(model="base")


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_heads_and_widths_that_divide_are_accepted(shards):
    refuse_shards(SPEC, LLAMA, shards)


@pytest.mark.parametrize(
    ("config", "shards", "words"),
    [
        (
            LLAMA,
            3,
            "8 attention heads, 2 key/value heads and a feed-forward of width 96, which 3 shards cannot",
        ),
        ({**LLAMA, "intermediate_size": 90}, 4, "feed-forward of width 90, which 4 shards cannot divide"),
        ({"model_type": "gpt2"}, 2, r"base \(gpt2\) cannot be divided into shards; Weftune knows how"),
        ({"model_type": "mixtral"}, 2, r"base \(mixtral\) cannot be divided into shards"),
    ],
)
def test_a_base_that_shards_cannot_divide_gets_a_sentence(config, shards, words):
    with pytest.raises(BaseModelError, match=words):
        refuse_shards(SPEC, config, shards)


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8"])
def test_quantised_bases_are_accepted(quantize):
    refuse_shards(replace(SPEC, quantize=quantize), LLAMA, 2)


@pytest.mark.parametrize("shards", [4, 8])
def test_fp8_with_repeated_heads_gets_a_sentence(shards):
    refuse_shards(replace(SPEC, quantize="int8"), LLAMA, shards)
    with pytest.raises(BaseModelError, match=f"2 key/value heads, and {shards} shards would round parts of"):
        refuse_shards(replace(SPEC, quantize="fp8"), LLAMA, shards)


def test_train_starts_what_plan_answers(tmp_path, monkeypatch):
    """The launcher asks before any process starts; this machine is pretended to have four GPUs."""
    rows = "".join(json.dumps({"text": "word " * (20 + number)}) + "\n" for number in range(40))
    families.smollm2().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "jobs.yaml").write_text(
        "base: ./base\njobs:\n" + "".join(f"  - {{name: {name}, data: rows.jsonl}}\n" for name in "ab")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster, "_query_smi", lambda: "NVIDIA A10, 23028\n" * 4)
    monkeypatch.setattr(memory, "visible_gpus", lambda device: 4)
    run = early.read_jobs_file(Path("jobs.yaml"))
    none = dict.fromkeys(("device", "memory", "gpu_memory", "pipeline", "gpus"))
    options = early.read_options(**none, replicas=1)
    assert planner_chooses_division(options)
    started = train._choose_processes(run, options, None)
    case = read_case(run, read_cluster("auto"), options, on_this_machine=True)
    machine = choose_planned_layout(case).machine
    assert machine.division.devices > 1
    found = (started.gpus or 1, started.pipeline or 1, started.replicas, started.shards, started.capacity)
    assert found == (machine.shares, machine.workers, machine.replicas, machine.shards, machine.capacity)
    assert not planner_chooses_division(started)
