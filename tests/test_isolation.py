"""One job's NaN, infinity or explosion fails that job alone; the others never know."""

import json
import math
import re

import pytest
import torch

from tests import bench, oracle
from tests.cases import slow_but
from weftune import JobSpec, Options
from weftune.run.events import Stepped

STEPS = 8
HEALTHY = [f"healthy{i}" for i in range(5)]
POISONED_AT = 4
INFINITE_AT = 3
LARGE_RATE = {torch.float32: 1e9, torch.float64: 1e200}
LARGE_WEIGHT = {torch.float32: 1e30, torch.float64: 1e200}
"""Finite themselves; what they lead to overflows."""


def job(name, index, **changes):
    return JobSpec(
        name=name,
        data=bench.rows(bench.samples(20, seed=index)),
        adapter=dict(rank=2 + index, alpha=8.0, dropout=0.1 * (index % 2)),
        steps=STEPS,
        batch_size=3,
        save_every=1,
        seed=index,
        **({"learning_rate": 1e-3} | changes),
    )


def healthy_jobs():
    return [job(name, index) for index, name in enumerate(HEALTHY)]


def run(output, dtype, sick):
    """Five healthy jobs, with or without three sick ones: the trainer and its results."""
    jobs = healthy_jobs()
    if sick:
        exploding = job("exploding", 5, learning_rate=LARGE_RATE[dtype], weight_decay=0.1)
        jobs[1:1] = [exploding, job("infinite", 6), job("poisoned", 7)]
    trainer = bench.trainer(bench.base("llama", dtype), output, jobs, options=Options(capacity=64))
    spoilt = {("infinite", INFINITE_AT - 1): LARGE_WEIGHT[dtype], ("poisoned", POISONED_AT - 1): math.nan}

    def spoil(event):
        """One job's weights become so large that its next loss overflows, another's become NaN."""
        executor = trainer.loop.executor
        if sick and isinstance(event, Stepped) and (event.job, event.step) in spoilt:
            executor.banks.attached[event.job].weights.fill_(spoilt[event.job, event.step])

    return trainer, trainer.run(spoil)


@pytest.mark.parametrize("dtype", slow_but([torch.float64, torch.float32], [torch.float64]))
def test_three_sick_jobs_of_eight_fail_alone(dtype, tmp_path):
    run(tmp_path / "without", dtype, sick=False)
    trainer, results = run(tmp_path / "with", dtype, sick=True)

    failed = {name for name, result in results.items() if result.state == "failed"}
    assert failed == {"exploding", "infinite", "poisoned"}
    assert results["infinite"].metrics["step"] == INFINITE_AT - 1
    assert results["poisoned"].metrics["step"] == POISONED_AT - 1
    assert results["exploding"].metrics["step"] < STEPS
    for name in failed:
        assert re.search("its (loss|gradient norm|weights) .* (nan|inf|not finite)", results[name].reason)
        newest = max((tmp_path / "with" / name / "checkpoints").glob("step-*"))
        assert int(newest.name.removeprefix("step-")) == results[name].metrics["step"]

    exact = bench.base("llama", torch.float64)
    if dtype is torch.float32:
        bench.train(exact, tmp_path / "exact", healthy_jobs(), capacity=64)
    for spec in healthy_jobs():
        assert results[spec.name].state == "succeeded"
        start = bench.start(exact, spec)
        ours = bench.trained(tmp_path / "with", spec.name, start)
        theirs = bench.trained(tmp_path / "without", spec.name, start)
        assert all(value.isfinite().all() for value in ours.end.values())
        if dtype is torch.float64:
            oracle.assert_equal_float64(ours, theirs)
        else:
            truth = bench.trained(tmp_path / "exact", spec.name, start)
            oracle.assert_equal_float32(ours, theirs, theirs, truth)
    assert sum(len(set(p.jobs)) > 1 for program in trainer.programs for p in program.microbatches) > 5


def test_a_failed_job_has_its_reason_in_the_status_and_no_step_after_it(tmp_path):
    run(tmp_path, torch.float64, sick=True)
    status = json.loads((tmp_path / "status.json").read_text())["jobs"]
    assert status["poisoned"]["state"] == "failed"
    assert status["poisoned"]["reason"] == f"its loss at step {POISONED_AT} is nan"
    assert len(bench.losses(tmp_path, "poisoned")) == POISONED_AT - 1
    assert not (tmp_path / "poisoned" / "adapter_model.safetensors").exists()


def test_a_job_that_diverges_finitely_runs_on_and_harms_nobody(tmp_path):
    bench.train(bench.base("llama"), tmp_path / "without", healthy_jobs())
    wild = job("wild", 5, learning_rate=1e6)
    results = bench.train(bench.base("llama"), tmp_path / "with", [wild, *healthy_jobs()])
    assert results["wild"].state == "succeeded"
    curve = bench.losses(tmp_path / "with", "wild")
    assert all(map(math.isfinite, curve))
    assert max(value.abs().max() for value in bench.adapter(tmp_path / "with" / "wild").values()) > 1e5
    for name in HEALTHY:
        ours, theirs = (bench.adapter(tmp_path / which / name) for which in ("with", "without"))
        assert all((ours[key] - theirs[key]).norm() <= 1e-8 * theirs[key].norm() for key in ours)
