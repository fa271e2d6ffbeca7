"""Passes over streamed stages that are captured: which, when, and with the bits of plain ones.

No GPU is here: what is captured is work that is done again; tests/test_stream_gpu.py has real graphs."""

import pytest
import torch

from tests import bench
from tests.adapters.toys import GateSpec, toys  # noqa: F401 (a fixture)
from tests.families import config, randomised
from tests.interpreter import interpret
from tests.run import executors
from weftune.adapters import banks
from weftune.adapters.banks import Banks
from weftune.adapters.kind import JobAdapter
from weftune.adapters.registry import get_kind
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.program import Forward
from weftune.plan.window.window import plan_window
from weftune.run.assemble import streamed_executor
from weftune.run.events import Stepped
from weftune.run.passes.rows import to_device_microbatch
from weftune.run.passes.stage_graphs import MAX_KEYS, StageGraphs, VisitKind
from weftune.run.training.state import new_training
from weftune.trainer.job import collate_plan

STAGES = 3
LENGTH = 7
ADAPTER = {"rank": 4, "dropout": 0.1, "targets": ["v_proj"]}
ROUND = [
    *((VisitKind.forward, stage) for stage in range(STAGES - 1)),
    (VisitKind.turn, STAGES - 1),
    *((VisitKind.backward, stage) for stage in reversed(range(STAGES - 1))),
]
"""The visits of a microbatch."""


class Repeating:
    """Does work again where a graph would be replayed."""

    def __init__(self, short_at=()):
        self.capture_graph, self.done, self.cleared = 0, 0, 0
        self.room = True
        self._short_at = short_at

    def capture(self, work):
        self.capture_graph += 1
        if self.capture_graph in self._short_at:
            raise torch.OutOfMemoryError("no more")

        def again():
            self.done += 1
            work()

        return again

    def has_room(self):
        return self.room

    def clear(self):
        self.cleared += 1


def streamed(cut):
    shape = config("llama")
    shape.num_hidden_layers = STAGES
    model = randomised(shape, torch.float32)
    return stream_model(model, BaseSpec(model="tiny/llama", dtype="float32"), bench.CPU, cut)


def a_layer_each(slots=1, **others):
    return Layout(tuple(StageLayers(n, n + 1) for n in range(STAGES)), (slots,), **others)


def ready(base, name, length=LENGTH, **keys):
    """Samples of one length, which fill a microbatch each."""
    rows = bench.rows(bench.samples(8, seed=len(name), shortest=length, longest=length))
    return executors.prepare(base, name, data=rows, **keys)


# -- which visits are captured, and when -----------------------------------------------------------------


class StagedJobs:
    """Graphs of a streamed base, and microbatches that visit its stages; nothing is computed."""

    def __init__(self, pool):
        self.base = streamed(a_layer_each())
        whole = self.base.whole
        self.banks = Banks(whole.sites(), whole.shape.sites, next(whole.model.parameters()))
        self.graphs = StageGraphs(whole, self.base.stages, self.banks, pool)
        self.graphs.reserve(4 * LENGTH)
        self.join("a", 4)

    def join(self, name, rank):
        job = ready(self.base.whole, name, adapter={"rank": rank})
        made = executors.job_training(self.base.whole, job)
        self.banks.attach(made.adapter, made.layout, made.state.weights, made.state.gradient)

    def laid(self, length=LENGTH, name="a"):
        job = ready(self.base.whole, name, length, batch_size=1)
        [plan] = executors.plan_program([job], 1, length).microbatches
        return to_device_microbatch(collate_plan(plan, Forward, {name: job}), plan.rows, bench.CPU)

    def round(self, *microbatches):
        """Whether each visit is made by a graph."""
        self.graphs.begin_round()
        return [self.find_or_capture(visit, laid)[0] is not None for visit in ROUND for laid in microbatches]

    def find_or_capture(self, visit, laid):
        """The graph, and whether nothing was set up."""
        flight = executors.in_flight(laid)
        return self.graphs.find_or_capture(*visit, flight), flight.pass_times.is_typical


def test_a_visit_is_captured_in_the_second_round_that_has_it_and_never_again():
    pool = Repeating()
    jobs, laid = StagedJobs(pool), [StagedJobs(Repeating()).laid() for _ in range(2)]
    assert jobs.round(*laid) == [False] * 2 * len(ROUND)
    assert pool.capture_graph == jobs.graphs.captures == 0
    assert jobs.round(*laid) == [True] * 2 * len(ROUND)
    # The last stage's forward and backward are captured apart: the head comes between them.
    assert (pool.capture_graph, jobs.graphs.captures) == (len(ROUND) + 1, len(ROUND))
    for _ in range(3):
        assert all(jobs.round(*laid))
    assert jobs.graphs.captures == len(ROUND)


def test_only_visits_for_which_nothing_is_set_up_are_settled():
    jobs, settled = StagedJobs(Repeating()), []
    for _ in range(3):
        jobs.graphs.begin_round()
        settled.append([jobs.find_or_capture(visit, jobs.laid())[1] for visit in ROUND])
    assert settled == [[False] * len(ROUND), [False] * len(ROUND), [True] * len(ROUND)]


def test_a_job_that_joins_with_no_larger_rank_is_served_by_what_was_captured():
    jobs = StagedJobs(Repeating())
    for _ in range(2):
        jobs.round(jobs.laid())
    captures = jobs.graphs.captures
    jobs.join("second", 3)
    assert all(jobs.round(jobs.laid()))
    assert jobs.graphs.captures == captures
    jobs.join("third", 48)
    assert not any(jobs.round(jobs.laid()))
    assert all(jobs.round(jobs.laid()))
    assert jobs.graphs.captures == 2 * captures


@pytest.mark.usefixtures("toys")
def test_a_kind_without_kernels_is_passed_plainly_and_others_are_served_by_what_was_captured():
    jobs = StagedJobs(Repeating())
    for _ in range(2):
        jobs.round(jobs.laid())
    captures = jobs.graphs.captures
    spec = GateSpec(("v_proj",))
    adapter = get_kind("gate").layout(spec, jobs.base.whole.shape.sites)
    jobs.banks.attach(
        JobAdapter("gate", spec, 0), adapter, torch.ones(adapter.size), torch.zeros(adapter.size)
    )
    for _ in range(3):
        mixed = jobs.round(jobs.laid(), jobs.laid(name="gate"))
        assert mixed == [True, False] * len(ROUND)
    assert jobs.graphs.captures == captures
    assert jobs.find_or_capture(ROUND[0], jobs.laid(name="gate"))[1]


def test_all_graphs_share_two_buffers_of_a_microbatch():
    jobs = StagedJobs(Repeating())
    graphs = []
    for length in (LENGTH, 2 * LENGTH):
        for _ in range(2):
            jobs.graphs.begin_round()
            graphs += [jobs.find_or_capture(visit, jobs.laid(length))[0] for visit in ROUND]
    buffers = [graph for graph in graphs if graph is not None]
    assert len(buffers) == 2 * len(ROUND)
    assert {len(one._h_TD) for one in buffers} == {LENGTH, 2 * LENGTH}
    for name in ("_h_TD", "_dh_TD"):
        assert len({getattr(one, name).untyped_storage().data_ptr() for one in buffers}) == 1
    assert buffers[0]._h_TD.untyped_storage().nbytes() == 4 * LENGTH * jobs.base.whole.shape.hidden * 4


def test_longer_microbatches_want_larger_buffers_and_everything_captured_again():
    jobs = StagedJobs(Repeating())
    for _ in range(2):
        jobs.round(jobs.laid())
    captures = jobs.graphs.captures
    jobs.graphs.reserve(4 * LENGTH)
    assert all(jobs.round(jobs.laid()))
    jobs.graphs.reserve(5 * LENGTH)
    assert all(jobs.round(jobs.laid()))
    assert jobs.graphs.captures == 2 * captures


def test_where_plain_passes_find_no_room_beside_them_graphs_are_given_up_until_the_next_round():
    pool = Repeating()
    jobs = StagedJobs(pool)
    known, new = jobs.laid(), jobs.laid(2 * LENGTH)
    for _ in range(2):
        jobs.round(known)
    cleared = pool.cleared
    # There is room: those of the one are kept while the other is met.
    assert jobs.round(known, jobs.laid(3 * LENGTH)) == [True, False] * len(ROUND)
    pool.room = False
    # The first visit is replayed before anybody else needs memory.
    assert jobs.round(known, new) == [True] + [False] * (2 * len(ROUND) - 1)
    assert pool.cleared == cleared + 1
    captures = jobs.graphs.captures
    assert all(jobs.round(known, new))
    assert jobs.graphs.captures == captures + 2 * len(ROUND)
    # An evaluation is such a pass, too.
    jobs.graphs.free_memory()
    assert pool.cleared == cleared + 2
    assert all(jobs.round(known))


def test_for_want_of_memory_a_key_stays_plain_and_others_do_not():
    pool = Repeating(short_at={3})
    jobs = StagedJobs(pool)
    short, other = jobs.laid(), jobs.laid(2 * LENGTH)
    jobs.round(short)
    assert jobs.round(short) == [True, True] + [False] * (len(ROUND) - 2)
    assert pool.cleared > 0
    jobs.round(short, other)
    for _ in range(2):
        assert jobs.round(short, other) == [False, True] * len(ROUND)
    assert len(jobs.graphs.failed_captures) == 1
    assert jobs.find_or_capture(ROUND[0], short)[1]


def test_another_error_in_a_capture_is_told():
    class Broken(Repeating):
        def capture(self, work):
            raise ArithmeticError("a mistake")

    jobs = StagedJobs(Broken())
    jobs.round(jobs.laid())
    with pytest.raises(ArithmeticError, match="a mistake"):
        jobs.round(jobs.laid())


def test_of_too_many_keys_the_one_met_longest_ago_is_forgotten():
    jobs = StagedJobs(Repeating())
    laid = [jobs.laid(length) for length in range(3, 4 + MAX_KEYS)]
    assert len(laid) == MAX_KEYS + 1
    for _ in range(2):
        jobs.round(laid[0])
    jobs.round(*laid[1:-1])
    assert all(jobs.round(laid[0]))
    jobs.round(*laid[1:])
    assert not any(jobs.round(laid[0]))


# -- the bits --------------------------------------------------------------------------------------------


def trained(cut, pool):
    """What is told of a job in two rounds of two microbatches, and its master; and the executor."""
    executor = streamed_executor(streamed(cut), Route.tiled, pool=pool)
    base = executor.base
    job = ready(base, "a", steps=2, batch_size=2, adapter=ADAPTER)
    adapter = executors.JobAdapter(job.name, job.spec.adapter, job.spec.seed)
    executor.attach(new_training(adapter, job.recipe, base.shape.sites, base.dtype, executor.home))
    program = plan_window([job.job_window(0, 2, False)], cut, LENGTH)
    assert len(program.microbatches) == 2 * 2
    events = [
        event for event in executors.run_program(executor, program, [job]) if isinstance(event, Stepped)
    ]
    return events, executor.attached["a"].master, executor


@pytest.fixture
def interpreter(monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here")
    interpret(monkeypatch)
    # A program takes milliseconds here, even one without work.
    monkeypatch.setattr(banks, "SLOTS", 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize(
    ("cut", "short_at", "captures"),
    [
        pytest.param(
            a_layer_each(2, adapters_travel=True, offloaded_rows=2 * LENGTH), (), len(ROUND), id="travelling"
        ),
        pytest.param(a_layer_each(), {4}, 2, id="short of memory"),
    ],
)
def test_captured_passes_give_the_bits_of_plain_ones(cut, short_at, captures, interpreter):
    pool = Repeating(short_at)
    events, master, executor = trained(cut, pool)
    plain, wanted, without = trained(cut, None)
    assert (executor.captures, without.captures) == (captures, None)
    # The second round's two microbatches; at the last stage the backward is replayed, too. Where memory ran
    # short in the last stage, only the two before it had been gone through.
    assert pool.done == (2 * 2 if short_at else 2 * (len(ROUND) + 1))
    assert events == plain
    assert torch.equal(master, wanted)
