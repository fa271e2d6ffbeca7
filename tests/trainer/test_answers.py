"""Answers to held-out prompts at each evaluation of a training run, and what their metric decides."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import weftune
from tests import bench
from tests.base.folders import model_folder
from tests.outputs import Crash, assert_same_results, lines, status
from weftune import JobSpec, Options, Result
from weftune.base.model import Base
from weftune.errors import SpecError
from weftune.generate.decoder import Decoder
from weftune.run.events import Evaluated, Stepped

ANSWER = "w12 w13 w14"
METRIC = """
def length(completion, expected, row):
    return len(completion.split()) / 10

def first_word(completion, expected, row):
    return float(completion.split()[:1] == [row["completion"].split()[0]])

def fails_at_step_two(completion, expected, row):
    if completion.strip() == expected.strip():
        raise ValueError("no more\\nthan this")
    return 0

def jumps(completion, expected, row, values=[]):
    values.append(completion)
    return float(len(values) <= 4)
"""
ROWS = [{"prompt": f"w{20 + n} w{60 - n}", "completion": f" {ANSWER}"} for n in range(24)]


@pytest.fixture
def base() -> Base:
    return bench.base()


@pytest.fixture
def metric(tmp_path: Path) -> str:
    (tmp_path / "metric.py").write_text(METRIC)
    return str(tmp_path / "metric.py")


def job(name: str = "a", steps: int = 6, **keys: Any) -> JobSpec:
    """A job that soon gives the same answer to every prompt."""
    own = {"learning_rate": 0.02, "schedule": "constant", "adapter": {"rank": 4}, "save_every": 1, **keys}
    held_out = {"fraction": 0.4, "every": 2, **own.pop("eval", {})}
    generate = held_out.pop("generate", {"prompts": 3, "max_new_tokens": 6})
    if generate is not None:
        held_out["generate"] = generate
    return JobSpec(name=name, data=ROWS, steps=steps, batch_size=8, eval=held_out, **own)


def run(base: Base, output: Path, *jobs: JobSpec, **options: Any) -> dict[str, Result]:
    return bench.train(base, output, list(jobs), **options)


def answers(output: Path, name: str = "a") -> dict[str, Any]:
    return json.loads((output / name / "answers.json").read_text())


def values(output: Path, key: str, name: str = "a") -> dict[int, float]:
    return {line["step"]: line[key] for line in lines(output) if line["job"] == name and key in line}


def mean_length(rows: list[dict[str, Any]], key: str) -> float:
    """The metric `length` of the answers under this key."""
    return sum(len(row[key].split()) / 10 for row in rows) / len(rows)


def without_times(output: Path) -> list[dict[str, Any]]:
    """The lines of the metrics, job by job, without what differs from run to run."""
    found = [{key: value for key, value in line.items() if key != "time"} for line in lines(output)]
    return sorted(found, key=lambda line: line["job"])


def test_answers_and_their_metric_are_recorded_at_every_evaluation(base, tmp_path):
    results = run(base, tmp_path / "out", job(steps=8, eval={"metric": "exact_match"}))
    found = values(tmp_path / "out", "eval_exact_match")
    assert list(found) == [0, 2, 4, 6, 8]
    assert found[8] > 0.5 > found[0] == 0.0
    shown = answers(tmp_path / "out")
    assert (shown["step"], len(shown["rows"])) == (8, 3)
    assert {row["expected"].strip() for row in shown["rows"]} == {ANSWER}
    assert found[8] == sum(row["answer"].strip() == ANSWER for row in shown["rows"]) / 3
    assert all(row["base"].strip() not in ("", ANSWER) for row in shown["rows"])
    kept = status(tmp_path / "out")["jobs"]["a"]["score"]
    assert results["a"].metrics["eval_exact_match"] == kept == found[8]
    assert results["a"].metrics["base_eval_exact_match"] == found[0]


def test_the_metric_of_the_base_is_recorded_for_an_adapter_that_does_not_start_as_the_base(
    base, metric, tmp_path
):
    keys = {"adapter": {"kind": "prompt", "num_virtual_tokens": 2}, "eval": {"metric": f"{metric}:length"}}
    found = run(base, tmp_path / "out", job(steps=2, **keys))["a"].metrics
    rows = answers(tmp_path / "out")["rows"]
    assert found["base_eval_length"] == pytest.approx(mean_length(rows, "base"))
    assert found["eval_length"] == pytest.approx(mean_length(rows, "answer"))
    written = status(tmp_path / "out")["jobs"]["a"]
    assert (written["base_score"], written["score"]) == (found["base_eval_length"], found["eval_length"])
    is_worse = found["eval_length"] < found["base_eval_length"]
    assert ("metric of its answers" in written["warning"]) == is_worse


def test_an_evaluation_is_answered_by_the_adapter_of_its_step(base, tmp_path, monkeypatch):
    """The weights that answer are those of the step, and no step is made between the tokens of an answer."""
    versions: dict[str, list[set[int]]] = {}

    def turn(decoder: Decoder, real=Decoder.run_pass) -> Any:
        found = real(decoder)
        for one in found:
            if one.finish_reason is not None and one.adapter is not None:
                versions.setdefault(one.adapter, []).append(set(one.versions))
        return found

    monkeypatch.setattr(Decoder, "run_pass", turn)
    run(base, tmp_path / "out", job("a", 6), job("b", 4, seed=1))
    assert versions == {"a": [{2}] * 3 + [{4}] * 3 + [{6}] * 3, "b": [{2}] * 3 + [{4}] * 3}


def test_jobs_that_are_evaluated_together_answer_in_one_batch(base, tmp_path, monkeypatch):
    batches = []

    def turn(decoder: Decoder, real=Decoder.run_pass) -> Any:
        found = real(decoder)
        batches.append({one.adapter for one in found})
        return found

    monkeypatch.setattr(Decoder, "run_pass", turn)
    run(base, tmp_path / "out", job("a"), job("b", seed=1), job("quiet", eval={"generate": None}))
    assert {"a", "b"} in batches
    assert all("quiet" not in batch for batch in batches)
    assert sum(None in batch for batch in batches) <= 6, "the base answers once, with up to six tokens"


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt", "dora"])
def test_training_has_the_same_bits_with_answers_and_without(tmp_path, kind):
    adapter = {"lora": {"rank": 4, "dropout": 0.1}, "dora": {"kind": "dora", "rank": 3}}.get(
        kind, {"kind": kind, "num_virtual_tokens": 3}
    )
    for folder, generate in (("with", {"prompts": 3, "max_new_tokens": 6}), ("without", None)):
        jobs = [job(adapter=adapter, eval={"generate": generate}), job("b", 5, eval={"generate": None})]
        run(bench.base(), tmp_path / folder, *jobs)
    assert without_times(tmp_path / "with") == without_times(tmp_path / "without")
    assert answers(tmp_path / "with")["step"] == 6
    assert not (tmp_path / "without" / "a" / "answers.json").exists()
    for name in "ab":
        one, other = (bench.adapter(tmp_path / folder / name) for folder in ("with", "without"))
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_a_killed_run_has_the_same_answers_and_metrics_as_an_undisturbed_one(tmp_path, metric):
    def jobs() -> list[JobSpec]:
        own = {"metric": f"{metric}:first_word"}
        return [job(eval=own, keep="best"), job("b", 5, seed=3, eval=own, early_stop=2)]

    def crash(event: Any) -> None:
        if (event.job, event.step) == ("a", 5):
            raise Crash

    run(bench.base(), tmp_path / "undisturbed", *jobs())
    with pytest.raises(Crash):
        bench.trainer(bench.base(), tmp_path / "killed", jobs()).run(crash)
    run(bench.base(), tmp_path / "killed", *jobs(), resume=True)
    assert_same_results(tmp_path / "killed", tmp_path / "undisturbed")
    for name in "ab":
        assert answers(tmp_path / "killed", name) == answers(tmp_path / "undisturbed", name)
        one, other = (
            values(tmp_path / folder, "eval_first_word", name) for folder in ("killed", "undisturbed")
        )
        assert one == other
        assert (status(tmp_path / "killed")["jobs"][name]["score"]) == list(other.values())[-1]


def test_a_job_that_fails_does_not_keep_the_others_from_answering(base, tmp_path):
    """Its weights become NaN just before both jobs are evaluated."""
    jobs = [job(eval={"metric": "exact_match"}), job("bad", seed=1)]
    trainer = bench.trainer(base, tmp_path / "out", jobs)

    def spoil(event: Any) -> None:
        if isinstance(event, Stepped) and (event.job, event.step) == ("bad", 2):
            trainer.loop.executor.attached["bad"].state.weights.fill_(math.nan)

    results = trainer.run(spoil)
    alone = run(bench.base(), tmp_path / "alone", jobs[0])
    assert (results["bad"].state, results["a"].state) == ("failed", "succeeded")
    assert results["bad"].reason == "its evaluation loss at step 2 is nan"
    assert answers(tmp_path / "out", "bad")["step"] == 0
    assert answers(tmp_path / "out") == answers(tmp_path / "alone")
    assert results["a"].metrics["eval_exact_match"] == alone["a"].metrics["eval_exact_match"]


def test_a_failing_function_of_the_user_fails_its_job_only(base, tmp_path, metric):
    jobs = [job("bad", eval={"metric": f"{metric}:fails_at_step_two"}), job("good")]
    results = run(base, tmp_path / "out", *jobs)
    assert results["good"].state == "succeeded"
    assert results["bad"].state == "failed"
    assert re.fullmatch(
        r"rows:\d+: the metric fails_at_step_two failed: ValueError: no more", results["bad"].reason
    ), results["bad"].reason
    assert "adapter_config.json" not in {path.name for path in (tmp_path / "out" / "bad").iterdir()}


def test_the_best_adapter_is_the_one_with_the_best_metric_and_its_answers_are_shown(base, tmp_path, metric):
    """The first four answers are good by this function: those at step 0 and one at step 2."""
    keys = {"eval": {"metric": f"{metric}:jumps"}, "keep": "best"}
    results = run(base, tmp_path / "out", job(**keys))
    by_loss = values(tmp_path / "out", "eval_loss")
    assert by_loss[6] < by_loss[0]
    assert values(tmp_path / "out", "eval_jumps") == {0: 1.0, 2: pytest.approx(1 / 3), 4: 0.0, 6: 0.0}
    assert answers(tmp_path / "out")["step"] == status(tmp_path / "out")["jobs"]["a"]["best_step"] == 0
    assert results["a"].metrics["eval_jumps"] == 1.0
    assert results["a"].metrics["eval_loss"] == by_loss[0]


def test_of_equal_metrics_the_lower_loss_is_kept(base, tmp_path, metric):
    (tmp_path / "same.py").write_text("def same(completion, expected, row):\n    return 1\n")
    run(base, tmp_path / "out", job(eval={"metric": f"{tmp_path / 'same.py'}:same"}, keep="best"))
    by_loss = values(tmp_path / "out", "eval_loss")
    assert status(tmp_path / "out")["jobs"]["a"]["best_step"] == min(by_loss, key=by_loss.__getitem__) > 0


def test_a_job_stops_when_its_metric_no_longer_improves(base, tmp_path, metric):
    results = run(base, tmp_path / "out", job(steps=20, eval={"metric": f"{metric}:jumps"}, early_stop=2))
    assert results["a"].reason == "stopped early at step 4: no better jumps in 2 evaluations"
    plain = run(bench.base(), tmp_path / "plain", job(steps=10, early_stop=2))
    assert plain["a"].metrics["step"] > 4, "its loss still improves"


def test_a_job_that_is_added_later_may_generate_as_much_as_was_reserved(base, tmp_path):
    """Memory for answers is reserved before the base is loaded."""
    said: list[str] = []
    trainer = bench.trainer(base, tmp_path / "out", [job("a", 2, eval={"generate": None})])

    def add(event: Any) -> None:
        if isinstance(event, Evaluated) and event.step == 0:
            with pytest.raises(SpecError) as error:
                trainer.add(job("late"))
            said.append(str(error.value))

    results = trainer.run(add)
    assert list(results) == ["a"]
    assert "job late eval.generate: an answer may need" in said[0]
    trainer = bench.trainer(
        bench.base(),
        tmp_path / "more",
        [job("a", 2, eval={"generate": None})],
        options=Options(decoder_bytes=1 << 20),
    )
    added: list[str] = []

    def add_again(event: Any) -> None:
        if not added:
            added.append("late")
            trainer.add(job("late", 2))

    assert trainer.run(add_again)["late"].state == "succeeded"
    assert answers(tmp_path / "more", "late")["step"] == 2


def test_rows_without_prompts_are_refused_before_the_run(base, tmp_path):
    texts = [{"text": f"w{number} w9 w8"} for number in range(9, 20)]
    spec = JobSpec(name="a", data=texts, steps=2, eval=job().eval)
    with pytest.raises(SpecError, match=r"job a: eval\.generate: no held-out row has a prompt of at most 36"):
        run(base, tmp_path / "out", spec)
    assert not (tmp_path / "out" / "a").exists()


def files(folder: Path, job: dict[str, Any]) -> Path:
    """A tiny float64 model, rows and a jobs file, as a user would have them."""
    model_folder(folder / "model", "llama", torch.float64)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "scores.py").write_text(METRIC)
    held_out = {"fraction": 0.4, "every": 2, "generate": {"prompts": 3, "max_new_tokens": 6}}
    keys = {"name": "a", "data": "rows.jsonl", "steps": 4, "batch_size": 8}
    keys["eval"] = held_out | job.pop("eval", {})
    jobs = {"base": {"model": "model", "dtype": "float64"}, "output": "out", "jobs": [keys | job]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))
    return folder / "jobs.yaml"


def test_a_sweep_is_decided_by_the_metric_of_the_answers(tmp_path, monkeypatch):
    """The mean of a trial's weights at a rung answers, too; its answers are not those of the report."""
    monkeypatch.chdir(tmp_path)
    keys = {
        "steps": 8,
        "eval": {"metric": "scores.py:first_word"},
        "schedule": "constant",
        "sweep": {
            "over": {"learning_rate": [1e-9, 0.02]},
            "metric": "eval_first_word",
            "halving": {"at": [0.75], "keep": 0.5},
        },
    }
    weftune.train(files(tmp_path, keys), progress=False)
    record = json.loads((tmp_path / "out" / "a" / "sweep.json").read_text())
    assert (record["metric"], record["mode"]) == ("eval_first_word", "max")
    worse, better = record["trials"]
    assert (worse["state"], better["state"], record["best"]) == ("left", "finished", [better["name"]])
    assert worse["score"] == worse["at_rungs"]["6"] < better["at_rungs"]["6"]
    rungs = [line for line in lines(tmp_path / "out") if "rung_loss" in line]
    assert {line["job"]: line["rung_first_word"] for line in rungs} == {
        one["name"]: one["at_rungs"]["6"] for one in record["trials"]
    }
    assert answers(tmp_path / "out", better["name"])["step"] == 8


def test_the_command_answers_prompts_and_says_where_a_mistake_is(tmp_path, forks):
    def weftune_command(*words, code=0):
        ended = forks.weftune(*words, cwd=tmp_path)
        said = (tmp_path / "log").read_text()
        assert ended == code, said
        return " ".join(said.split())

    jobs = files(tmp_path, {"eval": {"metric": "scores.py:length"}})
    weftune_command("plan", jobs, "--json", "plan.json")
    more = jobs.with_name("more.yaml")
    more.write_text(jobs.read_text().replace("prompts: 3", "prompts: 1000"))
    weftune_command("plan", more, "--json", "more.json")
    needed = [
        json.loads((tmp_path / f"{name}.json").read_text())["run"]["needs_bytes"] for name in ("plan", "more")
    ]
    assert needed[1] > needed[0] + (1 << 24)
    weftune_command("train", jobs, "--device", "cpu")
    assert answers(tmp_path / "out")["step"] == 4
    assert values(tmp_path / "out", "eval_length")[4] == status(tmp_path / "out")["jobs"]["a"]["score"]
    assert 'class="answered"' in (tmp_path / "out" / "report.html").read_text()
    wrong = jobs.with_name("wrong.yaml")
    wrong.write_text(jobs.read_text().replace("scores.py:length", "scores.py:absent"))
    said = weftune_command("train", wrong, "--output", "other", code=2)
    assert "eval.metric" in said
    assert "scores.py holds no function absent" in said
    said = weftune_command("train", jobs, "--replicas", "2", "--output", "other", code=2)
    assert "Answers are generated on one device that holds the whole base" in said
