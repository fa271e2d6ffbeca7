"""What `weftune plan` says of a sweep."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.data import families
from tests.plan.outlooks import CONFIG
from weftune.cli.main import main
from weftune.cli.plan_text import show_sweeps
from weftune.jobs.spec.read import parse_run
from weftune.launch.plan_sweeps import collapse_trials, expected_seconds, sweep_outlooks
from weftune.plan.outlook.whole_run import JobTotal, WholeRun

ROWS = [{"text": "one"}, {"text": "two"}]
HALVING = {"at": [0.1, 0.3], "keep": 0.33}
OVER = {"adapter.rank": [4, 8, 16, 32], "learning_rate": [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4]}


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """The command on a jobs file with these jobs."""
    families.smollm2().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"text": " ".join(["word"] * (20 + 7 * number % 20))} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*jobs, cluster="H200", words=()):
        keys = {"data": "rows.jsonl", "steps": 200, "batch_size": 4, "eval": {"fraction": 0.1}}
        whole = [keys | job for job in jobs]
        (tmp_path / "jobs.yaml").write_text(json.dumps({"base": "./base", "jobs": whole}))
        arguments = ["plan", "jobs.yaml", "--cluster", cluster, "--json", "out.json", *words]
        monkeypatch.setattr(sys, "argv", ["weftune", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return printed.out, json.loads((tmp_path / "out.json").read_text())

    return call


def test_a_plan_lists_the_trials_and_says_what_halving_saves(plan):
    out, numbers = plan({"name": "sql", "sweep": {"over": OVER, "halving": HALVING}}, {"name": "other"})
    words = " ".join(out.split())
    assert "25 jobs on 1xH200" in words
    assert "for the whole run if no trial leaves early" in words
    assert len([line for line in out.splitlines() if line.startswith("│ sql-r")]) == 24
    assert (
        "Sweep sql: 24 trials; 8 after step 20 and 3 after step 60 continue. That takes 4,880 samples "
        "instead of 19,200, 25%." in words
    )
    assert "Not tokenised yet, and estimated from the first rows: sql (24 trials), other." in words
    (sweep,) = numbers["sweeps"]
    assert sweep["rungs"] == [
        {"step": 20, "trials": 24},
        {"step": 60, "trials": 8},
        {"step": 200, "trials": 3},
    ]
    assert sweep["samples"] == {"all": 19200, "expected": 4880}
    assert sweep["listed"][7]["values"] == {"adapter.rank": 8, "learning_rate": 2e-4}
    assert sweep["listed"][0]["state_bytes"] < sweep["listed"][-1]["state_bytes"]
    assert all(0 < trial["ends"] <= numbers["run"]["seconds"] for trial in sweep["listed"])
    assert numbers["expected_seconds"] < 0.4 * numbers["run"]["seconds"]


def test_a_plan_warns_of_a_rung_within_the_warm_up(plan):
    job = {"name": "sql", "sweep": {"over": OVER, "halving": HALVING}}
    out, _ = plan(job | {"warmup": 25})
    assert (
        "warning: sql: sweep.halving.at: the first rung is at step 20, and trials warm up until step 25"
        in out
    )
    assert "warning" not in plan(job | {"warmup": 19})[0]


def test_a_plan_without_a_sweep_has_no_keys_for_one(plan):
    out, numbers = plan({"name": "other"})
    assert not {"sweeps", "expected_seconds"} & numbers.keys()
    assert "trial" not in out


def test_trials_are_divided_among_devices_if_that_is_requested(plan):
    job = {"name": "sql", "sweep": {"over": OVER, "halving": HALVING}}
    out, numbers = plan(job, cluster="2xA100-80G", words=("--gpus", "2"))
    assert sorted(len(share["jobs"]) for share in numbers["shares"]) == [12, 12]
    assert "Shares wait for one another at every rung, which is not counted." in out
    alone = plan(job, cluster="A100-80G")[1]
    assert 0.4 < numbers["run"]["seconds"] / alone["run"]["seconds"] < 0.7
    assert numbers["expected_seconds"] < 0.4 * numbers["run"]["seconds"]


@pytest.mark.slow
def test_the_search_does_not_divide_the_trials_of_a_sweep(plan):
    out, numbers = plan({"name": "sql", "sweep": {"over": OVER}}, cluster="2xA100-80G")
    assert "--gpus" not in out
    assert numbers["shares"] is None
    assert "Sweep sql: 24 trials, all trained to their end." in out
    assert "--gpus 2" in plan({"name": "a"}, {"name": "b"}, cluster="2xA100-80G")[0]


def test_tpe_lists_its_first_generation_and_counts_all(plan):
    pytest.importorskip("optuna")
    sweep = {
        "search": "tpe",
        "trials": 24,
        "over": {"learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}},
    }
    out, numbers = plan({"name": "sql", "sweep": sweep})
    assert "Sweep sql: 24 trials, of which the first 6 are known, all trained to their end." in out
    assert (numbers["sweeps"][0]["trials"], len(numbers["sweeps"][0]["listed"])) == (24, 6)
    assert numbers["expected_seconds"] == pytest.approx(4 * numbers["run"]["seconds"])


def test_a_plan_counts_the_mean_that_rungs_judge(plan):
    over = {"adapter.rank": [4, 8]}
    found = {}
    for judge in ("mean", "last"):
        halving = HALVING | {"judge": judge}
        _, numbers = plan({"name": "sql", "sweep": {"over": over, "halving": halving}}, {"name": "other"})
        found[judge] = {name: job["state_bytes"] for name, job in numbers["run"]["jobs"].items()}
    assert found["mean"].keys() == found["last"].keys() == {"sql-r4", "sql-r8", "other"}
    assert found["mean"]["other"] == found["last"]["other"]
    for name in ("sql-r4", "sql-r8"):
        # bf16: a compute copy of 2 bytes, and 4 each of master, gradient and two moments.
        assert found["mean"][name] * 18 == found["last"][name] * 22


def outlook(halving=None):
    jobs = [
        {"name": "a", "data": ROWS, "eval": {"fraction": 0.5}, "batch_size": 4,
         "sweep": {"over": {"adapter.rank": [4, 8, 16, 32]}, **({"halving": halving} if halving else {})}},
        {"name": "b", "data": ROWS},
    ]  # fmt: skip
    run = parse_run({"base": "demo", "jobs": jobs}, Path("somewhere"))
    totals = {job.name: JobTotal(steps=100, tokens=50.0, state_bytes=1) for job in run.jobs}
    return run, sweep_outlooks(run.sweeps, run.jobs, totals), totals


def test_the_run_is_expected_to_take_what_its_tokens_take():
    run, sweeps, totals = outlook({"at": [0.5], "keep": 0.5})
    whole = WholeRun({job.name: 100.0 for job in run.jobs}, 1, 1)
    # Four trials to the middle and two on from there, beside one job: four of five.
    assert expected_seconds(whole, sweeps, totals) == pytest.approx(100 * (4 * 50 + 2 * 50 + 100) / 500)
    _, plain, _ = outlook()
    assert expected_seconds(whole, plain, totals) == pytest.approx(100)


def test_trials_of_a_sweep_are_named_as_one_where_names_are_listed():
    run, _, _ = outlook()
    assert collapse_trials([job.name for job in run.jobs], run.sweeps) == ["a (4 trials)", "b"]
    assert collapse_trials(["b", "a-r8"], run.sweeps) == ["b", "a-r8"]


def test_a_sweep_is_a_table_a_sentence_and_the_time_that_is_expected():
    run, sweeps, totals = outlook({"at": [0.5], "keep": 0.5})
    console = Console(file=io.StringIO(), width=60)
    show_sweeps(console, WholeRun({job.name: 100.0 for job in run.jobs}, 1, 1), sweeps, totals)
    assert "Sweep a" in console.file.getvalue()
    assert "Expected for the whole run with all of its trials: 80 s." in console.file.getvalue()
