"""Which kernels a pass of the tiled route takes, in which order and with which blocks; none of them runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.ops.launches import noted
from tests.ops.lora.site_cases import Case, Job, attached, values
from weftune.ops import side_stream
from weftune.ops.lora import products, tiled
from weftune.ops.lora.products import column_spans, product_in_float32
from weftune.ops.lora.rows import BLOCK
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling, product_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ONE = Case([Job(300, rank=8, dropout=0.1)], gap=0, padding=0, features=200, widths=(264,))
PARTS = Case([Job(300, rank=8)], gap=0, padding=0, features=200, widths=(128, 64))
LAUNCHERS = (
    *("down", "allocate_da", "allocate_db", "ds_db", "ds", "da", "db", "add_gradients"),
    *("fused_y", "fused_dx", "wide_y", "wide_dx"),
)


def call_of(case, plan=ProductPlan.fused, training=True, programs=3):
    made = values(case)
    _, group, rows = attached(case, made)
    chosen = choose_tiling(rows, group, case.features, case.dtype)
    blocks = product_blocks(128, case.dtype, programs)
    return made, SiteCall(group, rows, training, replace(chosen, y=blocks, dx=blocks), plan)


def product(monkeypatch, case, backward, residual=False, **changes):
    """The one launch of a fused product."""
    pytest.importorskip("triton")
    from weftune.ops.triton import product as kernels

    launches = noted(monkeypatch, kernels, "product")
    made, call = call_of(case, **changes)
    if backward:
        target = products.fused_dx(made.dy, made.weight, made.x, call)
        assert target.shape == made.x.shape
    else:
        target = products.fused_y(
            made.x, made.weight, None, made.dy if residual else None, made.x, None, call
        )
        assert target.shape == made.dy.shape
    (launch,) = launches
    return launch


def blocks_of(launch):
    """The block that is read or written of left, right, residual and target."""
    return [None if one is None else one.block_shape for one in launch.given[:4]]


def test_a_fused_product_reads_its_operands_in_blocks_and_writes_half_a_block_at_a_time(device, monkeypatch):
    forward, backward = (product(monkeypatch, ONE, backward) for backward in (False, True))
    assert blocks_of(forward) == [[128, 32], [128, 32], None, [128, 64]]
    assert blocks_of(backward) == [[128, 32], [32, 128], None, [128, 64]]
    assert forward.given[19:] == (300, 264, 200)
    assert backward.given[19:] == (300, 200, 264)
    assert forward.of("TRANSPOSED", "PRODUCTS_PER_SUM") == (True, None)
    assert backward.of("TRANSPOSED", "PRODUCTS_PER_SUM") == (False, None)
    added = product(monkeypatch, ONE, backward=False, residual=True)
    assert blocks_of(added) == [[128, 32], [128, 32], [128, 64], [128, 64]]
    for one in (forward, backward):
        assert one.of("M", "C", "D", "GROUP", "num_warps", "num_stages") == (BLOCK, 128, 32, 8, 8, 4)
        assert one.of("S", "P", "R") == (4, 1, 16)


@pytest.mark.parametrize(
    ("backward", "programs", "grid"),
    [(False, 3, 3), (False, 99, 9), (True, 99, 6), (True, 6, 6), (True, 5, 5)],
)
def test_a_fused_product_has_no_more_programs_than_tiles(backward, programs, grid, device, monkeypatch):
    assert product(monkeypatch, ONE, backward, programs=programs).grid == (grid,)


def test_a_fused_product_is_told_the_columns_of_parts_only_where_there_are_several(device, monkeypatch):
    assert product(monkeypatch, ONE, backward=False).of("COLUMNS", "BACKWARD") == ((), False)
    assert product(monkeypatch, PARTS, backward=False).of("COLUMNS", "P") == ((0, 128, 128, 192), 2)
    assert product(monkeypatch, PARTS, backward=True).of("COLUMNS", "BACKWARD") == ((), True)
    three = replace(PARTS, widths=(128, 128, 8))
    assert product(monkeypatch, three, backward=False).constants["COLUMNS"] == (0, 128, 128, 256, 256, 264)


@pytest.mark.parametrize(
    ("case", "backward", "training", "drops"),
    [
        (ONE, False, True, False),
        (ONE, True, True, True),
        (ONE, True, False, False),
        (PARTS, True, True, False),
        (PARTS, False, True, False),
    ],
)
def test_a_fused_product_draws_masks_in_the_backward_of_training(
    case, backward, training, drops, device, monkeypatch
):
    assert product(monkeypatch, case, backward, training=training).constants["HAS_DROPOUT"] is drops


@pytest.fixture
def taken(monkeypatch):
    """The names of the launchers that a pass calls, in order; each returns its own name."""
    names: list[str] = []

    def stand_in(name):
        def launcher(*given):
            names.append(name)
            return (name, "partial db") if name == "ds_db" else name

        return launcher

    for name in LAUNCHERS:
        monkeypatch.setattr(tiled, name, stand_in(name))
    return names


@pytest.mark.parametrize("plan", ProductPlan)
@pytest.mark.parametrize("residual", [None, torch.zeros(2, 3).T])
def test_a_forward_makes_s_and_then_the_product_of_its_order(plan, residual, taken):
    _, call = call_of(ONE, plan)
    product = "fused_y" if plan in (ProductPlan.fused, ProductPlan.fused_beside) else "wide_y"
    made = tiled.forward(torch.zeros(3, 2), torch.zeros(2, 2), None, residual, call)
    assert made == (product, "down", None)
    assert taken == ["down", product]


BEFORE = ["ds_db", "allocate_da", "da", "add_gradients"]
BESIDE = ["ds", "allocate_da", "allocate_db"], ["db", "da", "add_gradients"]


@pytest.mark.parametrize("plan", ProductPlan)
def test_a_backward_makes_the_gradients_before_or_beside_the_product(plan, taken):
    _, call = call_of(ONE, plan)
    x = torch.zeros(3, 2)
    product = "fused_dx" if plan in (ProductPlan.fused, ProductPlan.fused_beside) else "wide_dx"
    assert tiled.backward(x, x, x, x, call, needs_dx=True) == product
    before, after = BESIDE
    beside = plan in (ProductPlan.wide_beside, ProductPlan.fused_beside)
    assert taken == ([*before, product, *after] if beside else [*BEFORE, product])
    taken.clear()
    assert tiled.backward(x, x, x, x, call, needs_dx=False) is None
    assert taken == BEFORE


class Chosen:
    """Stands for the rule that chooses an order."""

    def __init__(self):
        self.asked = []

    def choose_plan(self, *given):
        self.asked.append(given)
        return ProductPlan.wide_beside


def test_a_linear_takes_the_first_order_or_the_one_that_is_chosen(monkeypatch):
    made, call = call_of(ONE)
    seen = []

    def forward(x, weight, bias, residual, use):
        seen.append(use)
        return made.dy.clone(), made.x, None

    monkeypatch.setattr(tiled, "forward", forward)
    anchor, rule = torch.zeros((), requires_grad=True), Chosen()
    given = (made.x, made.weight, None, None, anchor, call.group, call.rows, True)
    for choices in (None, rule):
        tiled.lora_linear(*given, choices)
    assert [use.plan for use in seen] == [ProductPlan.wide, ProductPlan.wide_beside]
    ((x, weight, residual, group, rows, plans),) = rule.asked
    assert (x, weight, residual, group, rows) == (made.x, made.weight, None, call.group, call.rows)
    assert plans == (ProductPlan.wide, ProductPlan.wide_beside)
    assert seen[0].tiling == choose_tiling(call.rows, call.group, 200, torch.float32)
    assert seen[0].tiling != choose_tiling(call.rows, call.group, 300, torch.float32)


@pytest.mark.parametrize("rows", [299, 301])
def test_an_input_of_other_rows_than_were_dealt_out_is_a_bug(rows):
    made, call = call_of(ONE)
    anchor = torch.zeros((), requires_grad=True)
    with pytest.raises(AssertionError):
        tiled.lora_linear(
            torch.zeros(rows, 200), made.weight, None, None, anchor, call.group, call.rows, True
        )


@pytest.mark.parametrize("wants_dx", [True, False])
@pytest.mark.parametrize("wants_residual", [True, False])
def test_gradients_go_to_those_who_want_them(wants_dx, wants_residual, monkeypatch):
    made, call = call_of(ONE)
    asked = []

    def backward(dy, x, weight, s, use, wants_dx, *_):
        asked.append(wants_dx)
        assert dy.is_contiguous()
        return torch.full_like(x, 7.0) if wants_dx else None

    monkeypatch.setattr(tiled, "forward", lambda *given: (made.dy.clone(), made.x.clone(), None))
    monkeypatch.setattr(tiled, "backward", backward)
    x, residual = made.x.requires_grad_(wants_dx), made.dy.clone().requires_grad_(wants_residual)
    anchor = torch.zeros((), requires_grad=True)
    y = tiled.lora_linear(x, made.weight, None, residual, anchor, call.group, call.rows, True)
    dy = torch.arange(float(y.numel())).view(y.shape[1], y.shape[0]).T
    y.backward(dy)
    assert asked == [wants_dx]
    assert (x.grad is not None) == wants_dx
    assert (residual.grad is not None) == wants_residual
    assert not wants_dx or (x.grad == 7.0).all()
    assert not wants_residual or torch.equal(residual.grad, dy)
    assert anchor.grad is None


def test_a_product_in_float32_takes_at_most_256_mib_at_a_time():
    """448 blocks of 128 columns: 447 of them fit with 1172 rows."""
    assert [len(list(column_spans(((0, 57344),), 128, rows))) for rows in (1170, 1171, 1172, 2340, 2341)] == [
        *(1, 2, 2),
        *(2, 3),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_is_summed_up_in_float32(dtype):
    left, right = torch.tensor([[256.0, 1.0]], dtype=dtype), torch.tensor([[256.0], [0.5]], dtype=dtype)
    found = product_in_float32(left, right)
    assert (found.dtype, found.tolist()) == (torch.float32, [[65536.5]])


def test_wide_products_are_made_of_the_columns_of_each_span(monkeypatch):
    made, call = call_of(PARTS, ProductPlan.wide)
    seen = []
    monkeypatch.setattr(products, "up", lambda s, product, span, *others: seen.append((product, span)))
    monkeypatch.setattr(products, "add_dx", lambda ds, product, span, *others: seen.append((product, span)))
    monkeypatch.setattr(products, "SPAN_BYTES", 4 * 300 * call.tiling.up.columns * 3)
    assert products.wide_y(made.x, made.weight, None, None, made.x, None, call).shape == (300, 192)
    whole = torch.cat([product for product, _ in seen], dim=1)
    torch.testing.assert_close(whole, made.x @ made.weight.T)
    assert [(span.first_column, span.end_column) for _, span in seen] == [(0, 96), (96, 192)]
    seen.clear()
    assert products.wide_dx(made.dy, made.weight, made.x, call).shape == (300, 200)
    torch.testing.assert_close(torch.cat([product for product, _ in seen], dim=1), made.dy @ made.weight)
    assert [(span.first_column, span.end_column) for _, span in seen] == [(0, 64), (64, 128), (128, 200)]


class Stream:
    """Notes what a stream of a GPU is asked for."""

    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, CUDA

    def record_event(self):
        self.log.append(f"{self.name} records")
        return "ready"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *error):
        self.log.append(f"off {self.name}")


def test_what_is_done_aside_waits_for_what_came_before_and_what_comes_after_waits_for_it(monkeypatch):
    log: list[str] = []
    usual, other = Stream("the stream", log), Stream("the other", log)
    monkeypatch.setattr(side_stream, "_side_stream", lambda device: other)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: usual)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    made = side_stream.SideStream(CUDA)
    log.append("the product")
    with made.concurrent_work():
        log.append("what is aside")
    assert log == [
        *("the stream records", "the product", "the other waits for ready", "on the other"),
        *("what is aside", "off the other", "the stream waits for the other"),
    ]


def test_without_a_gpu_what_is_aside_is_done_at_once(monkeypatch):
    monkeypatch.setattr(torch, "cuda", SimpleNamespace())
    done = []
    with side_stream.SideStream(CPU).concurrent_work():
        done.append(True)
    assert done


def test_a_device_has_one_stream_for_what_is_aside(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    first, second = torch.device("cuda", 61), torch.device("cuda", 62)
    assert side_stream._side_stream(first) is side_stream._side_stream(first)
    assert side_stream._side_stream(first) is not side_stream._side_stream(second)
