"""Jobs with preference objectives train beside supervised jobs of other kinds to the same losses, metrics and
adapters in every way of running."""

from __future__ import annotations

import json
import random

import pytest

from tests.cases import slow_but
from tests.launches import deep_folder
from tests.objectives.ways import WAYS
from tests.outputs import assert_same_job, assert_same_results, assert_whole, jobs_folder, lines
from weftune.objectives.spec import PAIR_METRICS

PAIRS = {"path": "pairs.jsonl"}
JOBS = [
    {"name": "plain", "steps": 6, "adapter": {"kind": "vera", "rank": 4}},
    {"name": "cpo", "steps": 6, "data": PAIRS, "adapter": {"kind": "dora", "rank": 3}, "objective": "cpo",
     "eval": {"fraction": 0.3, "every": 3}, "keep": "best"},
    {"name": "orpo", "steps": 5, "data": PAIRS, "adapter": {"kind": "ia3"},
     "objective": {"kind": "orpo", "beta": 0.4}, "eval": {"fraction": 0.3}},
    {"name": "dpo", "steps": 6, "data": PAIRS, "adapter": {"rank": 2, "dropout": 0.1}, "batch_size": 3,
     "objective": {"kind": "dpo", "loss_type": "ipo"}, "eval": {"fraction": 0.3, "every": 2}},
]  # fmt: skip


def write_pairs(path):
    rng = random.Random(7)

    def text(least, most):
        return " ".join(f"w{rng.randrange(6, 97)}" for _ in range(rng.randrange(least, most)))

    rows = [
        {"prompt": text(1, 8), "chosen": f" {text(1, 9)}", "rejected": f" {text(1, 9)}"} for _ in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("pairs"), JOBS)
    write_pairs(folder / "pairs.jsonl")
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    assert_whole(folder / "undisturbed")
    return folder


def metrics_of(output, job):
    names = [*PAIR_METRICS, *(f"eval_{name}" for name in PAIR_METRICS)]
    return {
        (line["step"], name): line[name] for line in lines(output) if line["job"] == job for name in names
        if name in line
    }  # fmt: skip


def assert_same_metrics(output, undisturbed):
    for job in JOBS[1:]:
        wanted = metrics_of(undisturbed, job["name"])
        assert metrics_of(output, job["name"]) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def assert_same(output, place):
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    assert_same_metrics(output, place / "undisturbed")


def test_every_step_and_evaluation_of_a_pair_job_has_its_metrics(place):
    for job in JOBS[1:]:
        found = metrics_of(place / "undisturbed", job["name"])
        assert {(step, name) for step in range(1, job["steps"] + 1) for name in PAIR_METRICS} <= found.keys()
        assert {(job["steps"], f"eval_{name}") for name in PAIR_METRICS} <= found.keys()
        assert all(0 <= value <= 1 for (_, name), value in found.items() if "accuracies" in name)
    assert metrics_of(place / "undisturbed", "plain") == {}


@pytest.mark.parametrize("name", ["cpo", "orpo", "dpo"])
def test_a_pair_job_alone_equals_the_same_job_among_others(name, place, forks):
    folder = place / f"only-{name}"
    folder.mkdir(exist_ok=True)
    for file in ("model", "a.jsonl", "pairs.jsonl"):
        (folder / file).symlink_to(place / file)
    jobs_folder(folder, [job for job in JOBS if job["name"] == name])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    assert_same_job(folder / "out", place / "undisturbed", name)
    wanted = metrics_of(place / "undisturbed", name)
    assert metrics_of(folder / "out", name) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("way", slow_but(WAYS, ["a pipeline"]))
def test_however_they_run_they_end_as_in_one_process(way, place, forks):
    assert_same(WAYS[way](place, forks), place)


def test_a_sweep_over_beta_compares_its_trials_by_the_accuracy_of_rewards(place, forks):
    folder = place / "sweep"
    folder.mkdir()
    for file in ("model", "a.jsonl", "pairs.jsonl"):
        (folder / file).symlink_to(place / file)
    over = {"over": {"objective.beta": [0.1, 2.0]}, "metric": "eval_rewards/accuracies"}
    jobs_folder(folder, [{**JOBS[1], "sweep": over}])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    record = json.loads((folder / "out" / "cpo" / "sweep.json").read_text())
    assert (record["metric"], record["mode"]) == ("eval_rewards/accuracies", "max")
    assert (folder / "out" / "cpo" / "best" / "adapter_config.json").exists()
    scores = [trial["score"] for trial in record["trials"]]
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores)
