"""Sites whose frozen weight is one of 8-bit floats, in Triton's interpreter, against plain torch."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.cases import slow_but
from tests.ops.launches import noted
from tests.ops.lora.site_cases import (
    Case,
    Job,
    attached,
    close,
    coded_truth,
    frozen_weight,
    healthy_after,
    run,
    values,
)
from weftune.ops.lora import products, tiling
from weftune.ops.lora.choice import PlanTrial
from weftune.ops.lora.choice_trial import synthetic_site
from weftune.ops.lora.tiled import plan_trial
from weftune.ops.lora.tiling import (
    ProductPlan,
    SiteCall,
    blocks_for_codes,
    can_fuse,
    choose_tiling,
    product_blocks,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_coded_gpu.py runs the kernels compiled"),
]

ONE = Case([Job(140, rank=7), Job(3, rank=16), Job(33, rank=24)], widths=(64,), coded=True)
PARTS = Case(
    [Job(120, rank=4), Job(49, rank=8, sites=(1,))], features=176, widths=(128, 128, 48),
    bias=True, residual=True, coded=True,
)  # fmt: skip
BOUND = 1e-5
"""Of sums in float32 of numbers that differ by what a scale may."""


CASES = {"one site": ONE, "three with bias and residual": PARTS}


@pytest.mark.parametrize(
    ("plan", "name"),
    slow_but(
        product(ProductPlan, CASES),
        [(ProductPlan.wide, "one site"), (ProductPlan.fused, "three with bias and residual")],
    ),
)
def test_values_and_gradients_are_those_of_the_codes(plan, name):
    case = CASES[name]
    case = case.dropping(0.1)
    want = coded_truth(case)
    close(run(case, plan=plan), want, BOUND)
    with pytest.raises(AssertionError):
        close(run(replace(case, coded=False), plan=plan), want, BOUND)


def test_the_autograd_node_takes_codes_as_it_takes_a_matrix():
    close(run(PARTS), coded_truth(PARTS), BOUND)


def test_blocks_of_256_columns_and_sums_that_are_not_rough_give_the_same(monkeypatch):
    case = replace(PARTS, widths=(256, 32))
    want = coded_truth(case)
    close(run(case, plan=ProductPlan.fused, columns=256), want, BOUND)
    monkeypatch.setattr(tiling, "ROUGH_SUMS", 100)
    close(run(case, plan=ProductPlan.fused, columns=256), want, BOUND)


@pytest.mark.parametrize("poison", slow_but(["x", "a", "b", "dy", "padding"], ["x", "dy"]))
@pytest.mark.parametrize("plan", [ProductPlan.wide, ProductPlan.fused])
def test_a_nan_stays_with_its_owner(plan, poison):
    case = Case([Job(20, rank=4), Job(40, rank=8), Job(9, rank=2)], widths=(128, 16), coded=True)
    healthy_after(case.dropping(0.1), poison, plan)


def test_a_program_takes_as_many_bytes_of_codes_at_a_time_and_reads_both_operands_along_the_sum(monkeypatch):
    from weftune.ops.triton import product as kernels

    launches = noted(monkeypatch, kernels, "product")
    made = values(PARTS)
    weight = frozen_weight(PARTS, made)
    _, group, rows = attached(PARTS, made)
    use = SiteCall(
        group, rows, True, choose_tiling(rows, group, PARTS.features, PARTS.dtype), ProductPlan.fused
    )
    products.fused_y(made.x, weight, None, None, made.x, None, use)
    products.fused_dx(made.dy, weight, made.x, use)
    for launch in launches:
        assert [one.block_shape for one in launch.given[:2]] == [[128, 128], [launch.constants["C"], 128]]
        assert launch.of("TRANSPOSED", "D", "PRODUCTS_PER_SUM") == (True, 128, None)
    assert [launch.given[7] is None for launch in launches] == [False, True], "scales of columns"


def test_only_short_sums_are_left_to_the_tensor_core():
    blocks = product_blocks(256, torch.bfloat16, 132)
    short, long = blocks_for_codes(blocks, 28672), blocks_for_codes(blocks, 57344)
    assert (short.columns, short.inner_size, short.products_per_sum) == (256, 128, None)
    assert (long.columns, long.inner_size, long.products_per_sum) == (128, 128, 128)


def test_a_product_of_our_own_takes_codes_in_whole_16_bytes(monkeypatch):
    monkeypatch.setattr(tiling, "_has_copy_engines", lambda device: True)
    for outputs, features, taken in ((128, 64, True), (128, 72, False), (136, 64, False)):
        codes = torch.zeros(outputs, features).to(torch.float8_e4m3fn)
        assert can_fuse(codes, codes.device) is taken
        assert can_fuse(codes.bfloat16(), codes.device)


def test_a_trial_is_made_of_codes_and_known_as_such():
    made = values(PARTS)
    weight = frozen_weight(PARTS, made)
    _, group, rows = attached(PARTS, made)
    trial = plan_trial(weight, True, group, rows, torch.float32)
    assert trial is not None
    assert trial == PlanTrial.for_linears(trial.plans, torch.float32, weight.codes(), True, group, rows)
    assert trial.has_codes
    assert trial.key.split(":")[0].endswith("fp8")
    plain = plan_trial(made.weight, True, group, rows, torch.float32)
    assert plain is not None
    assert "fp8" not in plain.key
    site = synthetic_site(replace(trial, rows=32), torch.device("cpu"))
    assert site.weight_NK.codes().shape == (304, 176)
    site.step(ProductPlan.fused)
