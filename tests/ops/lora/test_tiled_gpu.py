"""The tiled route compiled for a CUDA device, in bfloat16: run with `pytest -m gpu`."""

from dataclasses import replace
from functools import partial
from itertools import product, zip_longest

import pytest
import torch

from tests.cases import call_side_by_side, some_of

pytest.importorskip("triton")

from tests.ops.lora.site_cases import (
    Case,
    Job,
    attached,
    entries,
    healthy_after,
    kept_of_a_young_adapter,
    run,
    truth,
    values,
)
from weftune.ops import dropout
from weftune.ops.lora import products
from weftune.ops.lora.table import Group
from weftune.ops.lora.tiled import backward, forward, lora_linear
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling, supported_plans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="no copy engines"
)

BIG = dict(features=512, widths=(384, 128), device="cuda", dtype=torch.bfloat16, piece=128)
COMPILED = {
    "ranks 1 to 24": Case([Job(37, rank=1), Job(300, rank=7), Job(64, rank=8), Job(129, rank=24)], **BIG),
    "ranks 8 to 64, sums in shares": Case(
        [Job(137, rank=8), Job(300, rank=16), Job(64, rank=32), Job(129, rank=64)],
        **(BIG | dict(features=2048, widths=(1024, 256))),
    ),
    "rank 100": Case([Job(77, rank=100), Job(130, rank=16)], **BIG),
    "rank 256": Case([Job(77, rank=256), Job(200, rank=3)], **BIG),
    "ranks 4 to 256 in three parts": Case(
        [Job(77, rank=256), Job(130, rank=16), Job(200, rank=100, sites=(1,)), Job(64, rank=4)],
        **(BIG | dict(widths=(256, 128, 64))),
    ),
    "64 adapters": Case([Job(1 + index % 40, rank=16) for index in range(64)], **BIG),
    "one row, an empty slot": Case([Job(1, rank=8), None, Job(0, rank=8)], **BIG),
    "bias and residual": Case([Job(99, rank=16)], bias=True, residual=True, **BIG),
    "a transposed weight": Case([Job(99, rank=16)], transposed=True, **BIG),
    "widths of no alignment": Case([Job(99, rank=5)], **(BIG | dict(features=333, widths=(77, 35)))),
    "q, k, v and a job with but k": Case(
        [Job(99, rank=16), Job(200, rank=16, sites=(1,))], **(BIG | dict(widths=(512, 128, 128)))
    ),
    "small microbatch, wide input": Case([Job(50, rank=16)], **(BIG | dict(features=4096))),
    "rank 64 in parts of 256 columns": Case(
        [Job(300, rank=64), Job(99, rank=33), Job(190, rank=64, sites=(0, 2))],
        **(BIG | dict(widths=(512, 256, 256), bias=True, residual=True)),
    ),
    "float32": Case([Job(99, rank=16), Job(99, rank=100)], **(BIG | dict(dtype=torch.float32))),
}


GPU = torch.device("cuda")


def plans_of(case):
    """The orders that a case allows here."""
    made = values(case)
    _, group, _ = attached(case, made)
    return supported_plans(made.weight, group, GPU)


def no_worse_than_plain_torch(got, case, factor=2.0):
    """The error against float64 is at most twice that of plain torch in the same dtype."""
    exact, plain = truth(case), truth(case, case.dtype)
    for name, want in exact.items():
        allowed = factor * (plain[name].double() - want).norm() + 1e-6 * want.norm()
        assert (got[name].double() - want).norm() <= allowed, name


DIFFERENT = (
    ("ranks 1 to 24", 0.1),
    ("ranks 8 to 64, sums in shares", 0.0),
    ("ranks 4 to 256 in three parts", 0.1),
    ("64 adapters", 0.1),
    ("one row, an empty slot", 0.1),
    ("bias and residual", 0.1),
    ("a transposed weight", 0.0),
    ("widths of no alignment", 0.1),
    ("q, k, v and a job with but k", 0.1),
    ("float32", 0.1),
)
"""Kernels are compiled anew for nearly each of these, which takes most of the time."""


CASES = some_of(product(COMPILED, (0.0, 0.1)), DIFFERENT)


BLOCKS = some_of(
    product((16, 32, 64), (0.0, 0.1), (128, 256)),
    [(16, 0.1, 256), (32, 0.0, 128), (64, 0.1, 256), (64, 0.1, 128)],
)
YOUNG = some_of(
    product(ProductPlan, (1024, 4096), (False, True)), product(ProductPlan, (1024,), (False, True))
)


def in_blocks(rank, drop):
    """More tiles than programs, several runs in a block, row and column counts that fill no block."""
    return Case(
        [Job(1000, rank=rank), Job(2301, rank=5), Job(17, rank=1), Job(700, rank=rank - 3)],
        **(BIG | dict(features=1096, widths=(1536, 256, 264), piece=1024)),
        bias=True,
        residual=True,
    ).dropping(drop)


def young(rows, residual):
    return Case([Job(rows, rank=16)], **(BIG | dict(features=5120, widths=(5120,))), gap=0, residual=residual)


LARGE = Case(
    [Job(99, rank=16, dropout=0.1), Job(300, rank=128), Job(77, rank=4), Job(200, rank=96, dropout=0.2)],
    **(BIG | dict(widths=(384,), residual=True)),
)
"""One of the small ones and one of the large ones drop."""
OF_LARGE = (ProductPlan.wide, ProductPlan.fused_beside)
YOUNG_OF_MANY_RANKS = replace(LARGE, jobs=[Job(1024, rank=128)], gap=0, features=2048, widths=(2048,))
MASKED = Case([Job(500, rank=128, dropout=0.3)], **(BIG | dict(features=128, widths=(128,))), gap=2)
MASKED_IN_BACKWARD = Case([Job(500, rank=64, dropout=0.3)], **(BIG | dict(features=64, widths=(64,))), gap=2)


def calls():
    """What the tests below call with kernels of their own.

    Orders of one case share kernels, so neighbours are calls of different cases.
    """
    cases = [COMPILED[name].dropping(drop) for name, drop in CASES]
    by_plan = zip_longest(*([partial(run, case, plan=plan) for plan in plans_of(case)] for case in cases))
    yield from (call for calls in by_plan for call in calls if call)
    for plan in OF_LARGE:
        if plan in plans_of(LARGE):
            yield partial(run, LARGE, plan=plan)
    for rank, drop, columns in BLOCKS:
        yield partial(run, in_blocks(rank, drop), plan=ProductPlan.fused_beside, columns=columns)
    for plan, rows, residual in YOUNG:
        yield partial(kept_of_a_young_adapter, young(rows, residual), plan)
    yield partial(kept_of_a_young_adapter, YOUNG_OF_MANY_RANKS, ProductPlan.fused)
    yield partial(run, MASKED.reading_the_mask())
    yield partial(run, MASKED_IN_BACKWARD.reading_the_mask(), plan=ProductPlan.fused)


@pytest.fixture(scope="module", autouse=True)
def _compiled_side_by_side():
    """The compiler takes most of the time of these tests."""
    call_side_by_side(calls())
    torch.cuda.synchronize()


@pytest.mark.parametrize(("name", "drop"), CASES)
def test_the_error_is_at_most_twice_that_of_plain_torch(name, drop):
    case = COMPILED[name].dropping(drop)
    for plan in plans_of(case):
        no_worse_than_plain_torch(run(case, plan=plan), case)


@pytest.mark.parametrize("plan", OF_LARGE)
def test_large_ranks_beside_small_ones_are_right_and_a_nan_stays_with_its_owner(plan):
    if plan not in plans_of(LARGE):
        pytest.skip("not on this device")
    no_worse_than_plain_torch(run(LARGE, plan=plan), LARGE)
    for poison in ("x", "b", "dy", "padding"):
        healthy_after(LARGE, poison, plan)


@hopper
def test_what_a_young_adapter_of_many_ranks_adds_to_a_fused_product_is_not_rounded_away():
    for name, kept in kept_of_a_young_adapter(YOUNG_OF_MANY_RANKS, ProductPlan.fused).items():
        assert kept == pytest.approx(1.0, abs=0.1), name


def test_through_autograd_the_error_is_as_small():
    case = COMPILED["ranks 1 to 24"].dropping(0.1)
    no_worse_than_plain_torch(run(case), case)


@pytest.mark.parametrize("one_read", [False, True])
def test_neither_the_order_of_the_frozen_product_nor_the_reads_of_dy_matter(one_read):
    case = COMPILED["ranks 1 to 24"].dropping(0.1)
    for plan in plans_of(case):
        no_worse_than_plain_torch(run(case, plan=plan, one_read=one_read), case)


@hopper
@pytest.mark.parametrize(("rank", "drop", "columns"), BLOCKS)
def test_the_fused_product_is_right_in_blocks_of_either_width(rank, drop, columns):
    case = in_blocks(rank, drop)
    no_worse_than_plain_torch(run(case, plan=ProductPlan.fused_beside, columns=columns), case)


@hopper
def test_the_fused_product_is_taken_where_it_can_be_and_only_there():
    refused = {"a transposed weight", "float32", "widths of no alignment"}
    for name, case in COMPILED.items():
        assert (ProductPlan.fused in plans_of(case)) == (name not in refused), name


@pytest.mark.parametrize(("plan", "rows", "residual"), YOUNG)
def test_what_a_young_adapter_adds_is_not_rounded_away(plan, rows, residual):
    """It is a twentieth of the last digit of what the frozen weights give, and there all the same on average.

    Where the library adds its product to a 16-bit tensor it rounds the product first, whatever it is told of
    its sums: a sixth was kept here when the adapters' part went before the product."""
    case = young(rows, residual)
    if plan not in plans_of(case):
        pytest.skip("not on this device")
    for name, kept in kept_of_a_young_adapter(case, plan).items():
        assert kept == pytest.approx(1.0, abs=0.1), name


@pytest.mark.parametrize(
    ("name", "plan"),
    some_of(
        product(
            (
                "ranks 4 to 256 in three parts",
                "bias and residual",
                "a transposed weight",
                "widths of no alignment",
            ),
            (ProductPlan.wide, ProductPlan.wide_beside),
        ),
        [("ranks 4 to 256 in three parts", ProductPlan.wide), ("bias and residual", ProductPlan.wide_beside)],
    ),
)
def test_a_wide_product_in_spans_is_right(name, plan, monkeypatch):
    monkeypatch.setattr(products, "SPAN_BYTES", 1)
    case = COMPILED[name].dropping(0.1)
    no_worse_than_plain_torch(run(case, plan=plan), case)


@pytest.mark.parametrize("plan", [ProductPlan.wide, ProductPlan.wide_beside])
def test_no_more_of_a_wide_product_than_a_span_is_in_memory(plan):
    """Whole, each would be 512 MiB."""
    large = BIG | dict(features=8192, widths=(8192,), piece=1024)
    case = Case([Job(16384, rank=16)], **large, gap=0, padding=0)
    made = values(case)
    by_slot, group, rows = attached(case, made)
    call = SiteCall(group, rows, True, choose_tiling(rows, group, case.features, case.dtype), plan)

    def most(asked):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        given = asked()
        return given, torch.cuda.max_memory_allocated() - held

    # The library keeps room of its own from its first product on.
    forward(made.x, made.weight, None, None, call)
    (y, s, _), of_y = most(lambda: forward(made.x, made.weight, None, None, call))
    dx, of_dx = most(lambda: backward(made.dy, made.x, made.weight, s, call, needs_dx=True))
    room = products.SPAN_BYTES + (128 << 20)
    assert of_y < y.nbytes + room
    assert of_dx < dx.nbytes + room
    del by_slot


@pytest.mark.parametrize("plan", ProductPlan)
def test_two_runs_give_the_same_bits(plan):
    case = COMPILED["ranks 1 to 24"].dropping(0.1)
    if plan not in plans_of(case):
        pytest.skip("not on this device")
    first, second = run(case, plan=plan), run(case, plan=plan)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("plan", ProductPlan)
@pytest.mark.parametrize("poison", ["x", "a", "b", "dy", "padding"])
def test_a_nan_stays_with_its_owner(poison, plan):
    case = COMPILED["ranks 1 to 24"].dropping(0.1)
    if plan not in plans_of(case):
        pytest.skip("not on this device")
    healthy_after(case, poison, plan)


@pytest.mark.parametrize("first_input", [0, 128])
def test_masks_are_those_of_the_reference_bit_for_bit(first_input):
    """On a shard, the first input is one of the whole linear."""
    case = replace(MASKED.reading_the_mask(), first_input=first_input)
    kept = dropout.keep_mask_TK(case.site_key(0, 0), case.token_index[2:502].cuda(), 128, 0.3, first_input)
    assert torch.equal(run(case)["y"][2:502] != 0, kept)


@hopper
@pytest.mark.parametrize("first_input", [0, 128])
def test_masks_of_the_fused_backward_are_those_of_the_reference_bit_for_bit(first_input):
    """With A the identity and no frozen weight, dx is ds where the mask kept it, and 0 elsewhere."""
    case = replace(MASKED_IN_BACKWARD.reading_the_mask(), first_input=first_input)
    kept = dropout.keep_mask_TK(case.site_key(0, 0), case.token_index[2:502].cuda(), 64, 0.3, first_input)
    assert torch.equal(run(case, plan=ProductPlan.fused)["dx"][2:502] != 0, kept)


class Always:
    """Choices that are no choice."""

    def __init__(self, plan):
        self.chosen = plan

    def choose_plan(self, *_):
        return self.chosen


@pytest.mark.parametrize("plan", ProductPlan)
def test_a_captured_graph_follows_the_jobs_that_come_and_go(plan):
    before = Case([Job(37, rank=1), Job(300, rank=7)], **BIG, padding=70).dropping(0.1)
    after = Case(
        [None, Job(100, rank=16), Job(3, rank=4), Job(250, rank=9)], **BIG, padding=51, seed=9
    ).dropping(0.2)
    assert before.rows == after.rows
    if plan not in plans_of(before):
        pytest.skip("not on this device")
    made = values(before)
    _, small, rows = attached(before, made)
    group = Group(small.columns, small.table, rank=16, has_dropout=True)
    held_x, dy = made.x.clone(), made.dy.clone()

    def step():
        # Leaves of this call's stream, and not of the first call's.
        x = held_x.detach().requires_grad_()
        anchor = torch.zeros((), device="cuda", requires_grad=True)
        y = lora_linear(x, made.weight, None, None, anchor, group, rows, True, Always(plan))
        return y, *torch.autograd.grad(y, [x], dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    fresh = values(after)
    by_slot = {slot: entries(after, fresh, slot) for slot in (1, 2, 3)}
    group.write(0, [None] * len(group.columns))
    for slot, found in by_slot.items():
        group.write(slot, found)
    rows.fill(after.seats, after.token_index.numpy())
    with torch.no_grad():
        held_x.copy_(fresh.x)
        dy.copy_(fresh.dy)
        made.weight.copy_(fresh.weight)
    graph.replay()
    got = {"y": y.detach(), "dx": dx}
    for slot, parts in by_slot.items():
        for part, entry in enumerate(parts):
            got[f"da part{part} slot{slot}"] = entry.da_RK
            got[f"db part{part} slot{slot}"] = entry.db_RN
    no_worse_than_plain_torch(got, after)
