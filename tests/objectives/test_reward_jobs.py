"""Reward models train beside other jobs to the same losses, metrics and adapters in every way of running, and
PEFT computes the same rewards from their files."""

from __future__ import annotations

import json

import pytest
import torch

from tests.cases import slow_but
from tests.launches import deep_folder
from tests.objectives.test_pair_jobs import PAIRS, write_pairs
from tests.objectives.ways import WAYS
from tests.outputs import assert_same_job, assert_same_results, assert_whole, jobs_folder, lines
from weftune.base.spec import BaseSpec
from weftune.errors import UserError
from weftune.generate.answers import Answers
from weftune.objectives.spec import REWARD_METRICS

EVAL = {"path": "held_out.jsonl"}
JOBS = [
    {"name": "plain", "steps": 6, "adapter": {"rank": 4}},
    {"name": "reward", "steps": 7, "data": PAIRS, "adapter": {"rank": 2, "dropout": 0.1}, "batch_size": 5,
     "objective": {"kind": "reward", "center_rewards_coefficient": 0.1}, "eval": {**EVAL, "every": 3},
     "keep": "best"},
    {"name": "dora", "steps": 5, "data": PAIRS, "adapter": {"kind": "dora", "rank": 3}, "eval": EVAL,
     "objective": "reward"},
    {"name": "pissa", "steps": 4, "data": PAIRS, "adapter": {"kind": "pissa", "rank": 2}, "eval": EVAL,
     "objective": "reward"},
    {"name": "after", "steps": 4, "data": PAIRS, "adapter": {"rank": 4, "init_from": {"job": "plain"}},
     "objective": "reward", "eval": EVAL},
    {"name": "again", "steps": 3, "data": PAIRS, "adapter": {"rank": 4, "init_from": {"job": "after"}},
     "objective": "reward", "eval": EVAL},
    {"name": "dpo", "steps": 6, "data": PAIRS, "adapter": {"rank": 2}, "objective": "dpo", "eval": EVAL},
]  # fmt: skip
OURS = [job["name"] for job in JOBS if "reward" in str(job.get("objective"))]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("rewards"), JOBS)
    write_pairs(folder / "pairs.jsonl")
    rows = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(rows[:15]))
    (folder / "held_out.jsonl").write_text("".join(rows[15:]))
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    assert_whole(folder / "undisturbed")
    return folder


def linked(place, name, jobs):
    folder = place / name
    folder.mkdir(exist_ok=True)
    for file in ("model", "a.jsonl", "pairs.jsonl", "held_out.jsonl"):
        (folder / file).symlink_to(place / file)
    jobs_folder(folder, jobs)
    return folder


def metrics_of(output, job):
    names = [*REWARD_METRICS, *(f"eval_{name}" for name in REWARD_METRICS)]
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


def classifier(place, folder):
    from peft import AutoPeftModelForSequenceClassification

    made = AutoPeftModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float64, pad_token_id=0
    )
    return made.eval()


def tokens_of(row, side):
    """The tokens of a pair's sample with its end of sequence; word n of the test tokenizer is token n."""
    return [int(word[1:]) for word in (row["prompt"] + row[side]).split()] + [2]


def test_every_step_and_evaluation_of_a_reward_model_has_its_metrics(place):
    for job in JOBS:
        found = metrics_of(place / "undisturbed", job["name"])
        if job["name"] not in OURS:
            assert found == {}
            continue
        for prefix, steps in (("", range(1, job["steps"] + 1)), ("eval_", [0, job["steps"]])):
            for step in steps:
                own = {name: found[step, f"{prefix}{name}"] for name in REWARD_METRICS}
                assert 0 <= own["accuracy"] <= 1
                assert own["min_reward"] < own["mean_reward"] < own["max_reward"]


def test_token_accuracies_are_recorded_for_all_jobs_but_reward_models(place):
    for line in lines(place / "undisturbed"):
        found = {key for key in line if key.endswith("token_accuracy")}
        assert bool(found) == (line["job"] not in OURS), line


@pytest.mark.parametrize("name", OURS[:-2])
def test_peft_computes_the_same_rewards_from_the_files(name, place, monkeypatch):
    monkeypatch.chdir(place)
    folder = place / "undisturbed" / name
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    model = classifier(place, folder)
    rows = [json.loads(line) for line in (place / "held_out.jsonl").read_text().splitlines()]
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([model(torch.tensor([tokens_of(row, side)])).logits[0] for row in rows])
            for side in ("chosen", "rejected")
        )
    every = torch.cat([chosen, rejected])
    *_, last = [line for line in lines(place / "undisturbed") if line["job"] == name and "eval_loss" in line]
    if name == "reward":
        evaluations = [line for line in lines(place / "undisturbed") if line["job"] == name]
        last = min((one for one in evaluations if "eval_loss" in one), key=lambda line: line["eval_loss"])
    assert every.mean().item() == pytest.approx(last["eval_mean_reward"], rel=1e-5)
    assert every.min().item() == pytest.approx(last["eval_min_reward"], rel=1e-5)
    assert every.max().item() == pytest.approx(last["eval_max_reward"], rel=1e-5)
    assert (chosen - rejected).mean().item() == pytest.approx(last["eval_margin"], rel=1e-5)
    assert (chosen > rejected).double().mean().item() == pytest.approx(last["eval_accuracy"])


def test_a_head_is_drawn_from_the_seed_unless_the_job_starts_from_a_reward_model(place):
    from safetensors.torch import load_file

    started = {job: metrics_of(place / "undisturbed", job)[0, "eval_mean_reward"] for job in OURS}
    assert len(set(started.values())) > 1
    ended = metrics_of(place / "undisturbed", "after")[4, "eval_mean_reward"]
    assert started["again"] == pytest.approx(ended, rel=1e-9)
    heads = [
        load_file(place / "undisturbed" / job / "adapter_model.safetensors")["base_model.model.score.weight"]
        for job in OURS
    ]
    assert all(head.shape == heads[0].shape == (1, heads[0].shape[1]) for head in heads)


@pytest.mark.parametrize("name", ["reward", "dora"])
def test_a_reward_model_alone_equals_the_same_job_among_others(name, place, forks):
    folder = linked(place, f"only-{name}", [job for job in JOBS if job["name"] == name])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    assert_same_job(folder / "out", place / "undisturbed", name)
    wanted = metrics_of(place / "undisturbed", name)
    assert metrics_of(folder / "out", name) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("way", slow_but(WAYS, ["killed and resumed"]))
def test_however_they_run_they_end_as_in_one_process(way, place, forks):
    assert_same(WAYS[way](place, forks), place)


def said(place):
    return " ".join((place / "log").read_text().split())


def last_evaluation(place, job):
    own = [line for line in lines(place / "undisturbed") if line["job"] == job and "eval_loss" in line]
    return own[-1]


def test_evaluated_reward_models_have_the_scores_that_training_reported(place, forks):
    folders = [f"undisturbed/{name}" for name in ("dora", "pissa", "after")]
    words = ("eval", *folders, "--data", "held_out.jsonl", "--metric", "accuracy", "--json", "scores.json")
    assert forks.weftune(*words, "--page", "page.html", "--device", "cpu", cwd=place) == 0
    assert "mean reward" in said(place)
    assert "mean reward" in (place / "page.html").read_text()
    results = json.loads((place / "scores.json").read_text())["results"]
    assert [one["adapter"] for one in results] == ["dora", "pissa", "after"]
    for one in results:
        wanted = last_evaluation(place, one["adapter"])
        found = {name: one[name] for name in ("loss", *REWARD_METRICS)}
        assert found == pytest.approx({name: wanted[f"eval_{name}"] for name in found}, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("eval", "undisturbed/dora", "undisturbed/dpo", "--data", "held_out.jsonl"),
         "undisturbed/dora holds a reward model and undisturbed/dpo does not; evaluate reward models by"),
        (("eval", "undisturbed/dora", "--data", "a.jsonl"),
         "which is evaluated on preference pairs only: rows with prompt, chosen and rejected"),
        (("eval", "undisturbed/dora", "--data", "held_out.jsonl", "--metric", "perplexity"),
         "--metric: perplexity is no metric of reward models; write loss, mean_reward, accuracy, margin,"),
        (("generate", "undisturbed/dora", "w10"), "holds a reward model, which gives rewards and no answers"),
        (("export", "undisturbed/reward", "portable", "--portable"),
         "whose scalar head neither a merged model nor a portable adapter has"),
        (("export", "undisturbed/dora", "merged", "--merged"),
         "whose scalar head neither a merged model nor a portable adapter has"),
    ],
)  # fmt: skip
def test_what_a_reward_model_cannot_do_is_refused_in_a_sentence(words, sentence, place, forks):
    assert forks.weftune(*words, cwd=place) == 2
    assert sentence in said(place)


def test_no_decoder_answers_with_a_reward_model(place):
    folder = place / "undisturbed" / "dora"
    base = BaseSpec(model=str(place / "model"), dtype="float64")
    answers = Answers(base, {"dora": folder}, torch.device("cpu"))
    with pytest.raises(UserError, match="is a reward model, which gives rewards and no answers"):
        answers.complete_prompts([("dora", [5, 6])])


REFUSED = {
    "vera": ({"adapter": {"kind": "vera"}}, "objective reward trains a scalar head, which the files of vera"),
    "answers": (
        {"eval": {**EVAL, "generate": {"prompts": 2}}},
        "eval.generate: objective reward trains no model that answers; leave it out",
    ),
    "supervised": (
        {"objective": "sft", "data": "a.jsonl", "adapter": {"modules_to_save": ["lm_head"]}},
        "adapter.modules_to_save: leave it out, only the adapter is trained",
    ),
    "rows": ({"data": "a.jsonl"}, "needs preference pairs"),
    "folder": (
        {"objective": "sft", "data": "a.jsonl", "adapter": {"rank": 4, "init_from": "undisturbed/after"}},
        "holds a reward model, which only objective: reward continues",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_cannot_train_a_reward_model_is_refused_in_a_sentence(name, place, forks):
    changes, sentence = REFUSED[name]
    job = {"name": "job", "steps": 2, "data": PAIRS, "objective": "reward", **changes}
    folder = linked(place, f"refused-{name}", [job])
    (folder / "undisturbed").symlink_to(place / "undisturbed")
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 2
    assert sentence in said(folder)


def test_a_supervised_job_after_a_reward_model_is_refused_in_a_sentence(place, forks):
    after = {"name": "b", "steps": 2, "adapter": {"rank": 2, "init_from": {"job": "a"}}}
    first = {"name": "a", "steps": 2, "data": PAIRS, "objective": "reward", "adapter": {"rank": 2}}
    folder = linked(place, "after-reward", [first, after])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 2
    assert "a trains a reward model, which only objective: reward continues" in said(folder)


def test_previews_plans_and_pages_know_reward_models(place, forks):
    assert forks.weftune("preview", "jobs.yaml", "--job", "reward", cwd=place) == 0
    assert "pair 1, chosen" in said(place)
    assert forks.weftune("plan", "jobs.yaml", cwd=place) == 0
    assert forks.weftune("report", "undisturbed", cwd=place) == 0
    page = (place / "undisturbed" / "report.html").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in page
    assert "undisturbed/plain" in page
    assert "weftune generate" in page
    assert "undisturbed/reward &#34;your prompt" not in page


def test_a_sweep_over_the_centring_coefficient_compares_its_trials_by_their_accuracy(place, forks):
    over = {"over": {"objective.center_rewards_coefficient": [0.01, 1.0]}, "metric": "eval_accuracy"}
    folder = linked(place, "sweep", [{**JOBS[1], "sweep": over}])
    assert forks.weftune("train", "jobs.yaml", "--output", "out", cwd=folder) == 0
    record = json.loads((folder / "out" / "reward" / "sweep.json").read_text())
    assert (record["metric"], record["mode"]) == ("eval_accuracy", "max")
    assert all(0 <= trial["score"] <= 1 for trial in record["trials"])
    assert (folder / "out" / "reward" / "best" / "adapter_config.json").exists()
