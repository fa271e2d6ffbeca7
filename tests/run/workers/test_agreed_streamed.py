"""A base streamed over several processes trains every job to the bits that one process gives it.

Places that stages have left hold NaN, so that a use of one that has gone shows.
"""

import math
from functools import cache
from itertools import product

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.families import MIXTURES
from tests.run import executors
from tests.run.models import LAYERS, deep
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import (
    CAPACITY,
    assert_equal,
    losses_of,
    make_jobs,
    targets_for,
    views,
    whole_base,
)
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.window.window import plan_window
from weftune.run.assemble import streamed_executor
from weftune.run.events import Evaluated, Failed, SaveDue, Stepped
from weftune.run.parts import fetch_from
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import worker_executor
from weftune.trainer.job import collate_plan

ONE_EACH = tuple(StageLayers(n, n + 1) for n in range(LAYERS))
CUTS = {
    "two workers, a slot each": Layout(ONE_EACH, (1, 1)),
    "two workers, a slot for everything on one of them": Layout(ONE_EACH, (2, 1)),
    "three workers, the first ends": Layout(ONE_EACH, (1, 1, 1)),
    "two workers, one resident on each": Layout(
        (StageLayers(0, 1), StageLayers(1, 2, True), StageLayers(2, 3, True), StageLayers(3, 4)), (1, 1)
    ),
    "an odd number of stages": Layout((StageLayers(0, 1), StageLayers(1, 3), StageLayers(3, 4)), (1, 1)),
}


def even_jobs(base):
    """Of different rank, targets and length, with dropout; nothing is clipped, and every slice is a multiple
    of what a CPU steps at a time. `d` evaluates and saves."""
    targets = targets_for(base)
    jobs = [
        executors.prepare(
            base,
            name,
            seed=seed,
            steps=3 + seed,
            batch_size=2 + seed,
            data=bench.rows(bench.samples(12, seed=seed, longest=8 + 6 * seed)),
            adapter={"rank": [4, 8, 16][seed], "dropout": 0.2, "alpha": 8.0, "targets": targets[name]},
            clip=1e9,
        )
        for seed, name in enumerate("abc")
    ]
    keys = {"eval": {"fraction": 0.3, "every": 2}, "save_every": 4, "clip": 1e9, "adapter": {"rank": 4}}
    return [*jobs, executors.prepare(base, "d", seed=3, steps=4, **keys)]


def as_worker(connections, family, dtype, cut, make, poison=None, cancelled=None):
    """Train the jobs on this worker until all have ended; what happened here, and this worker's slices.

    The weights of `poison` are NaN; `cancelled` is ended by the first worker after its first step.
    """
    jobs = make(whole_base(family, dtype))
    spec = BaseSpec(model=f"tiny/{family}")
    streamed = stream_model(deep(family, dtype), spec, bench.CPU, cut, connections.position.worker)
    base = streamed.whole
    transport = Transport(connections, base.shape.hidden, base.dtype, base.device)
    executor, agreed = worker_executor(streamed, streamed.part, transport, connections.position.worker)
    for job in jobs:
        executor.attach(executors.job_training(base, job))
    if poison is not None:
        executor.banks.attached[poison].weights.copy_(
            torch.full_like(executor.attached[poison].master, math.nan)
        )
    events, evaluations, begins = [], [], True
    by_name = {job.name: job for job in jobs}
    for _ in range(8):
        steps = {name: training.progress.step for name, training in executor.attached.items()}
        courses = [
            job.job_window(steps[job.name], 5, begins) for job in jobs if job.name not in executor.failed_jobs
        ]
        begins = False
        program = plan_window(courses, cut, CAPACITY)
        kinds = program.pass_kinds()
        microbatches = {
            n: collate_plan(plan, kinds[n], by_name) for n, plan in enumerate(program.microbatches)
        }
        for event in executor.run(program, fetch_from(program, microbatches)):
            events.append(event)
            if isinstance(event, Stepped) and event.job == cancelled:
                executor.kill(cancelled)
        evaluations += agreed.report.evaluations
        transport.flush()
    assert executor.weights.loaded_stages == set(executor.part.initial_stages)
    if len(executor.part.streamed_stages) > executor.part.slot_count:
        all_of_it = sum(source.size for source in streamed.sources.values())
        assert executor.weights.wait_time.copied_bytes > 2 * all_of_it
    steps = {name: training.progress.step for name, training in executor.attached.items()}
    return events, evaluations, views(executor.attached), steps


@cache
def alone(family, dtype, make, names="abcd"):
    base = whole_base(family, dtype)
    jobs = [job for job in make(base) if job.name in names]
    made = executors.executor_with(base, jobs)
    events = list(executors.run_program(made, executors.plan_program(jobs, 8, CAPACITY, begins=True), jobs))
    starts = views({job.name: executors.job_training(base, job) for job in jobs})
    return events, views(made.attached), starts


def of(answers, place):
    return {key: value for answer in answers for key, value in answer[place].items()}


@pytest.mark.parametrize("worker", [0, 1])
def test_layers_are_fused_though_those_between_are_on_another_worker(worker):
    cut, spec = CUTS["two workers, a slot each"], BaseSpec(model="tiny/llama")
    streamed = stream_model(deep("llama", torch.float32), spec, bench.CPU, cut, worker)
    executor = streamed_executor(streamed, Route.tiled, worker=worker)
    assert executor.layers.paths == [f"model.layers.{at}" for at in range(worker, LAYERS, 2)]
    executor.restore_base()


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        product(CUTS, (torch.float32, torch.float64)),
        [
            ("two workers, a slot for everything on one of them", torch.float32),
            ("two workers, one resident on each", torch.float32),
        ],
    ),
)
def test_losses_evaluations_and_adapters_have_the_bits_of_one_process(name, dtype):
    cut = CUTS[name]
    answers = run_workers(cut.workers, as_worker, "llama", dtype, cut, even_jobs, ring=True)
    events, weights, _ = alone("llama", dtype, even_jobs)
    mine = {job: [line[:2] for line in lines] for job, lines in losses_of(answers[0][0]).items()}
    assert mine == {job: [line[:2] for line in lines] for job, lines in losses_of(events).items()}
    assert {job: len(lines) for job, lines in mine.items()} == {"a": 3, "b": 4, "c": 5, "d": 4}
    assert of(answers, 2).keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(of(answers, 2)[key], value), key
    assert all(answer[3] == {"a": 3, "b": 4, "c": 5, "d": 4} for answer in answers)
    (ending,) = (answer for answer in answers if answer[1])
    sums = {}
    for evaluation in ending[1]:
        key = evaluation.job, evaluation.step
        sums[key] = sums[key] + evaluation if key in sums else evaluation
    found = {key: evaluation.loss / evaluation.tokens for key, evaluation in sums.items()}
    assert found == {(one.job, one.step): one.loss for one in events if isinstance(one, Evaluated)}
    assert set(found) == {("d", 0), ("d", 2), ("d", 4)}
    for happened, *_ in answers:
        saves = [one.step for one in happened if isinstance(one, SaveDue) and one.job == "d"]
        assert saves == [2]


@pytest.mark.slow
def test_clipping_takes_the_norm_over_all_workers():
    cut = CUTS["three workers, the first ends"]
    answers = run_workers(3, as_worker, "llama", torch.float64, cut, make_jobs, ring=True)
    events, weights, starts = alone("llama", torch.float64, make_jobs)
    losses = losses_of(answers[0][0])
    assert min(norm for lines in losses.values() for _, _, norm in lines) > 0.1, "all are clipped"
    assert_equal((losses, of(answers, 2)), (losses_of(events), weights, starts), 1e-9, 1e-8)


FAMILIES = ["qwen2", "qwen3", "mistral", "gemma3", "phi3", "opt", "gpt2", *MIXTURES]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_streams_over_workers(family):
    cut = CUTS["an odd number of stages"]
    answers = run_workers(2, as_worker, family, torch.float64, cut, make_jobs, ring=True)
    events, weights, starts = alone(family, torch.float64, make_jobs)
    assert_equal((losses_of(answers[0][0]), of(answers, 2)), (losses_of(events), weights, starts), 1e-9, 1e-8)


def test_a_nan_kills_its_job_on_every_worker_and_the_others_equal_a_run_without_it():
    cut = CUTS["two workers, a slot each"]
    answers = run_workers(2, as_worker, "llama", torch.float64, cut, make_jobs, "a", ring=True)
    (failed,) = (event for event in answers[0][0] if isinstance(event, Failed))
    assert (failed.job, failed.reason) == ("a", "its loss at step 1 is nan")
    assert all(answer[3] == {"a": 0, "b": 3, "c": 4} for answer in answers)
    weights = {key: value for key, value in of(answers, 2).items() if key[0] != "a"}
    events, *wanted = alone("llama", torch.float64, make_jobs, "bc")
    assert_equal((losses_of(answers[0][0]), weights), (losses_of(events), *wanted), 1e-9, 1e-8)


def test_a_job_that_the_first_worker_ends_makes_no_more_steps_anywhere():
    cut = CUTS["two workers, a slot each"]
    answers = run_workers(2, as_worker, "llama", torch.float64, cut, make_jobs, None, "a", ring=True)
    losses = losses_of(answers[0][0])
    assert len(losses.pop("a")) == 1
    assert all(answer[3] == {"a": 1, "b": 3, "c": 4} for answer in answers)
    weights = {key: value for key, value in of(answers, 2).items() if key[0] != "a"}
    events, *wanted = alone("llama", torch.float64, make_jobs, "bc")
    assert_equal((losses, weights), (losses_of(events), *wanted), 1e-9, 1e-8)


def test_stages_of_other_workers_are_nowhere_and_those_that_stay_have_no_copy_in_host_memory():
    cut = CUTS["two workers, one resident on each"]
    for worker, streamed, gone in ((0, {0}, (1, 3)), (1, {3}, (0, 2))):
        held = stream_model(deep("llama", torch.float32), BaseSpec(model="tiny"), bench.CPU, cut, worker)
        assert set(held.sources) == streamed
        layers = held.whole.model.base_model.layers
        assert all(not list(layers[number].parameters()) for number in gone)
        assert (held.whole.is_first, held.whole.is_last) == (worker == 0, worker == 1)
        assert held.whole.shape.layers == 2


def test_a_stage_that_has_left_its_worker_cannot_be_used():
    cut = CUTS["two workers, a slot each"]
    base = stream_model(deep("llama", torch.float32), BaseSpec(model="tiny"), bench.CPU, cut, worker=1)
    executor = streamed_executor(base, worker=1)
    executor.weights.begin_window()
    assert executor.weights.loaded_stages == {1}
    weight = base.whole.model.base_model.layers[1].self_attn.q_proj.weight
    assert bool(weight.isfinite().all())
    executor.weights.evict(1)
    assert bool(weight.isnan().all())
    with pytest.raises(AssertionError, match="stage 1 is used but was not brought"):
        executor.weights.make_readable(1)
