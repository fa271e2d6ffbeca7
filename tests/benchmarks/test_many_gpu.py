"""Many jobs against a few, as the benchmark for a GPU starts them, with a tiny shape on the CPU."""

import json
import sys

import pytest
import yaml

from benchmarks import many_jobs
from benchmarks.commands import Run
from benchmarks.many_gpu import CASES, FEW, MANY, Side, ratio, round_ends, write_case
from weftune.bench.timing import bench_hardware


def test_many_jobs_have_as_many_samples_in_a_round_as_a_few(tmp_path):
    case = CASES["toy"]
    write_case(tmp_path, case, bench_hardware(toy=True), steps=2)
    for name, count in case.counts.items():
        spec = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        assert len(spec["jobs"]) == count
        assert count * spec["defaults"]["batch_size"] == case.many


@pytest.mark.parametrize("name", [name for name in CASES if name != "toy"])
def test_the_few_share_the_samples_evenly(name):
    assert CASES[name].many % CASES[name].few == 0


def test_a_round_ends_with_its_last_step():
    lines = [
        {"job": "a", "step": 1, "loss": 1.0, "time": 1.0},
        {"job": "b", "step": 1, "loss": 1.0, "time": 3.0},
        {"job": "a", "step": 2, "loss": 1.0, "time": 4.0},
        {"job": "a", "step": 2, "eval_loss": 1.0, "time": 9.0},
        {"job": "b", "step": 2, "loss": 1.0, "time": 5.0},
    ]
    assert round_ends(lines) == [3.0, 5.0]


def test_the_first_round_does_not_count():
    def side(*rounds):
        run = Run(name="", exit_code=0, seconds=1.0)
        return Side(jobs=1, finished=1, rounds=rounds, run=run)

    assert side(9.0, 1.0, 2.0, 3.0).round_seconds == 2.0
    assert ratio({FEW: side(9.0, 2.0), MANY: side(9.0, 3.0)}) == 1.5
    assert ratio({FEW: side(9.0), MANY: side(9.0, 3.0)}) is None


@pytest.mark.slow
def test_all_jobs_finish_and_the_wall_time_is_split(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["many_jobs", "--gpu", "toy", "--steps", "3", "--json", str(file)])
    many_jobs.main()
    found = json.loads(file.read_text())
    assert found["ratio"] > 0
    for name, count in CASES["toy"].counts.items():
        side = found["sides"][name]
        assert side["finished"] == side["jobs"] == count
        assert len(side["rounds"]) == 2
        assert {"loading", "training", "export"} <= side["run"]["phases"].keys()
