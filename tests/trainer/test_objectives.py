"""Results of jobs with each objective, in the Python API: their metrics, and the logits that are computed."""

from __future__ import annotations

import random

import pytest

from tests import bench
from tests.outputs import lines
from weftune import JobSpec
from weftune.objectives.spec import OBJECTIVES
from weftune.run.passes import scorer


def rows(kind):
    rng = random.Random(3)

    def text(count):
        return " ".join(f"w{rng.randrange(6, 90)}" for _ in range(count))

    if OBJECTIVES[kind].row_kind == "pairs":
        return [{"prompt": text(4), "chosen": f" {text(3)}", "rejected": f" {text(4)}"} for _ in range(16)]
    return [{"prompt": text(4), "completion": f" {text(3)}", "label": n % 3 > 0} for n in range(16)]


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_a_result_has_the_metrics_of_the_last_step_and_of_the_adapter_that_is_kept(
    kind, tmp_path, monkeypatch
):
    counted = []

    def target_logprobs(h_SD, *others, real=scorer.target_logprobs):
        counted.append(len(h_SD))
        return real(h_SD, *others)

    monkeypatch.setattr(scorer, "target_logprobs", target_logprobs)
    keys = {"batch_size": 4, "steps": 3, "eval": {"fraction": 0.3, "every": 1}, "keep": "best"}
    job = JobSpec(name="a", data=rows(kind), objective=kind, adapter={"rank": 2}, learning_rate=0.02, **keys)
    found = bench.train(bench.base(), tmp_path / "out", [job])["a"].metrics
    written = lines(tmp_path / "out")
    kept = min((line for line in written if "eval_loss" in line), key=lambda line: line["eval_loss"])
    last = next(line for line in written if line.get("step") == 3 and "loss" in line)
    names = set(OBJECTIVES[kind].metrics)
    assert names & last.keys() == names & found.keys() != set()
    assert {name: found[name] for name in names if name in last} == {
        name: last[name] for name in names if name in last
    }
    evaluated = {key for key in kept if key.startswith("eval_") and key != "eval_tokens"}
    assert {key: found.get(key) for key in evaluated} == {key: kept[key] for key in evaluated}
    # A reward model computes no logits.
    assert any(counted) == ("eval_token_accuracy" in found) == (kind != "reward")
