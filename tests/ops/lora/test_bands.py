"""Ranks above a band: jobs of 96 to 200 ranks beside small ones, whatever the order of the products."""

import pytest
import torch

from tests.cases import slow_but
from tests.ops.lora.woven import Case, Job, close, run, truth
from weftune.ops.lora import table, weave
from weftune.ops.lora.weave import Order

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


@pytest.fixture(params=slow_but([64, 128], [64, 128]))
def band(request, monkeypatch):
    """Ranks of a band: 64 make two of 128 ranks, 128 but one."""
    monkeypatch.setattr(table, "BAND", request.param)
    monkeypatch.setattr(weave, "BAND", request.param)
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
ORDERS = (Order.wide, Order.fused, Order.wide_beside, Order.fused_beside)


@pytest.mark.parametrize("order", slow_but(ORDERS, [Order.wide, Order.fused_beside]))
def test_ranks_in_bands_beside_small_ones_equal_plain_autograd(order, band):
    close(run(MIXED, order=order), truth(MIXED))
