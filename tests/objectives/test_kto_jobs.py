"""KTO jobs train beside other jobs to the same losses, metrics and adapters in every way of running."""

from __future__ import annotations

import json
import random

import pytest

from tests.cases import slow_but
from tests.launches import deep_folder
from tests.objectives.ways import WAYS
from tests.outputs import assert_same_job, assert_same_results, assert_whole, jobs_folder, lines
from weftune.objectives.spec import OBJECTIVE_METRICS

LABELLED = {"path": "labelled.jsonl"}
JOBS = [
    {"name": "plain", "steps": 6, "adapter": {"kind": "vera", "rank": 4}},
    {"name": "kto", "steps": 7, "data": LABELLED, "adapter": {"rank": 2, "dropout": 0.1}, "batch_size": 5,
     "objective": {"kind": "kto", "beta": 0.8, "undesirable_weight": 1.3}, "learning_rate": 0.02,
     "eval": {"fraction": 0.3, "every": 3}, "keep": "best"},
    {"name": "after", "steps": 5, "data": LABELLED, "objective": "kto", "learning_rate": 0.02,
     "adapter": {"rank": 4, "init_from": {"job": "first"}}, "eval": {"fraction": 0.3}},
    {"name": "first", "steps": 3, "adapter": {"rank": 4}},
    {"name": "virtual", "steps": 4, "data": LABELLED, "objective": {"kind": "kto", "beta": 0.5},
     "adapter": {"kind": "prefix", "num_virtual_tokens": 3}, "eval": {"fraction": 0.3}},
    {"name": "apo", "steps": 5, "data": LABELLED, "adapter": {"kind": "ia3"}, "eval": {"fraction": 0.3},
     "objective": {"kind": "kto", "loss_type": "apo_zero_unpaired"}},
]  # fmt: skip
OURS = [job["name"] for job in JOBS if "objective" in job]


def write_labelled(path):
    rng = random.Random(7)

    def text(least, most, words=97):
        return " ".join(f"w{rng.randrange(6, words)}" for _ in range(rng.randrange(least, most)))

    # With few words in all answers, what is learnt from one answer changes the others, too.
    rows = [
        {"prompt": text(1, 8), "completion": f" {text(1, 9, 10)}", "label": rng.random() < 0.7}
        for _ in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("kto"), JOBS)
    write_labelled(folder / "labelled.jsonl")
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    assert_whole(folder / "undisturbed")
    return folder


def metrics_of(output, job):
    names = [*OBJECTIVE_METRICS, *(f"eval_{name}" for name in OBJECTIVE_METRICS)]
    return {
        (line["step"], name): line[name] for line in lines(output) if line["job"] == job for name in names
        if name in line
    }  # fmt: skip


def assert_same(output, place):
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    for job in OURS:
        wanted = metrics_of(place / "undisturbed", job)
        assert metrics_of(output, job) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_a_policy_begins_at_the_loss_of_its_reference_with_and_without_another_adapter(place):
    for job, weight in (("kto", 1.3), ("after", 1.0)):
        own = [line for line in lines(place / "undisturbed") if line["job"] == job]
        stepped = next(line for line in own if "loss" in line)
        evaluated = next(line for line in own if "eval_loss" in line)
        for line, prefix in ((stepped, ""), (evaluated, "eval_")):
            assert line[f"{prefix}kl"] == pytest.approx(0.0, abs=1e-12)
            assert line[f"{prefix}rewards/chosen"] == pytest.approx(0.0, abs=1e-12)
            assert 0.5 - 1e-12 <= line[f"{prefix}loss"] <= 0.5 * weight + 1e-12
    found = metrics_of(place / "undisturbed", "kto")
    assert max(value for (_, name), value in found.items() if name == "kl") > 0.01
    assert max(value for (_, name), value in found.items() if name == "eval_kl") > 0.01
    assert {
        value for (_, name), value in metrics_of(place / "undisturbed", "apo").items() if "kl" in name
    } == {0.0}


@pytest.mark.parametrize("name", ["kto", "virtual"])
def test_a_kto_job_alone_equals_the_same_job_among_others(name, place, forks):
    folder = place / f"only-{name}"
    folder.mkdir(exist_ok=True)
    for file in ("model", "a.jsonl", "labelled.jsonl"):
        (folder / file).symlink_to(place / file)
    jobs_folder(folder, [job for job in JOBS if job["name"] == name])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    assert_same_job(folder / "out", place / "undisturbed", name)
    wanted = metrics_of(place / "undisturbed", name)
    assert metrics_of(folder / "out", name) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("way", slow_but(WAYS, ["a pipeline"]))
def test_however_they_run_they_end_as_in_one_process(way, place, forks):
    assert_same(WAYS[way](place, forks), place)


def test_a_sweep_over_beta_compares_its_trials_by_the_margin_of_rewards(place, forks):
    folder = place / "sweep"
    folder.mkdir()
    for file in ("model", "a.jsonl", "labelled.jsonl"):
        (folder / file).symlink_to(place / file)
    over = {"over": {"objective.beta": [0.1, 2.0]}, "metric": "eval_rewards/margins"}
    jobs_folder(folder, [{**JOBS[1], "sweep": over}])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    record = json.loads((folder / "out" / "kto" / "sweep.json").read_text())
    assert (record["metric"], record["mode"]) == ("eval_rewards/margins", "max")
    assert len({trial["score"] for trial in record["trials"]}) == 2
    assert (folder / "out" / "kto" / "best" / "adapter_config.json").exists()
