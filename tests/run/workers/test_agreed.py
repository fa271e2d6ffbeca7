"""A Program over several processes gives every job the losses and weights that one process gives it."""

import math
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from tests import bench
from tests.base.packs import cut_base
from tests.cases import slow_but
from tests.families import MIXTURES
from tests.run import executors
from tests.run.models import deep
from tests.run.processes import run_workers
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.shapes import LayerRange
from weftune.plan.cost.time import Line
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import Forward
from weftune.plan.window.pace import StagePace, pace_prices
from weftune.plan.window.pipeline import (
    PipelineOrder,
    PipelineRules,
    divide_into_microbatches,
    mix_groups,
    order_passes,
    plan_pipeline,
)
from weftune.run.events import Failed, Stepped
from weftune.run.parts import fetch_from
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import worker_executor
from weftune.trainer.job import collate_plan

PACE = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))
STEPS = {"a": 5, "b": 3, "c": 4}
CAPACITY = 40


def targets_for(base):
    """All linears, those of one layer, and some of every layer. An expression would be tried in a process of
    its own by every worker."""
    layer = (".layers.2.", ".h.2.")
    sites = (site.name for site in base.shape.sites if not site.experts)
    one_layer = [name for name in sites if any(part in name for part in layer)]
    return {"a": "all-linear", "b": one_layer, "c": ["q_proj", "v_proj", "fc1", "up_proj"]}


def make_jobs(base):
    """Of different rank, targets, length and batch size, with dropout; `a` has two learning rates (LoRA+) and
    `b` adapts one layer only. Where there are experts, `a` adapts all of them and `b` those of its layer."""
    targets = targets_for(base)
    mixes = any(site.experts for site in base.shape.sites)
    experts = {"a": ["gate_up_proj", "down_proj"], "b": ["model.layers.2.mlp.experts.down_proj"]}
    targets |= {"c": ["q_proj", "v_proj"]} if mixes else {}
    return [
        executors.prepare(
            base,
            name,
            seed=seed,
            steps=STEPS[name],
            batch_size=2 + seed,
            data=bench.rows(bench.samples(12, seed=seed, longest=8 + 6 * seed)),
            adapter={
                "rank": [4, 7, 3][seed],
                "alpha": 8.0,
                "targets": targets[name],
                "loraplus_lr_ratio": 8.0 if name == "a" else 1.0,
                **({"target_parameters": experts[name]} if mixes and name in experts else {"dropout": 0.2}),
            },
            clip=0.1,
        )
        for seed, name in enumerate("abc")
    ]


def whole_base(family, dtype):
    return Base.from_model(deep(family, dtype), BaseSpec(model=f"tiny/{family}"), bench.CPU)


def ranges(cuts):
    return [LayerRange(start, stop, cuts[-1]) for start, stop in pairwise(cuts)]


def cut(family, dtype, place, cuts):
    held = ranges(cuts)[place.stage]
    return cut_base(deep(family, dtype), BaseSpec(model=f"tiny/{family}"), bench.CPU, held)


def on_worker(base, connections, cuts, delay=0.0):
    """What runs this worker's list, its side of the agreement, and what they are connected by."""
    transport = Transport(connections, base.shape.hidden, base.dtype, base.device, delay)
    part = pipeline_layout(ranges(cuts), connections.position.replicas).for_worker(connections.position.stage)
    return *worker_executor(base, part, transport, connections.position.worker), transport


def pipeline_program(jobs, place, order, rounds=5):
    """In an order, or in groups of jobs whose microbatches alternate."""
    windows = [job.job_window(0, rounds, False) for job in jobs]
    if isinstance(order, tuple):
        return mixed_program(windows, order, PipelineRules(CAPACITY, (PACE,) * place.stages))
    rules = PipelineRules(CAPACITY, (PACE,) * place.stages, order, replicas=place.replicas)
    return plan_pipeline(windows, rules)


def mixed_program(windows, groups, rules):
    batches = [one.batches[turn] for turn in range(5) for one in windows if turn < len(one.batches)]
    apart = divide_into_microbatches(batches, groups, CAPACITY, rules, moves_samples=False)
    work = mix_groups(apart, groups)
    assert work.microbatches != apart.microbatches
    prices = pace_prices(work.microbatches, rules.paces)
    return order_passes(PipelineOrder.multi_job, work, prices, groups, rules)


def as_worker(connections, family, dtype, cuts, order, poison, cancelled=None):
    """Train the jobs on this worker; what happened here, and this worker's slices.

    The weights of `poison` are NaN; `cancelled` is ended by the first worker after its first step.
    """
    jobs = make_jobs(whole_base(family, dtype))
    base = cut(family, dtype, connections.position, cuts)
    executor, _, transport = on_worker(base, connections, cuts)
    for job in jobs:
        executor.attach(executors.job_training(base, job))
    if poison is not None:
        executor.banks.attached[poison].weights.fill_(math.nan)
    program = pipeline_program(jobs, connections.position, order)
    by_name = {job.name: job for job in jobs}
    microbatches = {
        n: collate_plan(plan, Forward, by_name)
        for n, plan in enumerate(program.microbatches)
        if plan.segments
    }
    events = []
    for event in executor.run(program, fetch_from(program, microbatches)):
        events.append(event)
        if isinstance(event, Stepped) and event.job == cancelled:
            executor.kill(cancelled)
    transport.flush()
    steps = {name: training.progress.step for name, training in executor.attached.items()}
    return events, views(executor.attached), steps


@cache
def alone(family, dtype, names="abc"):
    """The same jobs on one device."""
    base = whole_base(family, dtype)
    jobs = [job for job in make_jobs(base) if job.name in names]
    made = executors.executor_with(base, jobs)
    events = list(executors.run_program(made, executors.plan_program(jobs, 5, CAPACITY), jobs))
    weights = views(made.attached)
    starts = views({job.name: executors.job_training(base, job) for job in jobs})
    return losses_of(events), weights, starts


def views(trainings):
    return {
        (name, *key): value.clone()
        for name, training in trainings.items()
        for key, value in training.layout.parameter_views(training.master).items()
    }


def losses_of(events):
    found = {}
    for event in events:
        if isinstance(event, Stepped):
            found.setdefault(event.job, []).append((event.step, event.outcome.loss, event.outcome.grad_norm))
    return found


def assert_equal(got, want, loss_gap, weight_gap):
    losses, weights = got
    want_losses, want_weights, starts = want
    assert losses.keys() == want_losses.keys()
    for job, lines in want_losses.items():
        assert [line[0] for line in losses[job]] == [line[0] for line in lines]
        for mine, theirs in zip(losses[job], lines, strict=True):
            assert mine[1:] == pytest.approx(theirs[1:], rel=loss_gap)
    assert weights.keys() == want_weights.keys()
    for key, value in want_weights.items():
        moved = value - starts[key]
        gap = (weights[key] - value).norm()
        assert gap <= weight_gap * moved.norm() + 1e-30, key


CUTS = {2: [0, 3, 4], 4: [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("order", "workers"),
    slow_but(
        product(PipelineOrder, (2, 4)),
        [(PipelineOrder.alternating, 4), (PipelineOrder.template, 2)],
    ),
)
def test_losses_and_adapters_equal_one_process_in_float64(order, workers):
    answers = run_workers(workers, as_worker, "llama", torch.float64, CUTS[workers], order, None)
    weights = {key: value for _, slices, _ in answers for key, value in slices.items()}
    assert_equal((losses_of(answers[0][0]), weights), alone("llama", torch.float64), 1e-9, 1e-8)
    assert all(steps == STEPS for _, _, steps in answers)
    assert not any(isinstance(event, Stepped) for events, _, _ in answers[1:] for event in events)


@pytest.mark.parametrize(
    "groups", [(("a", "c"), ("b",)), pytest.param((("a",), ("b",), ("c",)), marks=pytest.mark.slow)]
)
def test_groups_whose_microbatches_alternate_train_what_one_process_trains(groups):
    answers = run_workers(2, as_worker, "llama", torch.float64, CUTS[2], groups, None)
    weights = {key: value for _, slices, _ in answers for key, value in slices.items()}
    assert_equal((losses_of(answers[0][0]), weights), alone("llama", torch.float64), 1e-9, 1e-8)
    assert all(steps == STEPS for _, _, steps in answers)


def test_workers_that_exchange_tensors_as_runs_on_a_cpu_do_train_the_same():
    """Other tests follow NCCL's rules instead (tests/run/workers/test_ordered.py)."""
    answers = run_workers(2, as_worker, "llama", torch.float64, CUTS[2], None, None, rules=False)
    weights = {key: value for _, slices, _ in answers for key, value in slices.items()}
    assert_equal((losses_of(answers[0][0]), weights), alone("llama", torch.float64), 1e-9, 1e-8)


@pytest.mark.parametrize("family", slow_but(["gpt2", "opt", "gemma3", *MIXTURES], ["gemma3"]))
def test_families_with_positions_windows_tied_heads_and_experts_train_the_same_in_stages(family):
    answers = run_workers(2, as_worker, family, torch.float64, CUTS[2], None, None)
    weights = {key: value for _, slices, _ in answers for key, value in slices.items()}
    assert_equal((losses_of(answers[0][0]), weights), alone(family, torch.float64), 1e-9, 1e-8)


def test_a_nan_kills_its_job_on_every_worker_and_the_others_equal_a_run_without_it():
    answers = run_workers(2, as_worker, "llama", torch.float64, CUTS[2], None, "a")
    (failed,) = (event for event in answers[0][0] if isinstance(event, Failed))
    assert (failed.job, failed.reason) == ("a", "its loss at step 1 is nan")
    assert all(steps == {"a": 0, "b": 3, "c": 4} for _, _, steps in answers)
    weights = {key: value for _, s, _ in answers for key, value in s.items() if key[0] != "a"}
    assert_equal((losses_of(answers[0][0]), weights), alone("llama", torch.float64, "bc"), 1e-9, 1e-8)


def test_a_job_that_the_first_worker_ends_makes_no_more_steps_anywhere():
    answers = run_workers(2, as_worker, "llama", torch.float64, CUTS[2], None, None, "a")
    losses = losses_of(answers[0][0])
    assert len(losses.pop("a")) == 1
    assert all(steps == {"a": 1, "b": 3, "c": 4} for _, _, steps in answers)
    weights = {key: value for _, s, _ in answers for key, value in s.items() if key[0] != "a"}
    assert_equal((losses, weights), alone("llama", torch.float64, "bc"), 1e-9, 1e-8)
