"""The rule that chooses a plan, with real trials on a CUDA device: run with `pytest -m gpu`."""

import time
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import call_side_by_side, some_of
from tests.ops.lora.test_choice import Call
from weftune.ops.lora.choice import choice_file, fastest_plan
from weftune.ops.lora.choice_trial import device_choices, time_plans
from weftune.ops.lora.tiling import ProductPlan, supported_plans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CALLS = {
    "a square site": dict(rows=2000, features=2048, widths=(2048,), rank=16),
    "a group that drops": dict(rows=1000, features=1024, widths=(1024, 256, 256), rank=8, drops=True),
    "onto a residual": dict(rows=500, features=4096, widths=(1024,), rank=64, residual=True),
    "a transposed weight": dict(rows=512, features=768, widths=(768,), rank=4, transposed=True),
    "widths of no alignment": dict(rows=99, features=333, widths=(77, 35), rank=5, aligned=False),
    "one row": dict(rows=1, features=512, widths=(512,), rank=16),
}


DEVICE = torch.device("cuda")


def call(name):
    return Call(**(dict(device="cuda", dtype=torch.bfloat16, slots=64) | CALLS[name]))


def plans(asked):
    return supported_plans(asked.weight, asked.group, DEVICE)


def timed(asked):
    return time_plans(asked.trial(plans(asked)), DEVICE)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))


NAMES = some_of(CALLS, ["a group that drops", "onto a residual", "widths of no alignment", "one row"])


@pytest.fixture(scope="module", autouse=True)
def _compiled_side_by_side():
    """Orders of one call share kernels, so neighbours are calls of different names."""
    asked = [call(name) for name in NAMES]
    call_side_by_side(
        partial(time_plans, one.trial((plan,)), DEVICE)
        for plan in ProductPlan
        for one in asked
        if plan in plans(one)
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", NAMES)
def test_every_order_gets_a_time_and_the_fastest_is_written_down(name):
    asked = call(name)
    allowed = plans(asked)
    chosen = asked.of(device_choices(DEVICE), allowed)
    known = choice_file(DEVICE).read()[asked.trial(allowed).key]
    assert known.plan is chosen is fastest_plan(known.microseconds)
    assert set(known.microseconds) == set(allowed)
    assert all(0.0 < taken < 1e6 for taken in known.microseconds.values())
    assert asked.of(device_choices(DEVICE), allowed) is chosen


@pytest.mark.timed
def test_a_trial_of_compiled_kernels_takes_less_than_a_fifth_of_a_second():
    asked = call("a square site")
    timed(asked)
    began = time.perf_counter()
    timed(asked)
    assert time.perf_counter() - began < 0.2


@pytest.mark.timed
def test_times_are_the_devices_and_not_those_of_launching():
    """Twice the rows of a large site are about twice the work; the launches are as many."""
    large = dict(features=4096, widths=(4096,), slots=64, device="cuda", dtype=torch.bfloat16)
    few, many = (min(timed(Call(rows=rows, **large)).values()) for rows in (4096, 8192))
    assert 1.5 < many / few < 2.5


def test_a_trial_leaves_no_trace_in_random_numbers_or_memory():
    asked = call("a group that drops")
    # The library keeps room of its own from its first product on.
    timed(asked)
    before, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    timed(asked)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.cuda.memory_allocated() == held


def test_a_trial_that_does_not_fit_takes_the_first_order_and_gives_its_memory_back():
    asked = call("a square site")
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        assert asked.of(device_choices(DEVICE), plans(asked)) is plans(asked)[0]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == held
    assert choice_file(DEVICE).read() == {}


def test_while_a_graph_is_captured_the_first_order_is_taken_and_the_capture_succeeds():
    asked, choices = call("a square site"), device_choices(DEVICE)
    graph = torch.cuda.CUDAGraph()
    total = torch.zeros((), device="cuda")
    with torch.cuda.graph(graph):
        total += 1
        during = asked.of(choices, plans(asked))
    assert during is plans(asked)[0]
    assert choice_file(DEVICE).read() == {}
    graph.replay()
    assert total.item() == 1.0
    asked.of(choices, plans(asked))
    assert list(choice_file(DEVICE).read()) == [asked.trial(plans(asked)).key]
