"""Captured passes over streamed stages on a CUDA device: run with `pytest -m gpu`."""

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests import bench
from tests.cases import some_of
from tests.run import executors
from tests.test_gpu import ready
from tests.test_stream_gpu import LAYERS, SPEC, a_layer_each, attach, even, level, trained
from weftune.base.host.pinned import allocate_host_bytes
from weftune.base.host.streamed import load_streamed
from weftune.plan.program.layout import Layout, StageLayers
from weftune.run.assemble import streamed_executor
from weftune.run.events import Failed, Stepped
from weftune.run.passes.graphs import GraphPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

GRAPH_CUTS = {
    "two slots": a_layer_each(2, travels=False),
    "travelling": a_layer_each(1, travels=True, resident={2}),
    "offloaded": replace(a_layer_each(3, travels=True), offloaded_rows=4096),
    "two and four": Layout((StageLayers(0, 2), StageLayers(2, 6)), (1,), adapters_travel=True),
    "one stage": Layout((StageLayers(0, LAYERS, True),)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    some_of(
        product(GRAPH_CUTS, (even, ready)),
        [*product(("two slots", "travelling"), (even,)), ("offloaded", ready)],
    ),
)
def test_captured_passes_over_stages_give_the_very_bits_of_plain_ones(name, kind):
    cut = GRAPH_CUTS[name]
    found, captures = [], []
    for graphs in (False, True):
        streamed = load_streamed(SPEC, torch.device("cuda", 0), cut)
        executor = streamed_executor(streamed, graphs=graphs)
        jobs = [kind(streamed.whole, f"job{i}", i) for i in range(4)]
        found.append(trained(executor, streamed.whole, level(cut), jobs))
        captures.append(executor.captures)
        assert executor.passes.failed_captures == 0
    plain, captured = found
    assert captures[0] is None
    assert captures[1] >= 2 * len(cut.stages) - 1
    for name, want in plain.items():
        assert want.isfinite().all()
        assert torch.equal(captured[name], want), name


def windows(executor, jobs, cut, count, step=0):
    """So many rounds of all jobs."""
    courses = [job.job_window(step, count, False) for job in jobs]
    events = list(executors.run_program(executor, level(cut)(courses), jobs))
    assert not [event for event in events if isinstance(event, Failed)]


def test_after_the_second_round_nothing_is_captured_whoever_joins_or_leaves():
    cut = a_layer_each(2, travels=True, resident={2})
    executor = streamed_executor(load_streamed(SPEC, torch.device("cuda", 0), cut))
    jobs = [even(executor.base, f"job{i}", i) for i in range(4)]
    for job in jobs:
        attach(executor, job)
    windows(executor, jobs, cut, 2)
    assert executor.captures == 2 * LAYERS - 1
    windows(executor, jobs, cut, 2, step=2)
    joins = even(executor.base, "joins", 1)
    attach(executor, joins)
    windows(executor, [joins], cut, 2)
    executor.detach("job0")
    windows(executor, jobs[1:], cut, 2, step=4)
    assert executor.captures == 2 * LAYERS - 1
    executor.restore_base()


class ShortPool(GraphPool):
    """The third capture asks for more than there is."""

    def __init__(self, device):
        super().__init__(device)
        self.captured = 0

    def capture(self, work):
        self.captured += 1
        number = self.captured

        def greedy():
            work()
            if number == 3:
                total = torch.cuda.get_device_properties(0).total_memory
                torch.empty(total // 2, dtype=torch.uint8, device="cuda")

        return super().capture(greedy)


def test_a_capture_that_finds_no_memory_leaves_passes_plain_and_losses_as_they_were():
    cut, device, found = a_layer_each(2, travels=True), torch.device("cuda", 0), []
    torch.cuda.set_per_process_memory_fraction(0.4)
    try:
        for pool in (None, ShortPool(device)):
            streamed = load_streamed(SPEC, device, cut)
            executor = streamed_executor(streamed, graphs=False, pool=pool)
            jobs = [even(streamed.whole, f"job{i}", i) for i in range(4)]
            found.append(trained(executor, streamed.whole, level(cut), jobs))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(executor.passes.graphs.failed_captures) == 1
    assert executor.captures == 2
    for name, want in found[0].items():
        assert torch.equal(found[1][name], want), name


def test_a_pool_holds_the_memory_of_one_visit_and_says_whether_plain_passes_find_as_much():
    cut, device = a_layer_each(2, travels=False), torch.device("cuda", 0)
    streamed, held = load_streamed(SPEC, device, cut), []
    executor = streamed_executor(streamed)
    pool = executor.passes.graphs._pool
    jobs = [even(streamed.whole, f"job{i}", i) for i in range(4)]
    for job in jobs:
        attach(executor, job)
    take = pool.capture

    def noted(work):
        replay = take(work)
        held.append(pool.held_bytes)
        return replay

    pool.capture = noted
    windows(executor, jobs, cut, 2)
    assert pool.has_room()
    # The inner stages on the way back are alike: those after the first find all memory there.
    backs = held[-(LAYERS - 1) :]
    assert len(set(backs[:-1])) == 1
    total = torch.cuda.get_device_properties(0).total_memory
    tight = torch.cuda.memory_allocated() + pool.held_bytes + pool.held_bytes // 2
    torch.cuda.set_per_process_memory_fraction(tight / total)
    try:
        assert not pool.has_room()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    executor.restore_base()
    assert pool.held_bytes == 0


def test_garbage_that_holds_host_memory_does_not_end_a_capture():
    """It would be given back in the midst of it, and no host memory may be."""
    device = torch.device("cuda", 0)
    count = torch.zeros(1, device=device)
    gc.disable()
    ring = [allocate_host_bytes(1 << 20, device)]
    ring.append(ring)
    del ring
    gc.enable()

    def work():
        assert len([[] for _ in range(100_000)]) == 100_000  # in any other place the collector would come
        count.add_(1.0)

    with torch.cuda.stream(torch.cuda.Stream()):
        replay = GraphPool(device).capture(work)
        count.zero_()
        replay()
        replay()
    torch.cuda.synchronize()
    assert count.item() == 2.0
    assert gc.isenabled()


def test_the_host_hears_of_steps_while_the_device_is_still_going_back():
    """So it is ahead when the next round begins, and what the first Steps need is asked for in time."""
    cut = a_layer_each(2, travels=True)
    executor = streamed_executor(load_streamed(SPEC, torch.device("cuda", 0), cut))
    jobs = [even(executor.base, f"job{i}", i) for i in range(4)]
    for job in jobs:
        attach(executor, job)
    windows(executor, jobs, cut, 2)
    backward, slept, ahead = executor._backward, [], []

    def slowly(visit):
        if visit.stage == 0:
            torch.cuda._sleep(400_000_000)
            slept.append(torch.cuda.current_stream().record_event())
        backward(visit)

    executor._backward = slowly
    courses = [job.job_window(2, 2, False) for job in jobs]
    for event in executors.run_program(executor, level(cut)(courses), jobs):
        if isinstance(event, Stepped):
            ahead.append(not slept[-1].query())
    # Those of the first round; behind the last one everything is waited for.
    assert ahead == [True] * 4 + [False] * 4
    executor.restore_base()
