"""Numbers that say how an adapter stands against the base, and warnings where it does not improve on it."""

import json
import math

import pytest
import torch

from tests import bench
from tests.outputs import Crash, lines, status
from weftune import JobSpec
from weftune.jobs.store.status import JobStatus
from weftune.run.training.state import StepOutcome
from weftune.trainer.health import base_warning, collapse_warning

ROWS = bench.rows(bench.samples(24, seed=7))


def job(name, steps=4, **keys):
    settings = {"batch_size": 4, "steps": steps, "eval": {"fraction": 0.25}, "adapter": {"rank": 3}}
    return JobSpec(name=name, data=ROWS, **settings | keys)


@pytest.fixture(scope="module")
def base():
    return bench.base("llama")


def evaluations(output, name):
    return {one["step"]: one for one in lines(output) if one["job"] == name and "eval_loss" in one}


def outcome(loss, grad_norm):
    return StepOutcome(loss, grad_norm, learning_rate=1e-3, token_accuracy=0.0, tokens=8)


def test_a_step_with_equally_likely_tokens_and_no_gradient_has_collapsed():
    assert "all 1,000 tokens are equally likely (loss 6.9078)" in collapse_warning(
        outcome(math.log(1000), 0.0), 1000
    )


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.log(1000), 0.1), (6.8, 0.0), (7.0, 0.0)])
def test_a_step_with_a_gradient_or_another_loss_has_not_collapsed(loss, grad_norm):
    assert collapse_warning(outcome(loss, grad_norm), 1000) == ""


@pytest.mark.parametrize(
    ("kept", "base", "best_step", "warning"),
    [
        (1.2, 1.1, 0, "the validation loss 1.2000 is above that of the base without the adapter (1.1000)"),
        (1.2, 1.1, 3, "the validation loss 1.2000 is above that of the base without the adapter (1.1000)"),
        (1.1, 1.1, 0, "no step improved on the base's validation loss (1.1000)"),
        (1.1, 1.1, 3, ""),
        (1.0, 1.1, 3, ""),
        (None, 1.1, None, ""),
        (1.2, None, 3, ""),
    ],
)
def test_a_job_that_ends_above_the_base_has_a_warning(kept, base, best_step, warning):
    found = base_warning(JobStatus(eval_loss=kept, base_loss=base, best_step=best_step))
    assert found.partition(";")[0] == warning


def test_a_collapsed_job_scores_no_hits_and_succeeds_with_a_warning(tmp_path):
    """In float32 the hidden states overflow, so that the last norm makes zeros of them."""
    model = bench.base("llama", torch.float32)
    ruined = job("dead", learning_rate=1e6, schedule="constant", warmup=0)
    bench.train(model, tmp_path / "out", [ruined, job("fine")])
    last = evaluations(tmp_path / "out", "dead")[4]
    assert last["eval_loss"] == pytest.approx(math.log(model.shape.vocabulary))
    assert last["eval_token_accuracy"] == 0.0
    found = status(tmp_path / "out")["jobs"]
    assert found["dead"]["state"] == "succeeded"
    assert found["dead"]["warning"].startswith("the adapter has collapsed: ")
    assert "collapsed" not in found["fine"]["warning"]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_the_base_loss_of_virtual_tokens_is_that_of_the_base_without_them(base, tmp_path, kind):
    virtual = job("virtual", adapter={"kind": kind, "num_virtual_tokens": 3})
    bench.train(base, tmp_path / "out", [job("lora"), virtual])
    neutral = evaluations(tmp_path / "out", "lora")[0]["eval_loss"]
    found = status(tmp_path / "out")["jobs"]
    assert evaluations(tmp_path / "out", "virtual")[0]["eval_loss"] != pytest.approx(neutral, rel=1e-3)
    assert found["virtual"]["base_loss"] == pytest.approx(neutral, rel=1e-12)
    assert found["lora"]["base_loss"] == neutral
    assert [one["job"] for one in lines(tmp_path / "out") if "base_loss" in one] == ["virtual"]


def test_the_base_loss_of_a_job_that_starts_from_another_adapter_is_that_of_the_base(base, tmp_path):
    bench.train(base, tmp_path / "one", [job("first", learning_rate=1e-2)])
    start = str(tmp_path / "one" / "first")
    second = job("second", adapter={"rank": 3, "init_from": start})
    bench.train(base, tmp_path / "two", [second, job("third", adapter={"rank": 3, "init_from": start})])
    first, found = status(tmp_path / "one")["jobs"]["first"], status(tmp_path / "two")["jobs"]
    assert found["second"]["base_loss"] == pytest.approx(first["base_loss"], rel=1e-12)
    assert found["third"]["base_loss"] == found["second"]["base_loss"]


def test_the_loss_of_the_base_is_measured_once_although_the_run_is_resumed(base, tmp_path):
    virtual = job("virtual", adapter={"kind": "prompt", "num_virtual_tokens": 3}, save_every=1)

    def crash(event):
        if event.step == 2:
            raise Crash

    with pytest.raises(Crash):
        bench.trainer(base, tmp_path / "out", [virtual]).run(crash)
    (before,) = [one["base_loss"] for one in lines(tmp_path / "out") if "base_loss" in one]
    bench.train(base, tmp_path / "out", [virtual], resume=True)
    assert status(tmp_path / "out")["jobs"]["virtual"]["base_loss"] == before
    assert sum("base_loss" in one for one in lines(tmp_path / "out")) == 1


@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_loss_in_the_status_is_that_of_the_adapter_that_is_kept(base, tmp_path, keep):
    """At this learning rate no step improves on the base, whose loss is the best one."""
    rough = job(
        "rough",
        steps=8,
        keep=keep,
        learning_rate=30.0,
        schedule="constant",
        eval={"fraction": 0.25, "every": 1},
    )
    bench.train(base, tmp_path / "out", [rough])
    losses = {step: one["eval_loss"] for step, one in evaluations(tmp_path / "out", "rough").items()}
    best = min(losses, key=losses.get)
    assert best != 8, "the case must tell the best from the last"
    found = json.loads((tmp_path / "out" / "status.json").read_text())["jobs"]["rough"]
    assert found["eval_loss"] == losses[best if keep == "best" else 8]
    assert (found["best_step"], found["best_loss"]) == (best, losses[best])
