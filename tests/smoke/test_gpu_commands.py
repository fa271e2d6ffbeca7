"""Every command that the README and the guide name for a GPU, with one process to train.

Run with `make smoke-gpu`. Each command is a process of its own, as a user starts it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import bench
from tests.smoke.commands import assert_trained, jobs_file, losses, surroundings, weftune

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]


def test_train_teaches_both_jobs(plain):
    assert_trained(plain)
    for found in losses(plain).values():
        assert found[-1] < 0.9 * found[0]


def test_a_sweep_leaves_its_best_trial_and_those_that_lost_left_early(stories, tmp_path):
    spec = yaml.safe_load(stories.read_text())
    over = {"learning_rate": [1e-5, 1e-3, 3e-3], "adapter": [{"rank": 4}, {"rank": 16}]}
    spec["defaults"] |= {"data": str(stories.parent / "rows.jsonl")}
    spec["jobs"] = [{"name": "cats", "sweep": {"over": over, "halving": {"at": [0.3], "keep": 0.5}}}]
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(spec))
    output = tmp_path / "output"
    weftune("train", tmp_path / "jobs.yaml", "--output", output, "--device", "cuda")
    found = losses(output)
    assert sorted(map(len, found.values())) == [6, 6, 6, 20, 20, 20]
    assert not any(len(found[f"cats-r{rank}-lr1e-5"]) == 20 for rank in (4, 16))
    best = output / "cats" / "best"
    assert yaml.safe_load((best / "job.yaml").read_text())["job"]["learning_rate"] > 1e-5
    assert load_file(best / "adapter_model.safetensors")


def test_generate_answers_beside_the_base(plain):
    asked = ("There were 7 cats.", "--against-base", "--max-tokens", "12", "--device", "cuda")
    said = weftune("generate", plain / "large", *asked).said
    assert "base (" in said
    # Of twelve tokens in each of two columns, with their titles.
    assert len(re.findall("[A-Za-z]{2,}", said)) > 10, said


def test_a_file_of_prompts_is_answered_by_both_adapters(plain, tmp_path):
    rows = [{"prompt": f"There were {n} cats."} for n in range(3, 9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ("--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "said.jsonl", "--plain")
    weftune("generate", plain / "large", plain / "small", *files, "--max-tokens", "24", "--device", "cuda")
    lines = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [(line["index"], line["adapter"]) for line in lines] == [
        (index, name) for index in range(len(rows)) for name in ("large", "small")
    ]
    assert all("cats" in line["completion"] or "hats" in line["completion"] for line in lines), lines


def test_eval_ranks_both_adapters_before_the_base(plain, stories, tmp_path):
    files = ("--data", stories.parent / "rows.jsonl", "--json", tmp_path / "scores.json")
    weftune("eval", plain / "large", plain / "small", *files, "--max-tokens", "8", "--device", "cuda")
    scores = {one["adapter"]: one for one in json.loads((tmp_path / "scores.json").read_text())["results"]}
    assert set(scores) == {"base", "large", "small"}
    assert scores["base"]["loss"] > max(scores[name]["loss"] for name in ("large", "small"))
    assert {one["rows"] for one in scores.values()} == {64}


def test_dpo_learns_from_preferences(tmp_path):
    rows = [
        {"prompt": f"There were {n} cats.", "chosen": f" They had {n} hats.", "rejected": " They slept."}
        for n in range(2, 66)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"objective": {"kind": "dpo", "beta": 0.2}, "learning_rate": 1e-3, "eval": {"fraction": 0.2}}
    jobs = jobs_file(tmp_path, bench.STORIES, tmp_path / "pairs.jsonl", **more)
    weftune("train", jobs, "--output", tmp_path / "out", "--device", "cuda")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    first = [line for line in lines if line.get("step") == 1 and "loss" in line]
    assert [line["loss"] for line in first] == pytest.approx([math.log(2)] * 2, abs=0.02)
    last = [line for line in lines if "eval_rewards/accuracies" in line][-2:]
    assert all(line["eval_loss"] < math.log(2) for line in last), last
    assert all(line["eval_rewards/accuracies"] > 0.8 for line in last), last


def test_kto_learns_from_labels(tmp_path):
    rows = [
        {"prompt": f"There were {n} cats.", "completion": f" They had {n} hats.", "label": bool(n % 2)}
        for n in range(2, 66)
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"objective": {"kind": "kto"}, "learning_rate": 1e-3, "eval": {"fraction": 0.2}}
    jobs = jobs_file(tmp_path, bench.STORIES, tmp_path / "labels.jsonl", **more)
    weftune("train", jobs, "--output", tmp_path / "out", "--device", "cuda")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_loss" in line][-2:]
    assert all(math.isfinite(line["eval_loss"]) for line in last), last


def test_held_out_prompts_are_answered_at_evaluations(stories, tmp_path):
    spec = yaml.safe_load(stories.read_text())
    generate = {"prompts": 2, "max_new_tokens": 6}
    spec["defaults"] |= {"eval": {"fraction": 0.1, "generate": generate, "metric": "exact_match"}}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(spec))
    weftune("train", tmp_path / "jobs.yaml", "--output", tmp_path / "out", "--device", "cuda")
    assert_trained(tmp_path / "out")
    for job in ("small", "large"):
        assert json.loads((tmp_path / "out" / job / "answers.json").read_text())


def test_export_portable_and_merged(plain, tmp_path):
    shutil.copytree(plain / "small", tmp_path / "small")
    weftune("export", tmp_path / "small", "--portable")
    weftune("export", tmp_path / "small", "--merged", tmp_path / "merged")
    (portable,) = [path for path in tmp_path.rglob("adapter_config.json") if path.parent.name != "small"]
    config = json.loads(portable.read_text())
    assert config["lora_alpha"] == config["r"]
    merged = load_file(next((tmp_path / "merged").glob("*.safetensors")))
    original = load_file(next(bench.STORIES.glob("*.safetensors")))
    changed = [name for name, value in original.items() if not torch.equal(value, merged[name])]
    assert any("q_proj" in name for name in changed)


def test_report_draws_it_again(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "again")
    (tmp_path / "again" / "report.html").unlink()
    weftune("report", tmp_path / "again")
    assert (tmp_path / "again" / "report.html").exists()


def test_interrupted_it_goes_on_to_its_end(stories, tmp_path):
    steps = 300
    long = yaml.safe_load(stories.read_text())
    long["defaults"]["steps"] = steps
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(long))
    output = tmp_path / "output"
    words = [sys.executable, "-m", "weftune", "train", str(tmp_path / "long.yaml"), "--output", str(output)]
    process = subprocess.Popen(words, env=surroundings(), stdout=subprocess.DEVNULL)
    wait_for_steps(output, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert all(1 < len(found) < steps for found in losses(output).values())
    weftune("train", tmp_path / "long.yaml", "--output", output, "--resume")
    assert_trained(output, steps=steps)


def wait_for_steps(output: Path, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "it ended by itself"
        found = losses(output) if (output / "metrics.jsonl").exists() else {}
        if len(found) == 2 and min(map(len, found.values())) > 1:
            return
        time.sleep(0.1)
    raise AssertionError("no step in a minute")


def test_resume_and_restart_one_job(stories, plain, tmp_path):
    shutil.copytree(plain, tmp_path / "output")
    weftune("train", stories, "--output", tmp_path / "output", "--resume", "--restart", "small")
    assert_trained(tmp_path / "output", plain)


def test_memory_by_hand(stories, plain, tmp_path):
    weftune("train", stories, "--output", tmp_path / "output", "--memory", "8GiB")
    assert_trained(tmp_path / "output", plain)


def test_a_plan_for_other_gpus_and_its_picture(stories, tmp_path):
    said = weftune("plan", stories, "--cluster", "4xA100-80G", "--gantt", tmp_path / "plan.html").said
    assert "A100" in said
    assert (tmp_path / "plan.html").stat().st_size > 10_000
