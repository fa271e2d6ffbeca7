"""Windows that hand microbatches over to the next one train every job to what one process makes of it."""

import pytest
import torch

from tests.cases import slow_but
from tests.run import executors
from tests.run.processes import run_workers
from tests.run.test_replicas import CUT, assert_same_bits
from tests.run.workers.test_agreed import (
    CAPACITY,
    CUTS,
    PACE,
    STEPS,
    alone,
    assert_equal,
    cut,
    losses_of,
    make_jobs,
    on_worker,
    ranges,
    views,
    whole_base,
)
from weftune.plan.program.handover import FINISHED, unfinished_work
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import Forward
from weftune.plan.window.window import Pacing, plan_window
from weftune.run.parts import fetch_from
from weftune.trainer.job import collate_plan

MAX_WINDOWS = 12


def as_worker(connections, cuts, dropped=(), cancelled=None):
    """Train the jobs in windows of one round that hand over. What is in flight after the windows in `dropped`
    is not inherited; after the second window, `cancelled` is ended, and the pipeline drains."""
    layout = pipeline_layout(ranges(cuts), connections.position.replicas)
    base = cut("llama", torch.float64, connections.position, cuts)
    executor, _, transport = on_worker(base, connections, cuts)
    jobs = make_jobs(whole_base("llama", torch.float64))
    for job in jobs:
        executor.attach(executors.job_training(base, job))
    by_name = {job.name: job for job in jobs}
    pacing = Pacing((PACE,) * len(layout.stages), spare_microbatches=1, hands_over=True)
    events, left, handed_over = [], FINISHED, 0
    for number in range(MAX_WINDOWS):
        rounds = 1
        if cancelled and number == 2:
            rounds, _ = 0, executor.kill(cancelled)
        steps = {name: one.progress.step for name, one in executor.attached.items()} | left.steps
        windows = [
            job.job_window(steps[job.name], rounds, False)
            for job in jobs
            if job.name != cancelled or number <= 2
        ]
        program = plan_window(windows, layout, CAPACITY, pacing=pacing, inherited=left)
        laid = {
            number: collate_plan(program.microbatches[number], Forward, by_name)
            for number in program.pass_kinds()
        }
        events += executor.run(program, fetch_from(program, laid))
        transport.flush()
        assert executor.unfinished == unfinished_work(program)
        assert executor.unfinished.batches or executors.is_empty(executor.activations)
        left = FINISHED if number in dropped else executor.unfinished
        handed_over += any(one.forwards > 0 for one in left.progress)
    assert handed_over >= 2
    assert executors.is_empty(executor.activations)
    assert all(one.open_batch is None and not one.gradient.any() for one in executor.attached.values())
    steps = {name: training.progress.step for name, training in executor.attached.items()}
    return events, views(executor.attached), steps


def assert_as_alone(answers, names="abc"):
    weights = {key: value for _, slices, _ in answers for key, value in slices.items() if key[0] in names}
    losses = {job: lines for job, lines in losses_of(answers[0][0]).items() if job in names}
    assert_equal((losses, weights), alone("llama", torch.float64, names), 1e-9, 1e-8)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_adapters_equal_one_process(workers):
    answers = run_workers(workers, as_worker, CUTS[workers])
    assert_as_alone(answers)
    assert all(steps == STEPS for _, _, steps in answers)


@pytest.mark.parametrize(("stages", "replicas"), slow_but([(1, 2), (2, 2), (1, 3)], [(2, 2)]))
def test_replicas_hand_over_and_hold_the_same_bits(stages, replicas):
    answers = run_workers(stages * replicas, as_worker, CUT[stages], replicas=replicas)
    found = [answers[first : first + stages] for first in range(0, len(answers), stages)]
    assert_as_alone(found[0])
    assert_same_bits(found)
    assert all(steps == STEPS for _, _, steps in answers)


@pytest.mark.slow
def test_a_job_that_ends_while_replicas_have_it_in_flight_makes_no_step_and_reaches_no_other():
    answers = run_workers(4, as_worker, CUT[2], (), "a", replicas=2)
    assert_as_alone(answers[:2], "bc")
    assert_same_bits([answers[:2], answers[2:]])
    assert len({str(steps) for _, _, steps in answers}) == 1
    assert answers[0][2]["a"] < STEPS["a"]


@pytest.mark.slow
def test_what_replicas_do_not_inherit_is_dropped_and_trained_again():
    answers = run_workers(4, as_worker, CUT[2], (0, 2), replicas=2)
    assert_as_alone(answers[:2])
    assert all(steps == STEPS for _, _, steps in answers)


@pytest.mark.slow
def test_what_the_next_window_does_not_inherit_is_dropped_and_trained_again():
    answers = run_workers(2, as_worker, CUTS[2], (0, 2))
    assert_as_alone(answers)
    assert all(steps == STEPS for _, _, steps in answers)


@pytest.mark.slow
def test_a_job_that_ends_while_it_is_in_flight_makes_no_step_and_reaches_no_other():
    answers = run_workers(4, as_worker, CUTS[4], (), "a")
    assert_as_alone(answers, "bc")
    assert len({str(steps) for _, _, steps in answers}) == 1
    assert answers[0][2]["a"] < STEPS["a"]
