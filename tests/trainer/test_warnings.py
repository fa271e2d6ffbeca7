"""Warnings: an adapter that does not improve on the base, and a CPU that is much slower than planned."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch

from tests import bench
from tests.outputs import Crash, lines, status
from weftune import JobSpec
from weftune.jobs.store.status import JobStatus
from weftune.run.training.state import StepOutcome
from weftune.trainer import warnings
from weftune.trainer.warnings import CpuLoad, SlowRun, base_warning, collapse_warning, slow_run_warning

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


def test_a_job_whose_answers_are_worse_than_those_of_the_base_has_a_warning():
    better = JobStatus(eval_loss=1.0, base_loss=1.1, best_step=3, score=0.5, base_score=0.5)
    assert base_warning(better) == ""
    found = base_warning(replace(better, score=0.25))
    assert found.startswith(
        "the metric of its answers, 0.25, is below that of the base without the adapter (0.5)"
    )


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


def test_a_slow_run_is_told_with_the_cores_that_others_take():
    assert slow_run_warning(10.0, 19.0, other_cores=2.0, cores=2, threads=2, has_profile=True) == ""
    crowded = slow_run_warning(10.0, 31.0, other_cores=1.5, cores=2, threads=2, has_profile=False)
    assert crowded.startswith(
        "warning: training takes 3.1 times as long as planned: other processes keep 1.5 of"
    )
    alone = slow_run_warning(10.0, 31.0, other_cores=0.1, cores=8, threads=4, has_profile=True)
    assert "although other processes keep only 0.1 of the 8 cores busy" in alone
    assert alone.endswith("weftune doctor --profile")


def test_on_free_cores_a_plan_by_the_data_sheet_warns_of_nothing():
    """The quickstart on an idle machine takes almost three times as long as its data sheet says."""
    assert slow_run_warning(10.0, 31.0, other_cores=0.1, cores=8, threads=4, has_profile=False) == ""


def test_a_slow_run_is_told_once_and_not_of_single_short_windows():
    run = SlowRun(has_profile=True)
    assert run.add(None, 100.0) == "", "nothing was planned"
    assert run.add(1.0, 9.0) == ""
    assert run.add(1.0, 9.0).startswith("warning: training takes 9.0 times as long as planned")
    assert run.add(1.0, 90.0) == ""
    steady = SlowRun(has_profile=True)
    assert [steady.add(9.0, 10.0) for _ in range(3)] == [""] * 3


def test_a_slow_run_tells_it_once(tmp_path, monkeypatch):
    """A tiny model takes far longer than its products would at the speed of the data sheet."""
    monkeypatch.setattr(warnings, "MIN_COMPARED_SECONDS", 0.0)
    monkeypatch.setattr(CpuLoad, "other_cores", lambda self: float(psutil.cpu_count() or 1))
    rows = bench.rows(bench.samples(8))
    slow = JobSpec(name="a", data=rows, steps=6, batch_size=2, eval={"fraction": 0.3, "every": 2})
    bench.train(bench.base(), tmp_path / "out", [slow])
    notes = status(tmp_path / "out")["notes"]
    assert sum("times as long as planned" in note for note in notes) == 1, notes


@pytest.mark.timed
def test_the_cores_of_another_process_are_counted_and_those_of_this_one_are_not():
    own = CpuLoad()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        pass
    before = own.other_cores()
    # No child of this process: its parent ends at once.
    code = "import time; end = time.time() + 2\nwhile time.time() < end: pass"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    subprocess.run([sys.executable, "-c", start], check=True)
    load = CpuLoad()
    time.sleep(1.5)
    cores = psutil.cpu_count() or 1
    assert load.other_cores() > 0.3 or before > cores - 1.5, "unless others have taken all of them already"
