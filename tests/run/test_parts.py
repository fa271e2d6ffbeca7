"""Every legal combination of an executor's parts trains jobs to the same adapters. Captured passes have the
others' place on a GPU: tests/test_stream_graphs_gpu.py and tests/test_stage_graphs_gpu.py."""

from functools import cache
from itertools import product

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.run import executors
from tests.run.models import LAYERS, deep
from tests.run.processes import run_workers
from tests.run.test_streamed import attach_jobs, evaluated_jobs, resident, windows
from tests.run.workers.test_agreed import CAPACITY, assert_equal, losses_of, views, whole_base
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.window.window import plan_window
from weftune.run.alone import Alone
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.parts import fetch_from
from weftune.run.passes.plain import PlainPasses
from weftune.run.resident_adapters import ResidentAdapters
from weftune.run.stream.activations import KeptActivations, OffloadedActivations
from weftune.run.stream.offloaded_optimizer import OffloadedOptimizer
from weftune.run.stream.travelling_adapters import TravellingAdapters
from weftune.run.stream.weights import ResidentWeights, StreamedWeights
from weftune.run.workers.agreed import Agreed
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import shard_team, worker_executor
from weftune.trainer.job import collate_plan

ROWS = 256
WAYS = list(product((False, True), (False, True)))
"""Whether adapters travel, and whether inputs are offloaded."""
SOME_WAYS = [(False, False), (True, True)]


def layout(travels, offloads, slots=(2,), shards=1):
    stages = tuple(StageLayers(n, n + 1, is_resident=n == 1) for n in range(LAYERS))
    rows = ROWS if offloads else 0
    return Layout(stages, slots, adapters_travel=travels, offloaded_rows=rows, shards=shards)


def kinds(executor):
    parts = executor.weights, executor.activations, executor.passes, executor.adapters, executor.agreement
    return tuple(type(part) for part in parts)


def expected_kinds(travels, offloads, agreement):
    return (
        StreamedWeights,
        OffloadedActivations if offloads else KeptActivations,
        PlainPasses,
        TravellingAdapters if travels else ResidentAdapters,
        agreement,
    )


@pytest.fixture(scope="module")
def wanted():
    return resident("llama", torch.float32)


@pytest.mark.parametrize(("travels", "offloads"), slow_but(WAYS, SOME_WAYS))
def test_one_worker_whose_stages_take_turns(travels, offloads, wanted):
    cut = layout(travels, offloads)
    executor = streamed_executor(
        stream_model(deep("llama", torch.float32), BaseSpec(model="tiny"), bench.CPU, cut)
    )
    assert kinds(executor) == expected_kinds(travels, offloads, Alone)
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    events, masters = windows(executor, jobs, lambda courses: plan_window(courses, cut, CAPACITY))
    assert sorted(events, key=str) == sorted(wanted[0], key=str)
    assert all(torch.equal(masters[name], master) for name, master in wanted[1].items())


def test_one_worker_whose_base_stays():
    executor = executors.executor_with(whole_base("llama", torch.float32), [])
    assert kinds(executor) == (ResidentWeights, KeptActivations, PlainPasses, ResidentAdapters, Alone)


def test_one_worker_whose_base_stays_and_whose_optimizer_is_offloaded(wanted):
    base = whole_base("llama", torch.float32)
    cut = one_device_layout(LAYERS, offloads_optimizer=True)
    executor = resident_executor(base, part=cut.for_worker(0))
    assert kinds(executor) == (ResidentWeights, KeptActivations, PlainPasses, OffloadedOptimizer, Alone)
    jobs = evaluated_jobs(base)
    attach_jobs(executor, jobs)
    # By its own plan jobs pass in two groups, and a microbatch of other rows rounds otherwise.
    events, masters = windows(
        executor, jobs, lambda courses: plan_window(courses, one_device_layout(), CAPACITY)
    )
    assert sorted(events, key=str) == sorted(wanted[0], key=str)
    assert all(torch.equal(masters[name], master) for name, master in wanted[1].items())


def as_worker(connections, ways, slots=(1, 1)):
    """Of each way: the kinds of parts, what happened, this worker's slices, and what it evaluated."""
    found, place, team = [], connections.position, shard_team(connections)
    for travels, offloads in ways:
        cut = layout(travels, offloads, slots, place.shards)
        part = cut.for_worker(place.list_index)
        streamed = stream_model(
            deep("llama", torch.float64), BaseSpec(model="tiny"), bench.CPU, cut, part.worker, team
        )
        base = streamed.whole
        transport = Transport(connections, base.shape.hidden, base.dtype, base.device)
        executor, agreed = worker_executor(streamed, part, transport, place.list_index, team)
        jobs = evaluated_jobs(whole_base("llama", torch.float64))
        attach_jobs(executor, jobs)
        by_name = {job.name: job for job in jobs}
        events, evaluations, begins = [], [], True
        for _ in range(4):
            courses = [job.job_window(executor.attached[job.name].progress.step, 2, begins) for job in jobs]
            program, begins = plan_window(courses, cut, CAPACITY), False
            passes = program.pass_kinds()
            laid = {n: collate_plan(plan, passes[n], by_name) for n, plan in enumerate(program.microbatches)}
            events += executor.run(program, fetch_from(program, laid))
            evaluations += agreed.report.evaluations
            transport.flush()
            assert executors.is_empty(executor.activations)
        found.append((kinds(executor), events, views(executor.attached), evaluations))
    return found


@cache
def alone_in_float64():
    base = whole_base("llama", torch.float64)
    jobs = evaluated_jobs(base)
    made = executors.executor_with(base, jobs)
    events = list(executors.run_program(made, executors.plan_program(jobs, 6, CAPACITY, begins=True), jobs))
    starts = views({job.name: executors.job_training(base, job) for job in jobs})
    return losses_of(events), views(made.attached), starts


@pytest.mark.parametrize("ways", slow_but([SOME_WAYS, WAYS], [SOME_WAYS]), ids=["some ways", "every way"])
def test_workers_whose_stages_take_turns(ways):
    first, second = run_workers(2, as_worker, ways, ring=True)
    for (travels, offloads), mine, theirs in zip(ways, first, second, strict=True):
        # The first has stages 0 and 2: the one has no input, that of the other is wanted first.
        assert mine[0] == expected_kinds(travels, False, Agreed)
        assert theirs[0] == expected_kinds(travels, offloads, Agreed)
        assert_equal((losses_of(mine[1]), mine[2] | theirs[2]), alone_in_float64(), 1e-9, 1e-8)
        assert {(one.job, one.step) for one in mine[3] + theirs[3]} == {("d", 0), ("d", 2), ("d", 4)}


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "shards"), [((1,), 2), ((2,), 4), ((1, 1), 2)], ids=str)
def test_shards_whose_stages_take_turns(slots, shards):
    """Alone and as teams in the place of workers; every shard streams its part of a stage."""
    ways, lists = [(False, False), (False, True)], len(slots)
    found = run_workers(lists * shards, as_worker, ways, slots, ring=lists > 1, shards=shards)
    for number, (_, offloads) in enumerate(ways):
        teams = [
            [one[number] for one in found[first : first + shards]] for first in range(0, len(found), shards)
        ]
        for index, team in enumerate(teams):
            has_offloaded = layout(False, offloads, slots).for_worker(index).offloaded_stages
            assert {one[0] for one in team} == {expected_kinds(False, bool(has_offloaded), Agreed)}
            assert all(torch.equal(value, one[2][key]) for one in team for key, value in team[0][2].items())
        weights = {key: value for team in teams for key, value in team[0][2].items()}
        assert_equal((losses_of(teams[0][0][1]), weights), alone_in_float64(), 1e-9, 1e-8)
        evaluated = {(one.job, one.step) for team in teams for one in team[0][3]}
        assert evaluated == {("d", 0), ("d", 2), ("d", 4)}


def test_shards_refuse_adapters_that_travel():
    with pytest.raises(AssertionError, match="adapters of shards stay on their devices"):
        layout(True, False, shards=2)
