"""Ranks above a band: jobs of 96 to 200 ranks beside small ones, whatever the order of the products."""

from dataclasses import replace

import pytest
import torch

from tests.cases import slow_but
from tests.ops.lora.site_cases import (
    Case,
    Job,
    close,
    healthy_after,
    kept_of_a_young_adapter,
    run,
    truth,
)
from weftune.ops import dropout
from weftune.ops.lora import table, tiling
from weftune.ops.lora.tiling import ProductPlan

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device", "nothing_is_zero_by_chance"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_tiled_gpu.py runs the kernels compiled"),
]


@pytest.fixture
def nothing_is_zero_by_chance(monkeypatch):
    """Memory that nobody has written holds NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


BANDS = (64, 128)


@pytest.fixture(params=BANDS)
def band(request, monkeypatch):
    """Ranks of a band: of 128 ranks 64 make two, 128 one."""
    monkeypatch.setattr(table, "BAND", request.param)
    monkeypatch.setattr(tiling, "BAND", request.param)
    return request.param


MIXED = Case(
    [
        Job(9, rank=128),
        Job(20, rank=4, dropout=0.1),
        Job(7, rank=200, dropout=0.2),
        Job(33, rank=96, sites=(1,)),
        Job(6, rank=16),
        Job(11, rank=40),
    ],
    features=40,
    widths=(128, 24),
    piece=16,
)
"""Some drop, one has but one of two sites, some have several pieces."""
ORDERS = (ProductPlan.wide, ProductPlan.fused, ProductPlan.wide_beside, ProductPlan.fused_beside)


@pytest.mark.parametrize("plan", slow_but(ORDERS, [ProductPlan.fused_beside]))
def test_ranks_in_bands_beside_small_ones_equal_plain_autograd(plan, band):
    close(run(MIXED, plan=plan), truth(MIXED))


@pytest.mark.parametrize("band", slow_but(BANDS, [128]), indirect=True)
@pytest.mark.parametrize("plan", slow_but([ProductPlan.wide, ProductPlan.fused], [ProductPlan.fused]))
def test_in_bands_ds_and_db_are_the_same_from_one_read_of_dy(plan, band):
    close(run(MIXED, plan=plan, one_read=True), truth(MIXED))


@pytest.mark.parametrize("band", slow_but(BANDS, [64]), indirect=True)
def test_sums_in_shares_are_right_in_bands(band):
    """From so many columns on, sums over inputs and outputs are split among programs."""
    jobs = [Job(9, rank=130), Job(20, rank=4), Job(7, rank=40, dropout=0.1)]
    case = Case(jobs, features=264, widths=(256,))
    close(run(case, plan=ProductPlan.fused_beside), truth(case))


def test_evaluating_drops_nothing_in_bands():
    got = run(MIXED, training=False, plan=ProductPlan.fused)
    close(got, truth(MIXED.dropping(0.0)))


POISONS = ("x", "a", "b", "dy", "padding")
SICK = Case([Job(20, rank=4), Job(40, rank=130), Job(9, rank=70), Job(8, rank=16)], widths=(128, 8))


@pytest.mark.parametrize(
    ("poison", "plan"),
    slow_but(
        [(poison, plan) for poison in POISONS for plan in (ProductPlan.fused, ProductPlan.wide_beside)],
        [("x", ProductPlan.fused), ("dy", ProductPlan.fused)],
    ),
)
def test_a_nan_in_bands_stays_with_its_owner_though_all_share_a_block_of_rows(poison, plan):
    healthy_after(SICK.dropping(0.1), poison, plan)


def test_a_nan_of_a_small_job_does_not_reach_one_in_bands():
    jobs = [Job(20, rank=130), Job(40, rank=4), Job(9, rank=70)]
    healthy_after(Case(jobs, widths=(128, 8)), "b", ProductPlan.fused)


def test_masks_of_a_large_job_are_those_of_the_reference_bit_for_bit():
    """With A the identity and no frozen weight, dx is ds where the mask kept it, and 0 elsewhere."""
    case = Case([Job(150, rank=96, dropout=0.3)], features=96, widths=(96,), gap=2, seed=5)
    case = case.reading_the_mask()
    kept = dropout.keep_mask_TK(case.site_key(0, 0), case.token_index[2:152], 96, 0.3)
    assert torch.equal(run(case, plan=ProductPlan.fused)["dx"][2:152] != 0, kept)


def test_what_a_young_adapter_of_many_ranks_adds_is_not_rounded_away_in_16_bits():
    case = Case([Job(256, rank=96)], features=64, widths=(256,), gap=0, residual=True, dtype=torch.float16)
    for name, kept in kept_of_a_young_adapter(case, ProductPlan.fused).items():
        assert kept == pytest.approx(1.0, abs=0.1), name


def test_who_drops_nothing_has_the_same_bits_beside_one_that_drops():
    alone = replace(MIXED, jobs=[job and replace(job, dropout=0.0) for job in MIXED.jobs])
    beside, without = run(MIXED, plan=ProductPlan.fused), run(alone, plan=ProductPlan.fused)
    rows = torch.ones(MIXED.rows, dtype=torch.bool)
    for slot in (1, 2):
        rows[MIXED.rows_of(slot)] = False
    for name in ("y", "dx"):
        assert torch.equal(beside[name][rows], without[name][rows]), name
    healthy = [name for name in beside if name[-1] in "0345" and name[:2] in ("da", "db")]
    assert len(healthy) == 14
    assert all(torch.equal(beside[name], without[name]) for name in healthy)
