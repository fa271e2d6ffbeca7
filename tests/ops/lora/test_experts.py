"""Experts by the tiled route, in Triton's interpreter, against the sum token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.lora.mixed import (
    SMALL,
    Case,
    Job,
    assert_close,
    assert_healthy_beside_a_sick_job,
    got,
    wanted,
)
from weftune.ops.experts import ExpertSite
from weftune.ops.lora.experts import best_plan, sort_choices
from weftune.ops.lora.table import Group, SlotTable
from weftune.ops.lora.tiling import ProductPlan

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_experts_gpu.py runs the kernels compiled"),
]

CASES = {
    "ranks of all kinds": Case(),
    "one job, one expert": Case((Job(20),), experts=2, active=1),
    "a rank of two bands": Case((Job(6, (130, 4)), Job(5, (3, 0))), experts=3),
    "widths of no alignment": Case((Job(6), Job(8)), hidden=37, inner=21),
    "nobody has adapters on gate and up": Case((Job(6, (0, 3)), Job(2, (0, 5)))),
    "nobody has any": Case((Job(6, (0, 0)),)),
    "the same, in a product of our own": Case((Job(6, (0, 0)),), plan=ProductPlan.fused),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_plain_autograd_token_by_token(name, device):
    assert_close(got(CASES[name], device), wanted(CASES[name], device, torch.float64))


def test_so_they_do_where_the_product_has_the_adapters_in_it(device):
    """More rows of an expert than a block, more columns, and both cut where nothing is whole."""
    case = Case((Job(90, (5, 3)), Job(60, (16, 40)), Job(3)), experts=2, active=1, hidden=136, inner=72)
    case = replace(case, plan=ProductPlan.fused)
    assert_close(got(case, device), wanted(case, device, torch.float64))


@pytest.mark.parametrize("plan", [ProductPlan.wide, ProductPlan.fused])
def test_a_nan_of_one_job_leaves_the_others_their_bits(plan, device):
    assert_healthy_beside_a_sick_job(replace(SMALL, plan=plan), device)


def test_gradients_are_added_to_what_is_there_also_where_x_needs_none(device):
    once, twice = got(SMALL, device), got(SMALL, device, wants_dx=False, times=2)
    assert twice["dx"] is None
    for name in once:
        if name.startswith(("da ", "db ")):
            torch.testing.assert_close(twice[name], 2 * once[name], rtol=1e-6, atol=1e-6)


def test_an_expert_without_tokens_gets_no_gradient(device):
    found = got(SMALL, device)
    for name, gradient in found.items():
        if name.startswith(("da ", "db ")):
            assert not gradient[-1].any()
            assert gradient.any()


def test_choices_are_sorted_by_expert_then_by_job_and_cut_into_tiles_and_blocks(device):
    owner_T, numbers_J = torch.tensor([[1, 1, 0, 2], [-1, 3, 0, 9]], dtype=torch.int32, device=device)
    chosen_Tk = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 2]], device=device)
    choices = sort_choices(chosen_Tk, owner_T, numbers_J[:3], experts=4, slots=16)
    assert choices.order_S.tolist() == [1, 2, 6, 5, 4, 0, 3, 7]
    assert choices.sorted_index_Tk.flatten()[choices.order_S].tolist() == list(range(8))
    assert choices.stops_E.tolist() == [3, 4, 8, 8]
    runs = [run for run in choices.rows.pieces_Q4.tolist() if run[0] < run[1]]
    assert runs == [
        [0, 2, 12, 1],
        [2, 3, 0, 1],
        [3, 4, -1, 1],
        [4, 5, -1, 1],
        [5, 7, 14, 1],
        [7, 8, 2, 1],
    ]
    tiles = [tile for tile in choices.rows.tiles_G3.tolist() if tile[0] < tile[1]]
    assert tiles == [run[:3] for run in runs]
    assert choices.used_blocks_1.tolist() == [3]
    assert choices.blocks_G5[:3].tolist() == [[0, 3, 0, 0, 2], [3, 4, 1, 2, 3], [4, 8, 2, 3, 6]]


def test_long_runs_are_cut_into_tiles_and_experts_into_blocks(device):
    owner_T = torch.ones(300, dtype=torch.int32, device=device)
    chosen_Tk = torch.zeros(300, 1, dtype=torch.int64, device=device)
    chosen_Tk[150:] = 1
    numbers_J = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    choices = sort_choices(chosen_Tk, owner_T, numbers_J, experts=2, slots=2)
    tiles = [tuple(tile) for tile in choices.rows.tiles_G3.tolist() if tile[0] < tile[1]]
    assert tiles == [(0, 64, 0), (64, 128, 0), (128, 150, 0), (150, 214, 1), (214, 278, 1), (278, 300, 1)]
    blocks = [tuple(block) for block in choices.blocks_G5[: choices.used_blocks_1].tolist()]
    assert blocks == [(0, 128, 0, 0, 1), (128, 150, 0, 0, 1), (150, 278, 1, 1, 2), (278, 300, 1, 1, 2)]


def test_a_product_of_our_own_is_for_gpus_that_have_copy_engines():
    table = SlotTable.empty(["site"], 8, torch.device("cpu"))
    site = ExpertSite(torch.zeros(2, 16, 16), Group(((0, 16),), table, 16, has_dropout=False))
    assert best_plan(site) is ProductPlan.wide
