"""Replicas that share every batch give each job what one process gives it, and all hold the same bits."""

import time

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.run import executors
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import (
    CUTS,
    STEPS,
    alone,
    as_worker,
    assert_equal,
    cut,
    losses_of,
    on_worker,
    pipeline_program,
    whole_base,
)
from weftune.plan.program.program import Forward
from weftune.run.events import Failed, Stepped
from weftune.run.parts import fetch_from
from weftune.trainer.job import collate_plan

CUT = {1: [0, 4], 2: CUTS[2]}


def train(stages, replicas, dtype=torch.float64, target=as_worker, poison=None, cancelled=None):
    """What happened on every worker, replica by replica."""
    arguments = ("llama", dtype, CUT[stages], None, poison, cancelled)
    answers = run_workers(stages * replicas, target, *arguments, replicas=replicas)
    return [answers[first : first + stages] for first in range(0, len(answers), stages)]


def whole(workers, without=""):
    """Every adapter, put together from one replica's slices."""
    return {key: value for _, slices, _ in workers for key, value in slices.items() if key[0] != without}


def assert_same_bits(replicas):
    first, *others = (whole(workers) for workers in replicas)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in first.items())


@pytest.fixture(scope="module")
def exact():
    return alone("llama", torch.float64)


@pytest.mark.parametrize(("stages", "replicas"), slow_but([(1, 2), (2, 2)], [(2, 2)]))
def test_losses_and_adapters_equal_one_process_and_replicas_hold_the_same_bits(exact, stages, replicas):
    found = train(stages, replicas)
    assert_equal((losses_of(found[0][0][0]), whole(found[0])), exact, 1e-9, 1e-8)
    assert_same_bits(found)
    assert all(steps == STEPS for workers in found for _, _, steps in workers)
    told = [workers[stage][0] for workers in found for stage in range(stages)][1:]
    assert not any(isinstance(event, Stepped) for events in told for event in events)


@pytest.mark.slow
def test_more_replicas_than_a_batch_has_samples_equal_one_process(exact):
    """`a` has batches of two samples, so that one replica at least has nothing of each of them."""
    found = train(1, 3)
    assert_equal((losses_of(found[0][0][0]), whole(found[0])), exact, 1e-9, 1e-8)
    assert_same_bits(found)


@pytest.mark.slow
def test_two_runs_give_the_same_bits():
    first, second = (train(1, 2, torch.float32) for _ in range(2))
    assert losses_of(first[0][0][0]) == losses_of(second[0][0][0])
    assert_same_bits([*first, *second])


def poisoned_worker(connections, family, dtype, cuts, order, poison, cancelled):
    """As `as_worker`, with NaN in one replica only."""
    mine = poison if connections.position.replica == 1 else None
    return as_worker(connections, family, dtype, cuts, order, mine, cancelled)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_nan_in_one_replica_kills_its_job_in_all_at_once_and_reaches_nobody_else(stages):
    found = train(stages, 2, target=poisoned_worker, poison="a")
    (failed,) = (event for event in found[0][0][0] if isinstance(event, Failed))
    assert (failed.job, failed.reason) == ("a", "its loss at step 1 is nan")
    assert all(steps == {"a": 0, "b": 3, "c": 4} for workers in found for _, _, steps in workers)
    got = losses_of(found[0][0][0]), whole(found[0], without="a")
    assert_equal(got, alone("llama", torch.float64, "bc"), 1e-9, 1e-8)


@pytest.mark.slow
def test_a_job_that_the_first_worker_ends_makes_no_more_steps_in_any_replica():
    found = train(2, 2, cancelled="a")
    losses = losses_of(found[0][0][0])
    assert len(losses.pop("a")) == 1
    assert all(steps == {"a": 1, "b": 3, "c": 4} for workers in found for _, _, steps in workers)
    got = losses, whole(found[0], without="a")
    assert_equal(got, alone("llama", torch.float64, "bc"), 1e-9, 1e-8)


def prompted(base):
    return executors.prepare(
        base, "p", steps=2, batch_size=4, adapter={"kind": "prompt", "num_virtual_tokens": 3}
    )


def prompted_worker(connections):
    """Tokens that count as trained on this worker, of a job with virtual tokens."""
    base = cut("llama", torch.float64, connections.position, CUT[1])
    executor, _, transport = on_worker(base, connections, CUT[1])
    job = prompted(base)
    executor.attach(executors.job_training(base, job))
    program = pipeline_program([job], connections.position, None)
    own = dict(program.replica_passes(connections.position.replica))
    laid = {action.microbatch: collate_plan(plan, Forward, {"p": job}) for action, plan in own.items()}
    list(executor.run(program, fetch_from(program, laid)))
    transport.flush()
    return executor.attached["p"].progress.trained_tokens


def test_virtual_tokens_do_not_count_as_trained_tokens_in_any_replica():
    base = whole_base("llama", torch.float64)
    job = prompted(base)
    alone = executors.executor_with(base, [job])
    list(executors.run_program(alone, executors.plan_program([job], 2), [job]))
    wanted = alone.attached["p"].progress.trained_tokens
    lengths = job.data.train.lengths
    assert wanted == sum(int(lengths[one]) - 3 for step in (1, 2) for one in job.sample_order.batch(step))
    assert run_workers(2, prompted_worker, replicas=2) == [wanted, wanted]


# -- what it costs -----------------------------------------------------------------------------------------

PER_ROW = 0.006
"""Seconds of a pass for each row, slept through: a device that is busy without taking a core from others."""
LINK = 0.05
"""Seconds that a gradient takes to another replica, where links are slow."""
ROUNDS = 6


def even_jobs(base):
    """Jobs in groups that go on to the end: the passes of one fill the wait for gradients of another."""
    rows = bench.rows(bench.samples(16, longest=18))
    names = [f"job{number}" for number in range(4)]
    return [executors.prepare(base, name, steps=ROUNDS, batch_size=4, data=rows, seed=1) for name in names]


def timed_window(connections, delay):
    """Seconds of a window on this worker, and how many of them it slept in passes."""
    base = cut("llama", torch.float32, connections.position, CUT[1])
    executor, agreed, transport = on_worker(base, connections, CUT[1], delay)
    jobs = even_jobs(whole_base("llama", torch.float32))
    for job in jobs:
        executor.attach(executors.job_training(base, job))
    program = pipeline_program(jobs, connections.position, None, ROUNDS)
    own = dict(program.replica_passes(connections.position.replica))
    by_name = {job.name: job for job in jobs}
    laid = {action.microbatch: collate_plan(plan, Forward, by_name) for action, plan in own.items()}
    pauses = {number: PER_ROW * one.rows for number, one in laid.items()}
    order = iter(one for one in program.devices[connections.position.worker] if isinstance(one, Forward))
    base.model.base_model.register_forward_pre_hook(lambda *_: time.sleep(pauses[next(order).microbatch]))
    list(executor.run(program, fetch_from(program, laid)))
    transport.flush()
    times = agreed.report.times
    return times[-1].stop - times[0].start, sum(pauses.values())


@pytest.mark.slow
def test_two_replicas_share_the_time_and_gradients_cross_while_they_compute():
    seconds, slept = zip(*run_workers(2, timed_window, 0.0, replicas=2), strict=True)
    late, _ = zip(*run_workers(2, timed_window, LINK, replicas=2), strict=True)
    waits = 4 * ROUNDS * LINK
    print(f"{sum(slept):.2f} s of passes in {max(seconds):.2f} s; with {LINK} s for each gradient "
          f"{max(late):.2f} s, where waiting for each would add {waits:.2f} s")  # fmt: skip
    assert max(slept) < 0.55 * sum(slept)
    assert max(seconds) < 0.75 * sum(slept)
    assert max(late) < max(seconds) + 0.3 * waits
