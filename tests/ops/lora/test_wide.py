"""The library's product in float32 and what is added to it, in Triton's interpreter, against plain torch.

`test_tiled.py` has the cases; here is what this product has for itself: its spans, and 16 bits.
"""

import weakref
from itertools import product

import pytest
import torch

from tests.cases import slow_but
from tests.ops.lora.site_cases import Case, Job, close, healthy_after, kept_of_a_young_adapter, run, truth
from weftune.ops.lora import products
from weftune.ops.lora.products import column_spans
from weftune.ops.lora.tiling import ProductPlan

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_tiled_gpu.py runs the kernels compiled"),
]

WIDE = [ProductPlan.wide, ProductPlan.wide_beside]
PARTS = Case(
    [Job(20, rank=4), Job(9, rank=8, sites=(1,))], features=100, widths=(80, 16, 24), bias=True, residual=True
)


ODD = Case([Job(9, rank=3)], features=37, widths=(71, 7))


@pytest.mark.parametrize(
    ("case", "plan", "blocks"),
    slow_but(
        product((PARTS, ODD), WIDE, (1, 2)),
        [(PARTS, ProductPlan.wide, 2), (PARTS, ProductPlan.wide_beside, 1), (ODD, ProductPlan.wide, 1)],
    ),
)
def test_a_product_in_spans_equals_plain_autograd_and_only_one_is_held(case, plan, blocks, monkeypatch):
    case, made, product = case.dropping(0.1), [], products.product_in_float32
    limit = 4 * 32 * blocks * case.rows
    monkeypatch.setattr(products, "SPAN_BYTES", limit)

    def watched(left, right):
        assert not any(earlier() is not None for earlier in made)
        found = product(left, right)
        assert found.nbytes <= limit
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(products, "product_in_float32", watched)
    close(run(case, plan=plan), truth(case))
    assert len(made) > 2


@pytest.mark.parametrize("poison", slow_but(["x", "b", "dy", "padding"], ["dy"]))
def test_a_nan_stays_with_its_owner_in_every_span(poison, monkeypatch):
    monkeypatch.setattr(products, "SPAN_BYTES", 1)
    case = Case([Job(20, rank=4), Job(40, rank=8), Job(9, rank=2)], features=70, widths=(40, 8))
    healthy_after(case.dropping(0.1), poison, ProductPlan.wide)


@pytest.mark.parametrize(
    "parts", [((0, 57344),), ((0, 4096), (4096, 5120), (5120, 6144)), ((0, 77), (77, 112))]
)
@pytest.mark.parametrize("rows", [1, 8192, 100_000])
def test_spans_are_runs_of_whole_blocks_that_keep_to_their_bytes(parts, rows):
    found = list(column_spans(parts, 128, rows))
    edges = [(at, min(at + 128, high)) for low, high in parts for at in range(low, high, 128)]
    assert [at for one in found for at in range(one.first_block, one.first_block + one.block_count)] == list(
        range(len(edges))
    )
    for one in found:
        assert (one.first_column, one.end_column) == (
            edges[one.first_block][0],
            edges[one.first_block + one.block_count - 1][1],
        )
        assert 4 * rows * (one.end_column - one.first_column) <= products.SPAN_BYTES


def test_a_product_is_one_span_where_it_fits_and_a_block_is_never_cut(monkeypatch):
    assert len(list(column_spans(((0, 8192),), 128, 8192))) == 1
    assert len(list(column_spans(((0, 57344),), 128, 8192))) == 7
    monkeypatch.setattr(products, "SPAN_BYTES", 1)
    assert len(list(column_spans(((0, 200), (200, 300)), 128, 8192))) == 3


@pytest.mark.parametrize("plan", ProductPlan)
def test_what_a_young_adapter_adds_is_not_rounded_away_in_16_bits(plan):
    """In float16, which the interpreter knows, as it does not know bfloat16."""
    case = Case([Job(256, rank=8)], features=64, widths=(256,), gap=0, residual=True, dtype=torch.float16)
    for name, kept in kept_of_a_young_adapter(case, plan).items():
        assert kept == pytest.approx(1.0, abs=0.1), name


@pytest.mark.parametrize("plan", WIDE)
def test_the_error_in_16_bits_is_at_most_that_of_plain_torch(plan):
    case = Case(
        [Job(20, rank=4), Job(90, rank=8)],
        widths=(24, 8),
        piece=32,
        bias=True,
        residual=True,
        dtype=torch.float16,
    ).dropping(0.1)
    got, exact, plain = run(case, plan=plan), truth(case), truth(case, case.dtype)
    for name, want in exact.items():
        assert (got[name].double() - want).norm() <= (plain[name].double() - want).norm(), name
