"""Streaming on a CUDA device: run with `pytest -m gpu`."""

import os
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests import bench
from tests.cases import some_of
from tests.run import executors
from tests.test_gpu import ready
from weftune.adapters.kind import JobAdapter
from weftune.base.host.pinned import allocate_host_bytes
from weftune.base.host.source import CHUNK_BYTES, Staging
from weftune.base.host.streamed import load_streamed
from weftune.base.load import load_base, load_plain
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError
from weftune.ops.adamw import update
from weftune.plan.cost.ring import PIECE
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.executor import max_rows_in_flight
from weftune.run.measure.timers import WaitTime
from weftune.run.passes.rows import StageVisit
from weftune.run.stream import adapter_steps
from weftune.run.stream.activations import KeptActivations, OffloadedActivations
from weftune.run.training.state import new_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

LAYERS = 6
SPEC = BaseSpec(model=str(bench.STORIES), dtype="bfloat16")
CAPACITY = 256
SMALL_PIECE = 8192
"""Of a Step of travelling adapters: three or more of each layer, each of which lingers for a millisecond."""


def a_layer_each(slots, travels, resident=()):
    return Layout(tuple(StageLayers(n, n + 1, n in resident) for n in range(LAYERS)), (slots,), travels)


def test_memory_is_taken_page_by_page():
    cut = a_layer_each(2, travels=False)
    streamed = load_streamed(SPEC, torch.device("cuda", 0), cut)
    torch.cuda.empty_cache()
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    (segment,) = [one for one in torch.cuda.memory_snapshot() if holds(one, large)]
    assert segment["is_expandable"]
    del streamed


def holds(segment, tensor):
    return segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]


def trained(executor, base, plan, jobs=None):
    """What four jobs have moved after three windows of two rounds."""
    jobs = jobs or [ready(base, f"job{i}", i) for i in range(4)]
    for job in jobs:
        attach(executor, job)
    starts = {name: one.master.clone() for name, one in executor.attached.items()}
    for step in range(0, 6, 2):
        courses = [job.job_window(step, 2, False) for job in jobs]
        list(executors.run_program(executor, plan(courses), jobs))
    moved = {name: (one.master - starts[name]).cpu() for name, one in executor.attached.items()}
    executor.restore_base()
    return moved


def attach(executor, job):
    base, adapter = executor.base, JobAdapter(job.name, job.spec.adapter, job.spec.seed)
    executor.attach(new_training(adapter, job.recipe, base.shape.sites, base.dtype, executor.home))


@pytest.fixture(scope="module")
def resident():
    base = load_base(SPEC, torch.device("cuda", 0))
    return trained(
        resident_executor(base, graphs=False),
        base,
        lambda courses: plan_window(courses, one_device_layout(), CAPACITY),
    )


@pytest.mark.parametrize(
    "cut",
    [
        a_layer_each(2, travels=False),
        a_layer_each(1, travels=False),
        a_layer_each(2, travels=False, resident={1, 4}),
    ],
    ids=["two slots", "one slot", "two stay"],
)
def test_streamed_it_gives_the_very_bits_of_the_resident_base(resident, cut):
    streamed = load_streamed(SPEC, torch.device("cuda", 0), cut)
    executor = streamed_executor(streamed)
    assert executor.is_fused
    moved = trained(executor, streamed.whole, lambda courses: plan_window(courses, cut, CAPACITY))
    for name, want in resident.items():
        assert torch.equal(moved[name], want), name
    assert executor.weights.wait_time.copied_bytes > 0


@pytest.mark.parametrize(("slots", "rows"), some_of(product((1, 2, 3), (4096, 1)), [(1, 4096), (2, 1)]))
def test_inputs_that_wait_in_host_memory_come_back_with_the_very_bits(resident, slots, rows):
    cut = replace(a_layer_each(slots, travels=False, resident={3}), offloaded_rows=rows)
    streamed = load_streamed(SPEC, torch.device("cuda", 0), cut)
    executor = streamed_executor(streamed)
    most = 0
    read = executor.activations.read

    def noted(by):
        nonlocal most
        most = max(most, executors.rows_on_device(executor.activations))
        return read(by)

    executor.activations.read = noted
    longest = 0

    def plan(courses):
        nonlocal longest
        program = plan_window(courses, cut, CAPACITY)
        longest = max(longest, max_rows_in_flight(program))
        return program

    moved = trained(executor, streamed.whole, plan)
    for name, want in resident.items():
        assert torch.equal(moved[name], want), name
    assert longest < most <= longest + CAPACITY
    assert executors.rows_on_device(executor.activations) == 0
    assert executor.activations.reserved_rows == max(rows, longest)


def test_offloaded_inputs_leave_the_memory_of_the_gpu():
    """A round of many rows through narrow stages: what is kept of it is most of what a run takes."""
    device, peaks = torch.device("cuda", 0), {}
    for rows in (0, 1 << 16):
        cut = replace(a_layer_each(2, travels=False), offloaded_rows=rows)
        streamed = load_streamed(SPEC, device, cut)
        inputs = OffloadedActivations(streamed, WaitTime()) if rows else KeptActivations(range(LAYERS))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = go_round(inputs, streamed, microbatches=16, rows=4096)
        torch.cuda.synchronize()
        assert all(bool((value == number).all()) for number, value in values)
        peaks[rows] = torch.cuda.max_memory_allocated() - before
    assert peaks[1 << 16] < 0.5 * peaks[0]


def go_round(inputs, streamed, microbatches, rows):
    """Every visit's input holds one number of its own; what was read of it on the way back."""
    last, values = LAYERS - 1, []

    def made(number, stage):
        shape = (rows, streamed.whole.shape.hidden)
        return torch.full(shape, 16.0 * stage + number, dtype=streamed.whole.dtype, device="cuda")

    for stage in range(last):
        for number in range(microbatches):
            inputs.store_input(StageVisit(number, stage + 1), made(number, stage + 1))
            if stage:
                inputs.end_forward(StageVisit(number, stage))
    for stage in range(last, 0, -1):
        for number in range(microbatches):
            if stage > 1:
                inputs.prefetch_input(StageVisit(number, stage - 1))
            values.append((16.0 * stage + number, inputs.read(StageVisit(number, stage))[::512, 0].clone()))
            inputs.drop(StageVisit(number, stage))
    return values


@pytest.mark.parametrize("slots", some_of([1, 2, 3], [2]))
def test_adapters_that_travel_have_the_very_bits_too(resident, slots):
    cut = a_layer_each(slots, travels=True, resident={2})
    streamed = load_streamed(SPEC, torch.device("cuda", 0), cut)
    executor = streamed_executor(streamed)
    moved = trained(executor, streamed.whole, lambda courses: plan_window(courses, cut, CAPACITY))
    for name, want in resident.items():
        assert torch.equal(moved[name], want), name


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The base as a run computes with it, in several files."""
    folder = tmp_path_factory.mktemp("stored")
    load_plain(SPEC, torch.device("cpu")).save_pretrained(folder, max_shard_size="8MB")
    return BaseSpec(model=str(folder), dtype="bfloat16")


FROM_FILES = (a_layer_each(1, travels=False), a_layer_each(2, travels=False, resident={1, 4}))


@pytest.mark.parametrize(
    ("cut", "chunk"),
    some_of(product(FROM_FILES, (CHUNK_BYTES, 100_000)), [(FROM_FILES[0], 100_000)]),
)
def test_read_from_its_files_in_every_step_it_gives_the_very_bits_too(resident, stored, cut, chunk):
    device = torch.device("cuda", 0)
    streamed = load_streamed(stored, device, cut, keeps_files_mapped=True)
    staging = Staging(device, chunk)
    streamed = replace(
        streamed, sources={stage: replace(one, staging=staging) for stage, one in streamed.sources.items()}
    )
    executor = streamed_executor(streamed)
    moved = trained(executor, streamed.whole, lambda courses: plan_window(courses, cut, CAPACITY))
    for name, want in resident.items():
        assert torch.equal(moved[name], want), name


def test_adapters_that_travel_beside_a_base_in_its_files(resident, stored):
    cut = a_layer_each(2, travels=True, resident={2})
    streamed = load_streamed(stored, torch.device("cuda", 0), cut, keeps_files_mapped=True)
    executor = streamed_executor(streamed)
    moved = trained(executor, streamed.whole, lambda courses: plan_window(courses, cut, CAPACITY))
    for name, want in resident.items():
        assert torch.equal(moved[name], want), name


def test_a_file_that_fails_under_way_is_told_by_the_main_thread(stored, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(stored.model, folder)
    cut = a_layer_each(1, travels=False)
    spec = BaseSpec(model=str(folder), dtype="bfloat16")
    streamer = streamed_executor(
        load_streamed(spec, torch.device("cuda", 0), cut, keeps_files_mapped=True)
    ).weights
    for path in folder.glob("*.safetensors"):
        os.truncate(path, 1000)
    streamer.begin_window()
    with pytest.raises(BaseModelError, match="has changed while weights are read from it"):
        streamer.make_readable(0)


def lingering(updates, factor_J=None):
    """Beside copies and passes that do not wait for it; meanwhile the buffer has NaN for weights."""
    for one in updates:
        one.state.weights.fill_(torch.nan)
    torch.cuda._sleep(2_000_000)
    return update(updates, factor_J)


def poison(executor):
    """NaN where weights of jobs are, from the moment that their Step is asked for until it is made."""
    begin = executor.adapters.steps.begin

    def begun(requests, norm_J, arrived):
        run = begin(requests, norm_J, arrived)
        torch.cuda.synchronize()
        for one in requests:
            one.training.state.weights.fill_(torch.nan)
            for room in executor.adapters.transfers.adapters[one.training.job].weights.values():
                room.fill_(torch.nan)
        torch.cuda.synchronize()
        return run

    executor.adapters.steps.begin = begun


@pytest.mark.parametrize(
    ("slots", "piece"),
    some_of(product((1, 2, 3), (SMALL_PIECE, PIECE)), [(1, PIECE)]),
)
def test_steps_that_linger_change_no_bit(slots, piece, monkeypatch):
    """Whoever came too early would take NaN along."""
    monkeypatch.setattr(adapter_steps, "PIECE", piece)
    cut = a_layer_each(slots, travels=True, resident={2})
    found = []
    for make, poisoned in ((update, False), (lingering, False), (lingering, True)):
        streamed = load_streamed(SPEC, torch.device("cuda", 0), cut)
        executor = streamed_executor(streamed, apply_updates=make)
        if poisoned:
            poison(executor)
        found.append(trained(executor, streamed.whole, lambda courses: plan_window(courses, cut, CAPACITY)))
        assert executor.weights.wait_time.total_seconds() > 0
    for name, want in found[0].items():
        assert want.isfinite().all()
        assert torch.equal(found[1][name], want), name
        assert torch.equal(found[2][name], want), name


def even(base, name, index):
    """A job whose samples are equally long, so that all of its microbatches have one key."""
    rows = bench.rows(bench.samples(16, seed=index, shortest=64, longest=64))
    adapter = {"rank": 4 * index + 4, "dropout": 0.1 * (index % 2)}
    return executors.prepare(base, name, data=rows, steps=6, batch_size=4, seed=index, adapter=adapter)


def level(cut):
    return lambda courses: plan_window(courses, cut, CAPACITY, pads_to_ladder=True)


def test_a_base_in_its_files_is_captured_while_a_thread_reads_it(stored):
    cut, found = a_layer_each(1, travels=True), []
    for graphs in (False, True):
        streamed = load_streamed(stored, torch.device("cuda", 0), cut, keeps_files_mapped=True)
        executor = streamed_executor(streamed, graphs=graphs)
        jobs = [even(streamed.whole, f"job{i}", i) for i in range(4)]
        found.append(trained(executor, streamed.whole, level(cut), jobs))
    assert executor.captures == 2 * LAYERS - 1
    for name, want in found[0].items():
        assert torch.equal(found[1][name], want), name


def test_host_memory_is_page_locked_and_comes_back():
    device = torch.device("cuda", 0)
    for _ in range(3):
        buffer = allocate_host_bytes(64 << 20, device)
        assert buffer.is_pinned()
        del buffer
