"""Steps that are made piece by piece before the next round's passes: no pass overtakes them or has more made
than it needs."""

import math
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.run import executors
from tests.run.host_steps import Short, buffer_bytes, promised_bytes
from tests.run.models import LAYERS, deep
from tests.run.test_streamed import (
    CAPACITY,
    CUTS,
    attach_jobs,
    evaluated_jobs,
    resident,
    run,
    told,
    travelling,
    windows,
)
from tests.run.workers.test_agreed import make_jobs
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.ops.adamw import update
from weftune.plan.cost import ring
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.program import Backward, Forward, Step
from weftune.plan.window.window import plan_window
from weftune.run.assemble import streamed_executor
from weftune.run.events import Evaluated, Failed, OutOfMemory, Stepped
from weftune.run.stream import adapter_steps
from weftune.run.stream.adapters import OUTSIDE_STAGE

ALL_CUTS = CUTS | {"in one piece": Layout((StageLayers(0, LAYERS, True),))}


def one_job(base, steps=4):
    """A microbatch a round, with parameters in every stage."""
    return executors.prepare(
        base, "a", steps=steps, batch_size=1, adapter={"rank": 4, "targets": "all-linear"}
    )


def executor_of(cut, make=update, dtype=torch.float32):
    base = stream_model(deep("llama", dtype), BaseSpec(model="tiny"), bench.CPU, travelling(cut))
    return streamed_executor(base, apply_updates=make)


@contextmanager
def before_passes(executor, do):
    """`do(stage)` before every pass over a stage."""
    layers = executor.base.model.base_model.layers
    hooks = [
        layers[held.start].register_forward_pre_hook(lambda *_, stage=stage: do(stage))
        for stage, held in enumerate(executor.part.layout.stages)
    ]
    yield
    for hook in hooks:
        hook.remove()


def after_begin(executor, monkeypatch, do):
    """`do(training)` for every job whose Step has just been asked for."""
    begin = executor.adapters.steps.begin

    def begun(requests, norm_J, arrived):
        run = begin(requests, norm_J, arrived)
        for one in requests:
            do(one.training)
        return run

    monkeypatch.setattr(executor.adapters.steps, "begin", begun)


def plan(executor, jobs, rounds, begins=False):
    courses = [job.job_window(executor.attached[job.name].progress.step, rounds, begins) for job in jobs]
    return plan_window(courses, executor.part.layout, CAPACITY)


def to_the_end(executor, jobs, rounds=2):
    events = []
    while any(executor.attached[job.name].progress.step < job.recipe.steps for job in jobs):
        events += told(run(executor, plan(executor, jobs, rounds), jobs))
    return events


def masters_of(executor):
    return {name: one.master.clone() for name, one in executor.attached.items()}


class Noted:
    """Makes updates and counts them."""

    def __init__(self):
        self.made = 0

    def __call__(self, updates, factor_J=None):
        self.made += len(updates)
        return update(updates, factor_J)


@pytest.fixture(scope="module")
def wanted():
    return resident("llama", torch.float32)


# -- no pass is too early --------------------------------------------------------------------------------


def poison(executor, monkeypatch):
    """NaN where weights of jobs are, from the moment that their Step is asked for until it is made."""

    def spoil(training):
        training.state.weights.fill_(math.nan)
        for room in executor.adapters.transfers.adapters[training.job].weights.values():
            room.fill_(math.nan)

    after_begin(executor, monkeypatch, spoil)


def poisoned_update(updates, factor_J=None):
    """A buffer's weights are nothing that anybody may read before the update."""
    for one in updates:
        one.state.weights.fill_(math.nan)
    return update(updates, factor_J)


MANY_PIECES = 128


@pytest.mark.parametrize(
    ("name", "piece"),
    slow_but(
        product(ALL_CUTS, (MANY_PIECES, ring.PIECE)),
        [
            ("one slot", ring.PIECE),
            ("uneven, two stay", MANY_PIECES),
        ],
    ),
)
def test_no_pass_reads_and_no_copy_takes_weights_whose_step_is_not_made(name, piece, wanted, monkeypatch):
    monkeypatch.setattr(adapter_steps, "PIECE", piece)
    executor = executor_of(ALL_CUTS[name], poisoned_update)
    poison(executor, monkeypatch)
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    cut = executor.part.layout
    events, masters = windows(executor, jobs, lambda courses: plan_window(courses, cut, CAPACITY))
    assert sorted(events, key=str) == sorted(wanted[0], key=str)
    for name, master in wanted[1].items():
        assert torch.equal(masters[name], master), name


def test_what_is_saved_and_looked_at_between_windows_is_made(monkeypatch):
    """A window's end leaves nothing to be made, on the host or where stages are."""
    executor = executor_of(CUTS["uneven, two stay"])
    poison(executor, monkeypatch)
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    run(executor, plan(executor, jobs, 1), jobs)
    assert not executor.adapters.steps.all_pending_pairs()
    for job in jobs:
        training = executor.attached[job.name]
        assert training.progress.step == 1
        assert torch.equal(training.state.weights, training.master)
        for stage, part in executor.adapters.transfers.adapters[job.name].parts.items():
            room = executor.adapters.transfers.device_weights(job.name, stage)
            assert room is None or torch.equal(room, training.master[part.start : part.stop])


# -- no pass waits for more than it needs ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["a layer at a time", "one slot", "uneven, two stay", "three slots"])
def test_a_forward_finds_the_parts_of_its_stage_made_and_behind_it_those_of_the_next_are_asked_for(
    name, monkeypatch
):
    """With one slot the next comes only when the stage at work has left."""
    make, passes, behind = Noted(), [], []
    executor = executor_of(CUTS[name], make)
    job = one_job(executor.base)
    attach_jobs(executor, [job])
    forward = executor._forward

    def noted(visit):
        forward(visit)
        behind.append((visit.stage, make.made))

    monkeypatch.setattr(executor, "_forward", noted)
    with before_passes(executor, lambda stage: passes.append((stage, make.made))):
        events = run(executor, plan(executor, [job], 2), [job])
    assert len(told(events)) == 2
    first, second = passes[: len(passes) // 2], passes[len(passes) // 2 :]
    assert {made for _, made in first} == {0}
    assert second[:LAYERS] == [(stage, stage + 1) for stage in range(LAYERS)]
    ahead = 0 if name == "one slot" else 1
    assert behind[LAYERS:] == [(stage, min(stage + 1 + ahead, LAYERS)) for stage in range(LAYERS)]
    assert {made for _, made in second[LAYERS:]} == {LAYERS}
    assert make.made == 2 * LAYERS


@pytest.mark.parametrize("name", ["a layer at a time", "one slot"])
def test_steps_of_all_jobs_are_asked_for_stage_by_stage_those_of_the_first_microbatch_first(
    name, monkeypatch
):
    """What is asked for waits for all that was asked for before it."""
    executor = executor_of(CUTS[name])
    jobs = [executors.prepare(executor.base, name, seed=seed, batch_size=2) for seed, name in enumerate("ab")]
    attach_jobs(executor, jobs)
    program = plan_window([job.job_window(0, 2, False) for job in jobs], executor.part.layout, capacity=24)
    kinds = [type(action) for action in program.actions]
    second = program.actions[kinds.index(Forward, kinds.index(Step)) :]
    (first,) = program.microbatches[second[0].microbatch].jobs
    ask, asked = executor.adapters.steps.start, []

    def noted(pairs, writable):
        asked.extend(pairs)
        ask(pairs, writable)

    monkeypatch.setattr(executor.adapters.steps, "start", noted)
    assert len(told(run(executor, program, jobs))) == 4
    forth, at_the_end = asked[: 2 * LAYERS], asked[2 * LAYERS :]
    jobs = [first, *{"a", "b"} - {first}]
    assert forth == [(job, stage) for stage in range(LAYERS) for job in jobs]
    assert at_the_end == [(job, stage) for stage in range(LAYERS) for job in "ab"]


def test_passes_do_not_wait_for_steps_of_jobs_that_they_do_not_hold():
    """Behind the Steps of the first microbatch the second goes back through the first stage."""
    make, passes = Noted(), []
    executor = executor_of(CUTS["two and two"], make)
    jobs = [executors.prepare(executor.base, name, seed=seed, batch_size=2) for seed, name in enumerate("ab")]
    attach_jobs(executor, jobs)
    program = plan_window([job.job_window(0, 1, False) for job in jobs], executor.part.layout, capacity=24)
    kinds = [type(action) for action in program.actions]
    assert kinds.index(Step) < len(kinds) - 1 - kinds[::-1].index(Backward)
    with before_passes(executor, lambda stage: passes.append((stage, make.made))):
        assert len(told(run(executor, program, jobs))) == 2
    assert len(passes) == 3 * len(program.microbatches)
    assert {made for _, made in passes} == {0}
    assert make.made == 2 * len(jobs)


@pytest.mark.parametrize("name", slow_but(ALL_CUTS, ["one slot", "uneven, two stay", "in one piece"]))
def test_gradients_leave_stage_by_stage_and_at_a_step_only_the_first_ones_are_left(name, monkeypatch):
    cut = ALL_CUTS[name]
    executor = executor_of(cut)
    jobs = make_jobs(executor.base)
    attach_jobs(executor, jobs)
    transfers, left = executor.adapters.transfers, []
    take = transfers.copy_all_gradients_out

    def noted(due):
        left.append({stage for job, stage in transfers._device_gradients})
        take(due)

    monkeypatch.setattr(transfers, "copy_all_gradients_out", noted)
    assert len(told(run(executor, plan(executor, jobs, 2), jobs))) == 2 * len(jobs)
    assert left
    assert all(0 in stages <= {0, OUTSIDE_STAGE} for stages in left)


# -- the ring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "dtype"),
    slow_but(
        product((64, ring.PIECE), (torch.float32, torch.float64)),
        [(64, torch.float32), (ring.PIECE, torch.float64)],
    ),
)
def test_a_job_with_a_larger_part_comes_aboard_later_and_the_buffers_grow_as_promised(
    piece, dtype, monkeypatch
):
    for module in (adapter_steps, ring):
        monkeypatch.setattr(module, "PIECE", piece)
    found = []
    for later in (False, True):
        executor = executor_of(CUTS["a layer at a time"], dtype=dtype)
        *_, large, small = sorted(make_jobs(executor.base), key=lambda job: -job.shape.trainable_parameters)
        attach_jobs(executor, [small] if later else [small, large])
        held = buffer_bytes(executor.adapters.steps)
        run(executor, plan(executor, [small], 1), [small])
        if later:
            assert 0 < held <= promised_bytes(executor.adapters.transfers, dtype.itemsize)
            attach_jobs(executor, [large])
            assert (buffer_bytes(executor.adapters.steps) > held) == (piece > 64)
        assert (
            held
            <= buffer_bytes(executor.adapters.steps)
            <= promised_bytes(executor.adapters.transfers, dtype.itemsize)
        )
        run(executor, plan(executor, [small, large], 2), [small, large])
        found.append(masters_of(executor))
    for name, master in found[0].items():
        assert torch.equal(found[1][name], master), name


# -- jobs that fail --------------------------------------------------------------------------------------


def test_a_job_that_steps_to_weights_that_are_not_finite_fails_alone(monkeypatch):
    cut = CUTS["a layer at a time"]

    def spoil(training):
        if training.job == "a" and training.progress.step == 1:
            training.gradient[-1] = math.inf

    executor, alone = executor_of(cut), executor_of(cut)
    after_begin(executor, monkeypatch, spoil)
    for each in (executor, alone):
        attach_jobs(each, make_jobs(each.base))
    jobs = make_jobs(executor.base)
    events = told(run(executor, plan(executor, jobs, 4), jobs))
    failed = [event for event in events if isinstance(event, Failed)]
    assert failed == [Failed("a", "its weights after step 2 are not finite")]
    assert [event.step for event in events if isinstance(event, Stepped) and event.job == "a"] == [1]
    others = [job for job in jobs if job.name != "a"]
    run(alone, plan(alone, others, 4), others)
    for job in others:
        mine, theirs = executor.attached[job.name].master, alone.attached[job.name].master
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        assert bool(mine.isfinite().all())
        assert executor.attached[job.name].progress.step == job.recipe.steps


@pytest.mark.parametrize("last", [1, 2])
def test_a_job_that_fails_in_its_step_is_not_evaluated_after_it(last):
    def spoiling(updates, factor_J=None):
        return update(updates, factor_J) & (updates[0].step != last)

    executor = executor_of(CUTS["a layer at a time"], spoiling)
    (*_, looking) = evaluated_jobs(executor.base)
    attach_jobs(executor, [looking])
    program = plan(executor, [looking], 2)
    assert looking.evaluate_at >= {2}
    *before, failed = told(run(executor, program, [looking]))
    assert failed == Failed("d", f"its weights after step {last} are not finite")
    assert [(type(event), event.step) for event in before] == [(Stepped, n) for n in range(1, last)]


def test_a_mistake_in_a_step_ends_the_run_with_it():
    def broken(updates, factor_J=None):
        raise ArithmeticError("a mistake")

    executor = executor_of(CUTS["two and two"], broken)
    job = one_job(executor.base)
    attach_jobs(executor, [job])
    with pytest.raises(ArithmeticError, match="a mistake"):
        run(executor, plan(executor, [job], 2), [job])


# -- jobs that leave -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at"),
    slow_but(
        [
            *(("one slot", at) for at in range(LAYERS - 1)),
            *(("a layer at a time", at) for at in range(LAYERS - 2)),
        ],
        [("one slot", 0), ("one slot", LAYERS - 2), ("a layer at a time", 1)],
    ),
)
def test_a_job_can_be_killed_and_leave_while_its_step_is_being_made(name, at):
    """What is left is made first: its weights are zeroed when nobody writes them any longer."""
    executor = executor_of(CUTS[name])
    jobs = [executors.prepare(executor.base, name, seed=seed) for seed, name in enumerate("ab")]
    attach_jobs(executor, jobs)
    killed = False

    def kill(stage):
        nonlocal killed
        if stage == at and executor.adapters.steps.is_unfinished("a", LAYERS - 1) and not killed:
            assert executor.adapters.steps.is_unfinished("b", LAYERS - 1)
            killed = True
            executor.kill("a")
            assert not executor.adapters.steps.all_pending_pairs()

    with before_passes(executor, kill):
        events = told(run(executor, plan(executor, jobs, 3), jobs))
    assert killed
    assert not executor.attached["a"].state.weights.any()
    assert not any(room.any() for room in executor.adapters.transfers.adapters["a"].weights.values())
    assert {event.job for event in events} == {"b"}
    assert executor.detach("a").job == "a"
    assert executor.attached["b"].progress.step == 3
    assert "a" not in executor.adapters.transfers.adapters


@pytest.mark.parametrize(
    ("name", "at", "piece"),
    slow_but(
        [(*one, piece) for one in (("one slot", 1), ("a layer at a time", 0)) for piece in (64, ring.PIECE)],
        [("one slot", 1, 64), ("a layer at a time", 0, ring.PIECE)],
    ),
)
def test_a_job_that_leaves_while_parts_are_left_takes_all_of_its_step_along(name, at, piece, monkeypatch):
    monkeypatch.setattr(adapter_steps, "PIECE", piece)
    executor, other = (executor_of(CUTS[name]) for _ in range(2))
    jobs = make_jobs(executor.base)
    for each in (executor, other):
        attach_jobs(each, jobs)

    def end(stage):
        if (
            stage == at
            and executor.adapters.steps.is_unfinished("a", 2)
            and not executor.adapters.steps.is_unfinished("a", 1)
        ):
            raise ArithmeticError("a mistake")

    with before_passes(executor, end), pytest.raises(ArithmeticError, match="a mistake"):
        run(executor, plan(executor, jobs, 2), jobs)
    assert executor.adapters.steps.is_unfinished("a", 2)
    assert not executor.adapters.steps.is_unfinished("a", 1)
    run(other, plan(other, jobs, 1), jobs)
    for job in jobs:
        left, want = executor.detach(job.name), other.attached[job.name]
        assert not executor.adapters.steps.all_pending_pairs()
        for name in ("master", "exp_avg", "exp_avg_sq", "weights"):
            assert torch.equal(getattr(left.state, name), getattr(want.state, name)), (job.name, name)


# -- shortages -------------------------------------------------------------------------------------------


def test_after_a_shortage_steps_under_way_are_made_and_reported():
    executor = executor_of(CUTS["one slot"])
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    short, failed = True, 0

    def fail(stage):
        nonlocal failed
        if short and stage == 1 and executor.adapters.steps.is_unfinished("a", LAYERS - 1):
            failed += 1
            raise torch.OutOfMemoryError("no more")

    events = []
    with before_passes(executor, fail):
        found = executors.run_program(executor, plan(executor, jobs, 2, begins=True), jobs)
        with pytest.raises(OutOfMemory):
            events += found
        short = False
        assert failed == 1
        made = {event.job for event in events if isinstance(event, Stepped)}
        assert made == {job.name for job in jobs}
        assert {event.step for event in events if isinstance(event, Stepped)} == {1}
        assert not executor.adapters.steps.all_pending_pairs()
        events += to_the_end(executor, jobs)
    steps = {
        job.name: [e.step for e in events if isinstance(e, Stepped) and e.job == job.name] for job in jobs
    }
    assert steps == {job.name: list(range(1, job.recipe.steps + 1)) for job in jobs}
    assert any(isinstance(event, Evaluated) for event in events)


@pytest.mark.parametrize(
    ("at", "halfway"),
    slow_but(product((0, 1, 9, 30, 31, 45, 61), (False, True)), [(9, True)]),
)
def test_a_shortage_in_the_middle_of_a_step_repeats_no_piece_of_it(at, halfway, monkeypatch):
    """Rounds are as they were: what comes of them has the bits of the undisturbed run."""
    monkeypatch.setattr(adapter_steps, "PIECE", 512)
    makes = Short(at, halfway), Noted()
    both = [executor_of(CUTS["one slot"], make) for make in makes]
    jobs = make_jobs(both[0].base)
    for executor in both:
        attach_jobs(executor, jobs)
    short, undisturbed = both
    with pytest.raises(OutOfMemory):
        run(short, plan(short, jobs, 2), jobs)
    assert not short.adapters.steps.all_pending_pairs()
    for executor in both:
        to_the_end(executor, jobs, rounds=1)
    assert makes[0].made == makes[1].made
    for name, master in masters_of(undisturbed).items():
        assert torch.equal(short.attached[name].master, master), name
        assert short.attached[name].progress == undisturbed.attached[name].progress
