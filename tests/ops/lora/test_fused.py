"""The frozen product with the adapters in it, in Triton's interpreter, against plain torch."""

from itertools import product

import pytest
import torch

from tests.cases import slow_but
from tests.ops.lora.site_cases import Case, Job, attached, close, healthy_after, run, truth, values
from weftune.ops import dropout
from weftune.ops.lora.tiling import ProductPlan, candidate_plans, supported_plans

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_tiled_gpu.py runs the kernels compiled"),
]

CASES = {
    "one row": Case([Job(1, rank=8)], gap=0, padding=0),
    "rank 1 and odd rows": Case([Job(37, rank=1)]),
    "jobs that cross blocks of rows": Case([Job(140, rank=7), Job(3, rank=16), Job(155, rank=24)]),
    "several pieces": Case([Job(100, rank=4), Job(31, rank=5), Job(70, rank=16)], piece=32),
    "rank 64": Case([Job(70, rank=64), Job(90, rank=33)]),
    "small ranks beside rank 64": Case([Job(70, rank=64), Job(90, rank=16), Job(33, rank=3)]),
    "an empty segment and an empty slot": Case([Job(0, rank=8), Job(6, rank=8), None, Job(3, rank=2)]),
    "no gap, no padding": Case([Job(128, rank=4), Job(128, rank=6)], gap=0, padding=0),
    "no job attached": Case([], padding=140),
    "bias and residual": Case([Job(112, rank=4), Job(47, rank=3)], bias=True, residual=True),
    "parts": Case([Job(120, rank=4), Job(49, rank=8)], widths=(256, 128, 40), bias=True, residual=True),
    "parts, one job with but one of them": Case(
        [Job(120, rank=4), Job(49, rank=8, sites=(1,))], widths=(128, 128, 16), features=200
    ),
    "many columns": Case([Job(30, rank=4), Job(9, rank=8)], widths=(392,), features=200),
}


@pytest.mark.parametrize(
    ("name", "drop"),
    slow_but(product(CASES, (0.0, 0.1)), [*((name, 0.1) for name in CASES), ("bias and residual", 0.0)]),
)
def test_values_and_gradients_equal_plain_autograd_over_one_job_after_another(name, drop):
    case = CASES[name].dropping(drop)
    close(run(case, plan=ProductPlan.fused), truth(case))


@pytest.mark.parametrize("name", ["several pieces", "small ranks beside rank 64", "no job attached", "parts"])
def test_gradients_beside_the_product_equal_plain_autograd_too(name):
    case = CASES[name].dropping(0.1)
    close(run(case, plan=ProductPlan.fused_beside), truth(case))


@pytest.mark.parametrize("rank", [8, 64])
def test_wide_blocks_give_the_same_as_plain_autograd(rank):
    case = Case([Job(120, rank=rank), Job(49, rank=5)], widths=(256, 8), features=72).dropping(0.1)
    close(run(case, plan=ProductPlan.fused, columns=256), truth(case))


def test_two_dozen_adapters_keep_apart_in_one_block_of_rows():
    jobs = [Job(1 + index % 3, rank=1 + index % 9, dropout=0.1) for index in range(24)]
    case = Case(jobs, features=32, widths=(32,), gap=0)
    close(run(case, plan=ProductPlan.fused), truth(case))


def test_masks_of_the_backward_are_those_of_the_reference_bit_for_bit():
    """With A the identity and no frozen weight, dx is ds where the mask kept it, and 0 elsewhere."""
    case = Case([Job(150, rank=32, dropout=0.3)], features=32, widths=(32,), gap=2, seed=5)
    case = case.reading_the_mask()
    kept = dropout.keep_mask_TK(case.site_key(0, 0), case.token_index[2:152], 32, 0.3)
    assert torch.equal(run(case, plan=ProductPlan.fused)["dx"][2:152] != 0, kept)


def test_evaluating_drops_nothing_and_scales_nothing_up():
    case = Case([Job(20, rank=4, dropout=0.5), Job(9, rank=8, dropout=0.1)])
    close(run(case, training=False, plan=ProductPlan.fused), truth(case.dropping(0.0)))


def test_an_input_that_needs_no_gradient_gets_none_and_the_adapters_get_theirs():
    case = Case([Job(20, rank=4), Job(9, rank=8)])
    got, want = run(case, wants_dx=False, plan=ProductPlan.fused), truth(case)
    assert got.pop("dx") is None
    close(got, {name: value for name, value in want.items() if name != "dx"})


POISONS = ("x", "a", "b", "dy", "padding")


@pytest.mark.parametrize(
    ("poison", "plan"),
    slow_but(
        product(POISONS, (ProductPlan.fused, ProductPlan.fused_beside)),
        [("x", ProductPlan.fused), ("b", ProductPlan.fused), ("dy", ProductPlan.fused_beside)],
    ),
)
def test_a_nan_stays_with_its_owner_though_all_share_a_block_of_rows(poison, plan):
    case = Case([Job(20, rank=4), Job(40, rank=8), Job(9, rank=2)], widths=(128, 8))
    healthy_after(case.dropping(0.1), poison, plan)


def test_a_cpu_allows_only_the_orders_of_the_librarys_product():
    case = Case([Job(20, rank=4)], widths=(128,), features=128)
    made = values(case)
    _, group, _ = attached(case, made)
    allowed = supported_plans(made.weight.bfloat16(), group, torch.device("cpu"))
    assert allowed == (ProductPlan.wide, ProductPlan.wide_beside)
    assert candidate_plans(made.weight, group, torch.device("cpu")) == (
        ProductPlan.wide,
        ProductPlan.wide_beside,
    )
