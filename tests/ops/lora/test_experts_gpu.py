"""Experts by the tiled route compiled for a CUDA device, in bfloat16: run with `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.cases import call_side_by_side
from tests.ops.lora.mixed import (
    SMALL,
    Case,
    Job,
    assert_earned,
    assert_healthy_beside_a_sick_job,
    got,
    wanted,
)
from weftune.ops.lora.tiling import ProductPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")
ORDERS = ProductPlan.wide, ProductPlan.fused
FOUR = tuple(Job(tokens, (4, 4), 1.0) for tokens in (100, 64, 3, 70))
USUAL = {plan: Case(FOUR, 9, 4, 256, 128, torch.bfloat16, plan) for plan in ORDERS}
SICK = {plan: replace(SMALL, plan=plan, dtype=torch.bfloat16) for plan in ORDERS}
YOUNG = Case((Job(400, (4, 4), 1.0),), 9, 4, 256, 128, torch.bfloat16, ProductPlan.fused, grown=1 / 500)
CUT = Case((Job(90, (5, 3)), Job(60, (16, 40)), Job(3)), 3, 2, 136, 72, torch.bfloat16, ProductPlan.fused)


@pytest.fixture(scope="module", autouse=True)
def _compiled_side_by_side():
    """The compiler takes most of the time of these tests."""
    call_side_by_side(partial(got, case, GPU) for case in (*USUAL.values(), *SICK.values(), YOUNG, CUT))
    torch.cuda.synchronize()


@pytest.mark.parametrize("plan", ORDERS)
def test_they_are_as_near_to_float64_as_plain_autograd_is_in_bfloat16(plan):
    assert_earned(USUAL[plan], GPU)


def test_what_a_young_adapter_adds_is_not_rounded_away():
    """It is a fraction of the last digit: all traces of it are in how sums have been rounded."""
    none = replace(YOUNG, grown=0.0)
    added = wanted(YOUNG, GPU, torch.float64)["y"] - wanted(none, GPU, torch.float64)["y"]
    y_TD = got(none, GPU)["y"].double()
    assert 0.0 < added.abs().mean() < y_TD.abs().mean() / 256
    seen = got(YOUNG, GPU)["y"].double() - y_TD
    assert ((seen * added).sum() / (added**2).sum()).item() == pytest.approx(1.0, abs=0.2)


def test_so_they_are_where_nothing_is_whole():
    """More rows of an expert than a block, more columns, and both cut."""
    assert_earned(CUT, GPU)


@pytest.mark.parametrize("plan", ORDERS)
def test_a_nan_of_one_job_leaves_the_others_their_bits(plan):
    assert_healthy_beside_a_sick_job(SICK[plan], GPU)
