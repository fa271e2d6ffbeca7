"""Master weights and moments in host memory: every job trains to the bits that it has with them on the
device, no pass overtakes a Step, and checkpoints go from one layout to the other."""

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from tests.cases import slow_but
from tests.interpreter import interpret
from tests.run import executors
from tests.run.host_steps import Short
from tests.run.models import LAYERS
from tests.run.test_stream_steps import MANY_PIECES, Noted, masters_of, one_job
from tests.run.test_streamed import CAPACITY, attach_jobs, evaluated_jobs, resident, run, told, windows
from tests.run.workers.test_agreed import make_jobs, whole_base
from weftune.ops.adamw import update
from weftune.plan.cost import ring
from weftune.plan.cost.ring import PIECES
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.program.program import Backward, Step
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Evaluated, Failed, OutOfMemory, Stepped
from weftune.run.stream import adapter_steps
from weftune.run.stream.adapter_steps import PieceLanes
from weftune.run.stream.offloaded_optimizer import OffloadedOptimizer
from weftune.run.training import checkpoint
from weftune.run.training.state import OpenBatch, new_training
from weftune.run.training.steps import StepRequest

OFFLOADED = one_device_layout(LAYERS, offloads_optimizer=True)
LAYOUTS = (one_device_layout(LAYERS), OFFLOADED)
STATE = ("master", "exp_avg", "exp_avg_sq", "weights")


def executor_of(layout=OFFLOADED, make=update, dtype=torch.float32, family="llama"):
    return resident_executor(whole_base(family, dtype), part=layout.for_worker(0), apply_updates=make)


def pieces_of(monkeypatch, size):
    for module in (adapter_steps, ring):
        monkeypatch.setattr(module, "PIECE", size)


def poison(executor, monkeypatch):
    """NaN where weights of jobs are, from the moment that their Step is asked for until it is made."""
    step = executor.adapters.step

    def stepped(due):
        found = step(due)
        for one in due:
            one.training.state.weights.fill_(math.nan)
        return found

    monkeypatch.setattr(executor.adapters, "step", stepped)


def plan(executor, jobs, rounds):
    """The same wherever the optimizer is: with it in host memory, a window of its own would have two
    groups."""
    courses = [job.job_window(executor.attached[job.name].progress.step, rounds, False) for job in jobs]
    return plan_window(courses, one_device_layout(LAYERS), CAPACITY)


def to_the_end(executor, jobs, rounds=2):
    while any(executor.attached[job.name].progress.step < job.recipe.steps for job in jobs):
        run(executor, plan(executor, jobs, rounds), jobs)


def compare(executor, wanted):
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    assert isinstance(executor.adapters, OffloadedOptimizer)
    events, masters = windows(
        executor, jobs, lambda courses: plan_window(courses, one_device_layout(), CAPACITY)
    )
    assert len(events) > 8
    heard = [(type(event), event.job, event.step) for event in events]
    for at, (kind, job, step) in enumerate(heard):
        assert kind is not Evaluated or step == 0 or (Stepped, job, step) in heard[:at]
    assert sorted(events, key=str) == sorted(wanted[0], key=str)
    for name, master in wanted[1].items():
        assert torch.equal(masters[name], master), name


@pytest.mark.parametrize(
    ("dtype", "piece"),
    slow_but(
        product((torch.float32, torch.float64), (MANY_PIECES, ring.PIECE)),
        [(torch.float32, MANY_PIECES)],
    ),
)
def test_losses_evaluations_and_adapters_have_the_bits_of_state_on_the_device(dtype, piece, monkeypatch):
    pieces_of(monkeypatch, piece)
    compare(executor_of(dtype=dtype), resident("llama", dtype))


def test_no_pass_reads_weights_whose_step_is_not_made(monkeypatch):
    pieces_of(monkeypatch, MANY_PIECES)
    executor = executor_of()
    poison(executor, monkeypatch)
    compare(executor, resident("llama", torch.float32))


@pytest.mark.slow
def test_with_the_kernel_of_a_gpu_too(monkeypatch):
    """Which decides by itself whether a step can be made."""
    interpret(monkeypatch)
    pieces_of(monkeypatch, 512)
    masters, events = [], []
    for layout in (one_device_layout(LAYERS), OFFLOADED):
        executor = executor_of(layout)
        jobs = make_jobs(executor.base)[:2]
        attach_jobs(executor, jobs)
        executor.attached["b"].state.weights[3] = math.nan
        events.append(sorted(map(str, told(run(executor, plan(executor, jobs, 2), jobs)))))
        masters.append(masters_of(executor))
    assert events[0] == events[1]
    assert sum("Failed" in event for event in events[0]) == 1
    for name, master in masters[0].items():
        assert torch.equal(masters[1][name], master), name


def test_master_weights_and_moments_alone_are_in_host_memory():
    """Where all memory is the host's, by the addresses that passes read."""
    executor = executor_of()
    job = one_job(executor.base)
    attach_jobs(executor, [job])
    state, here = executor.attached["a"].state, executor.banks.attached["a"]
    assert here.weights.data_ptr() == state.weights.data_ptr()
    assert here.gradient.data_ptr() == state.gradient.data_ptr()
    moved = {state.master.data_ptr(), state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr()}
    first = min(moved)
    assert {address - first for address in moved} == {0, state.master.nbytes, 2 * state.master.nbytes}, (
        "one piece of host memory"
    )
    assert executor.home == torch.device("cpu")


def test_it_is_for_a_base_that_stays_on_one_device():
    for wrong in (
        {"adapters_travel": True},
        {"replicas": 2},
        {"stages": (StageLayers(0, 2, True), StageLayers(2, 4, True))},
        {"stages": (StageLayers(0, 4),), "slot_counts": (1,)},
    ):
        with pytest.raises(AssertionError, match="stays on one device"):
            replace(OFFLOADED, **wrong)
    assert Layout((StageLayers(0, 4, True),)) == one_device_layout(4) != OFFLOADED


# -- beside passes ---------------------------------------------------------------------------------------


def test_a_pass_waits_for_the_steps_of_its_own_jobs_and_starts_those_of_others(monkeypatch):
    make = Noted()
    executor = executor_of(make=make)
    jobs = [executors.prepare(executor.base, name, seed=seed, batch_size=2) for seed, name in enumerate("ab")]
    attach_jobs(executor, jobs)
    program = plan_window([job.job_window(0, 1, False) for job in jobs], one_device_layout(), capacity=24)
    kinds = [type(action) for action in program.actions]
    assert kinds.index(Step) < len(kinds) - 1 - kinds[::-1].index(Backward)
    passes = []
    forward = executor.passes.forward

    def noted(visit, rows, input_TD, keep):
        passes.append((program.microbatches[visit.microbatch].jobs, make.made))
        return forward(visit, rows, input_TD, keep)

    monkeypatch.setattr(executor.passes, "forward", noted)
    ahead = executor.adapters.prepare_next_passes
    behind = []

    def asked(stage, jobs):
        ahead(stage, jobs)
        behind.append(make.made)

    monkeypatch.setattr(executor.adapters, "prepare_next_passes", asked)
    assert len(told(run(executor, program, jobs))) == 2
    steps_before = [sum(kind is Step for kind in kinds[:at]) for at, kind in enumerate(kinds)]
    asked_for = [steps_before[at] for at, kind in enumerate(kinds) if kind.__name__ == "Forward"]
    assert max(asked_for) == 1, "a job steps before the other's last pass"
    assert [made for _, made in passes] == [0] * len(passes), "nobody's own step was due"
    assert behind == asked_for, "it is made beside the pass"
    assert make.made == 2


def test_by_its_own_plan_steps_of_a_group_are_asked_for_while_the_other_passes(monkeypatch):
    make, passes = Noted(), []
    executor = executor_of(make=make)
    jobs = make_jobs(executor.base)
    attach_jobs(executor, jobs)
    courses = [job.job_window(0, 3, False) for job in jobs]
    program = plan_window(courses, OFFLOADED, CAPACITY)
    forward = executor.passes.forward

    def noted(visit, rows, input_TD, keep):
        passes.append(
            (
                program.microbatches[visit.microbatch].jobs,
                {job for job, _ in executor.adapters.steps.all_pending_pairs()},
            )
        )
        return forward(visit, rows, input_TD, keep)

    def first(visit, rows, input_TD, keep):
        if executor.adapters._steps_underway is None:
            return forward(visit, rows, input_TD, keep)
        return noted(visit, rows, input_TD, keep)

    monkeypatch.setattr(executor.passes, "forward", first)
    assert len(told(run(executor, program, jobs))) == 3 * len(jobs)
    behind = [left for _, left in passes if left]
    assert len(behind) == 2 * 3 - 1, "once for every group but the last"
    assert all(left.isdisjoint(present) for present, left in passes)
    assert make.made == 3 * len(jobs)


class NotedStream:
    """Notes what it is asked to wait for; everything happens at once."""

    def __init__(self, name):
        self.name, self.waited, self.made = name, [], 0

    def wait_event(self, event):
        self.waited.append(event)

    def wait_stream(self, other):
        self.waited.append(other.name)

    def record_event(self):
        return NotedEvent(self.name, self.made)


@dataclass(frozen=True)
class NotedEvent:
    stream: str
    made: int

    def synchronize(self):
        pass


def test_on_a_gpu_a_pass_waits_for_steps_of_its_own_jobs_once_and_what_comes_waits_for_no_pass(monkeypatch):
    """No GPU is here; tests/test_offloaded_gpu.py has real streams."""
    pieces_of(monkeypatch, 512)
    up, making, down, passes = map(NotedStream, ("up", "make", "down", "passes"))
    current = [passes]

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def noting(updates, factor_J=None):
        assert current[-1] is making
        making.made += len(updates)
        return update(updates, factor_J)

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    executor = executor_of(make=noting)
    adapters, jobs = executor.adapters, [one_job(executor.base), *make_jobs(executor.base)[1:2]]
    attach_jobs(executor, jobs)
    adapters.steps.ring.lanes = PieceLanes(up, making, down)
    for training in executor.attached.values():
        training.gradient.fill_(1.0)
        training.open_batch = open_batch()
    underway = adapters.step([StepRequest(executor.attached[name], 6) for name in "ab"])
    assert making.waited == ["passes"], "updates follow the passes that made the gradients"
    assert not adapters.make_readable(0, [], before_backward=False)
    assert adapters.make_readable(0, ["a"], before_backward=False)
    first = making.made
    assert first == -(-executor.attached["a"].layout.size // 512) > PIECES
    assert passes.waited == [NotedEvent("make", first)]
    adapters.prepare_next_passes(0, ["a"])
    assert making.made > first
    assert passes.waited == [NotedEvent("make", first)], "nobody waits for what was asked for behind the pass"
    assert not adapters.make_readable(0, ["a"], before_backward=True)
    assert adapters.make_readable(0, ["b"], before_backward=False)
    assert passes.waited == [NotedEvent("make", first), NotedEvent("make", making.made)]
    assert not adapters.make_readable(0, ["a", "b"], before_backward=True)
    # From the fourth piece on a buffer is filled when what was in it is back on the host.
    assert {event.stream for event in up.waited} == {"down"}
    assert len(up.waited) == down.waited.count("make") - PIECES
    assert len(underway.outcomes()) == 2


# -- jobs that come, fail and go -------------------------------------------------------------------------


def test_a_job_whose_loss_is_nan_fails_alone_and_keeps_the_state_of_its_last_step():
    found = []
    for layout in (one_device_layout(LAYERS), OFFLOADED):
        executor = executor_of(layout)
        jobs = make_jobs(executor.base)
        attach_jobs(executor, jobs)
        run(executor, plan(executor, jobs, 1), jobs)
        executor.attached["a"].state.weights.fill_(math.nan)
        events = told(run(executor, plan(executor, jobs, 2), jobs))
        assert {event.job for event in events if isinstance(event, Failed)} == {"a"}
        found.append((sorted(map(str, events)), masters_of(executor)))
    (events, masters), (wanted, wanted_masters) = found[1], found[0]
    assert events == wanted
    for name, master in wanted_masters.items():
        assert torch.equal(masters[name], master), name


def test_a_job_whose_weights_are_not_finite_after_its_step_fails_alone():
    executor = executor_of()
    jobs = make_jobs(executor.base)[:2]
    attach_jobs(executor, jobs)
    for training in executor.attached.values():
        training.gradient.fill_(1.0)
        training.open_batch = open_batch()
    executor.attached["b"].master[-1] = math.inf
    made, failed = executor.adapters.step(
        [StepRequest(executor.attached[name], 6) for name in "ab"]
    ).outcomes()
    assert failed == "its weights after step 1 are not finite"
    assert made.grad_norm > 0


@pytest.mark.parametrize("when", ["killed", "leaves"])
def test_a_job_that_goes_while_its_step_is_not_made_takes_all_of_it_along(when):
    executor, other = executor_of(), executor_of()
    jobs = make_jobs(executor.base)
    for each in (executor, other):
        attach_jobs(each, jobs)
        for job in jobs:
            training = each.attached[job.name]
            generator = torch.Generator().manual_seed(job.spec.seed)
            training.gradient.copy_(torch.randn(training.gradient.shape, generator=generator))
            training.open_batch = open_batch()
    underway = executor.adapters.step([StepRequest(executor.attached[job.name], 6) for job in jobs])
    other.adapters.step([StepRequest(other.attached[job.name], 6) for job in jobs]).outcomes()
    if when == "killed":
        executor.kill("a")
        underway.outcomes()
        assert not executor.attached["a"].state.weights.any(), "its step was made before, and nothing follows"
        return
    for job in jobs:
        left, want = executor.detach(job.name), other.attached[job.name]
        for name in STATE:
            assert torch.equal(getattr(left.state, name), getattr(want.state, name)), (job.name, name)


def open_batch():
    return OpenBatch(torch.tensor(1.5, dtype=torch.float64), torch.tensor(3), 20)


def test_a_larger_job_that_comes_later_makes_the_buffers_grow_up_to_a_piece(monkeypatch):
    pieces_of(monkeypatch, 4096)
    found = []
    for layout in (one_device_layout(LAYERS), OFFLOADED):
        executor = executor_of(layout)
        small, *others = sorted(make_jobs(executor.base), key=lambda job: job.shape.trainable_parameters)
        attach_jobs(executor, [small])
        if layout is OFFLOADED:
            assert (
                executor.adapters.steps.ring.capacity
                == adapter_steps.round_up(small.shape.trainable_parameters)
                < 4096
            )
        run(executor, plan(executor, [small], 1), [small])
        attach_jobs(executor, others)
        if layout is OFFLOADED:
            assert executor.adapters.steps.ring.capacity == 4096
            states = [buffer.state for buffer in executor.adapters.steps.ring.buffers]
            held = sum(vector.nbytes for state in states for vector in state.vectors)
            sizes = [job.shape.trainable_parameters for job in (small, *others)]
            assert held <= ring.optimizer_ring_bytes(sizes, bytes_per_value=4)
        run(executor, plan(executor, [small, *others], 2), [small, *others])
        found.append(masters_of(executor))
    for name, master in found[0].items():
        assert torch.equal(found[1][name], master), name


# -- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    slow_but(product(LAYOUTS, LAYOUTS), [LAYOUTS, LAYOUTS[::-1]]),
)
def test_a_checkpoint_goes_on_wherever_the_optimizer_is(before, after, tmp_path):
    executor = executor_of(before)
    jobs = make_jobs(executor.base)
    attach_jobs(executor, jobs)
    run(executor, plan(executor, jobs, 2), jobs)
    for job in jobs:
        executor.save(job.name, tmp_path / job.name)
        executor.finish_saves(job.name)
    to_the_end(executor, jobs)
    resumed = executor_of(after)
    for job in jobs:
        adapter = executors.JobAdapter(job.name, job.spec.adapter, job.spec.seed)
        base = resumed.base
        training = new_training(adapter, job.recipe, base.shape.sites, base.dtype, resumed.home)
        assert checkpoint.restore(tmp_path / job.name, training)
        resumed.attach(training)
    to_the_end(resumed, jobs)
    for name, training in executor.attached.items():
        for vector in STATE:
            mine, theirs = (getattr(one.attached[name].state, vector) for one in (resumed, executor))
            assert torch.equal(mine, theirs), (name, vector)
        assert resumed.attached[name].progress == training.progress


# -- shortages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", slow_but((0, 1, 9, 30, 45), [9]))
def test_a_shortage_in_the_middle_of_a_step_repeats_no_piece_of_it(at, monkeypatch):
    pieces_of(monkeypatch, 512)
    makes = Short(at, halfway=False), Noted()
    short, undisturbed = (executor_of(make=make, dtype=torch.float64) for make in makes)
    jobs = make_jobs(short.base)
    for executor in (short, undisturbed):
        attach_jobs(executor, jobs)
    events = executors.run_program(short, plan(short, jobs, 2), jobs)
    found = []
    with pytest.raises(OutOfMemory):
        found += events
    assert all(isinstance(event, Stepped) for event in told(found))
    for executor in (short, undisturbed):
        to_the_end(executor, jobs, rounds=1)
    assert makes[0].made == makes[1].made
    for name, master in masters_of(undisturbed).items():
        # Rounds that were broken off are packed anew.
        assert torch.allclose(short.attached[name].master, master, rtol=1e-9, atol=1e-12), name
        assert short.attached[name].progress == undisturbed.attached[name].progress
