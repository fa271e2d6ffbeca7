"""Master weights and moments in host memory beside a base on a CUDA device: run with `pytest -m gpu`."""

import math
from dataclasses import fields

import pytest
import torch

from tests import bench
from tests.cases import some_of
from tests.outputs import assert_whole, status
from tests.run import executors
from tests.test_gpu import ready
from tests.test_stream_gpu import CAPACITY, SPEC, attach, even
from weftune import JobSpec, Options
from weftune.base.load import load_base
from weftune.core.shapes import JobShape
from weftune.ops.adamw import update
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.ring import PIECE
from weftune.plan.program.layout import one_device_layout
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Failed
from weftune.run.stream import adapter_steps
from weftune.run.training import checkpoint
from weftune.run.training.state import new_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

ONE = one_device_layout()
SMALL_PIECE = 16384
"""Dozens of them in a job, each of which lingers for a millisecond."""


@pytest.fixture(scope="module")
def base():
    return load_base(SPEC, torch.device("cuda", 0))


def executor_of(base, offloaded=True, **keys):
    return resident_executor(base, part=one_device_layout(base.shape.layers, offloaded).for_worker(0), **keys)


def four(base):
    return [ready(base, f"job{i}", i) for i in range(4)]


def windows(executor, jobs, ladder=False, rounds=range(0, 6, 2), layout=ONE):
    """The events of windows of two rounds, of jobs that have not failed."""
    events = []
    for step in rounds:
        failed = {event.job for event in events if isinstance(event, Failed)}
        courses = [job.job_window(step, 2, False) for job in jobs if job.name not in failed]
        program = plan_window(courses, layout, CAPACITY, pads_to_ladder=ladder)
        events += executors.run_program(executor, program, jobs)
    return events


def states(executor):
    found = {name: one.state for name, one in executor.attached.items()}
    return {
        (name, one.name): getattr(state, one.name).cpu().clone()
        for name, state in found.items()
        for one in fields(state)
    }


def trained(executor, jobs, ladder=False, layout=ONE):
    for job in jobs:
        attach(executor, job)
    windows(executor, jobs, ladder, layout=layout)
    found = states(executor)
    executor.restore_base()
    return found


def assert_same(found, want):
    assert found.keys() == want.keys()
    for key, vector in want.items():
        assert vector.isfinite().all()
        assert torch.equal(found[key], vector), key


def lingering(updates, factor_J=None):
    """Beside copies and passes that do not wait for it."""
    torch.cuda._sleep(2_000_000)
    return update(updates, factor_J)


def poison(executor):
    """NaN where weights of jobs are, from the moment that their Step is asked for until it is made."""
    step = executor.adapters.step

    def stepped(due):
        found = step(due)
        torch.cuda.synchronize()
        for one in due:
            one.training.state.weights.fill_(math.nan)
        torch.cuda.synchronize()
        return found

    executor.adapters.step = stepped


@pytest.fixture(scope="module")
def want(base):
    return trained(executor_of(base, offloaded=False, graphs=False), four(base))


@pytest.mark.parametrize("piece", some_of((SMALL_PIECE, PIECE), [SMALL_PIECE]))
def test_every_vector_has_the_bits_of_state_on_the_device_however_long_steps_linger(
    base, want, piece, monkeypatch
):
    """Whoever came too early would take NaN along."""
    monkeypatch.setattr(adapter_steps, "PIECE", piece)
    for make, poisoned in ((update, False), (lingering, True)):
        executor = executor_of(base, graphs=False, apply_updates=make)
        if poisoned:
            poison(executor)
        assert_same(trained(executor, four(base)), want)


def test_in_two_groups_no_pass_overtakes_a_step_either(base):
    """By a run's own plan: the Steps of one group linger while the other passes."""
    found, layout = [], one_device_layout(base.shape.layers, offloads_optimizer=True)
    for make in (update, lingering):
        executor = executor_of(base, graphs=False, apply_updates=make)
        if make is lingering:
            poison(executor)
        found.append(trained(executor, four(base), layout=layout))
    assert_same(found[1], found[0])


def test_captured_passes_read_what_steps_have_written(base):
    found = []
    for offloaded in (False, True):
        executor = executor_of(base, offloaded, apply_updates=lingering)
        jobs = [even(base, f"job{i}", i) for i in range(4)]
        found.append(trained(executor, jobs, ladder=True))
        assert executor.captures
    assert_same(found[1], found[0])


def test_of_a_parameter_six_bytes_are_on_the_device_and_twelve_page_locked_on_the_host(base, monkeypatch):
    # Small enough that the first job's buffers are as large as they get.
    monkeypatch.setattr(adapter_steps, "PIECE", SMALL_PIECE)
    taken = []
    for offloaded in (False, True):
        executor = executor_of(base, offloaded, graphs=False)
        attach(executor, ready(base, "first", 1))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        attach(executor, job := ready(base, "large", 2, adapter={"rank": 64}))
        taken.append(torch.cuda.memory_allocated() - before)
        state = executor.attached["large"].state
        assert state.master.is_pinned() == offloaded
        assert state.weights.is_cuda
        assert state.gradient.is_cuda
        executor.restore_base()
        del executor, state
    assert abs(taken[0] - taken[1] - 12 * job.shape.trainable_parameters) < 1 << 20


def test_the_device_refuses_a_step_whose_loss_is_nan_and_the_others_go_on(base):
    found = []
    for offloaded in (False, True):
        executor, jobs = executor_of(base, offloaded, graphs=False, apply_updates=lingering), four(base)
        for job in jobs:
            attach(executor, job)
        events = windows(executor, jobs, rounds=[0])
        executor.attached["job1"].state.weights.fill_(math.nan)
        torch.cuda.synchronize()
        events += windows(executor, jobs, rounds=[2])
        failed = [event for event in events if isinstance(event, Failed)]
        assert [event.job for event in failed] == ["job1"]
        found.append(({event.reason for event in failed}, states(executor)))
        executor.restore_base()
    assert found[0][0] == found[1][0]
    for (name, vector), value in found[0][1].items():
        if vector in ("master", "exp_avg", "exp_avg_sq") or name != "job1":
            assert torch.equal(found[1][1][name, vector], value), (name, vector)


@pytest.mark.parametrize("first", some_of([False, True], [True]))
def test_a_checkpoint_taken_among_windows_goes_on_in_the_other_layout(base, want, first, tmp_path):
    """Where `first`: from host memory to the device."""
    jobs = four(base)
    executor = executor_of(base, first, graphs=False, apply_updates=lingering)
    for job in jobs:
        attach(executor, job)
    windows(executor, jobs, rounds=[0, 2])
    for job in jobs:
        executor.save(job.name, tmp_path / job.name)
    windows(executor, jobs, rounds=[4])
    for job in jobs:
        executor.finish_saves(job.name)
    executor.restore_base()
    other = executor_of(base, not first, graphs=False)
    for job in jobs:
        adapter = executors.JobAdapter(job.name, job.spec.adapter, job.spec.seed)
        training = new_training(adapter, job.recipe, base.shape.sites, base.dtype, other.home)
        assert checkpoint.restore(tmp_path / job.name, training)
        assert training.progress.step == 4
        other.attach(training)
    windows(other, jobs, rounds=[4])
    assert_same(states(other), want)
    other.restore_base()


def test_a_run_whose_jobs_would_wait_takes_more_of_them_aboard_and_says_so(base, tmp_path):
    """Chosen by the run itself, with this GPU's link as measured."""
    rows = bench.rows(bench.samples(64, seed=1, shortest=60, longest=64))
    jobs = [
        JobSpec(name=f"job{at}", data=rows, steps=4, batch_size=64, seed=at, adapter={"rank": 64})
        for at in range(24)
    ]
    budget = budget_for(base, jobs, count=12)
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(memory=budget))
    results = trainer.run()
    assert {result.state for result in results.values()} == {"succeeded"}
    assert max(len(program.jobs) for program in trainer.programs) > 12
    (note,) = [note for note in status(tmp_path / "out")["notes"] if "moments" in note]
    assert "master weights and moments of adapters live in host memory" in note
    assert_whole(tmp_path / "out")


def budget_for(base, jobs, count):
    """Room for so many jobs with all of their state on the device, and half a job more."""
    trainable = sum(64 * (site.in_features + site.out_features) for site in base.shape.sites)
    shapes = [JobShape(job.name, 0, at, trainable, max_sample_tokens=64) for at, job in enumerate(jobs)]
    memory = MemoryModel(base.shape, 0, uses_fused_ops=True)
    return memory.least_bytes(shapes[:count]) + memory.state_bytes(shapes[:1]) // 2
