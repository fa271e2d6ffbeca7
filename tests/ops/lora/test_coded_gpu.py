"""Sites of 8-bit floats with the kernels compiled, in bfloat16: run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.lora.site_cases import (
    Case,
    Job,
    attached,
    coded_truth,
    frozen_weight,
    healthy_after,
    kept_of_a_young_adapter,
    run,
    values,
)
from weftune.ops.lora import tiling
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling, supported_plans

GPU = torch.device("cuda")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="no fp8 tensor cores"),
]

BIG = dict(device="cuda", dtype=torch.bfloat16, coded=True)
CASES = {
    "one site": Case([Job(137, rank=8), Job(300, rank=16)], features=512, widths=(384,), **BIG),
    "parts, bias and residual": Case(
        [Job(37, rank=1), Job(300, rank=7), Job(129, rank=24)],
        features=2048, widths=(1024, 256, 256), bias=True, residual=True, **BIG,
    ),
    "rank 256": Case([Job(77, rank=256), Job(200, rank=3)], features=1024, widths=(512, 128), **BIG),
    "a long sum": Case([Job(200, rank=16)], features=14336, widths=(4096,), **BIG),
    "a longer one in the backward": Case([Job(200, rank=16)], features=512, widths=(14336, 14336), **BIG),
    "no job attached": Case([], padding=140, features=512, widths=(256,), **BIG),
}  # fmt: skip


def allowed(case):
    made = values(case)
    _, group, _ = attached(case, made)
    return supported_plans(frozen_weight(case, made).codes(), group, GPU)


def off(got, want):
    """The root mean square of what is off, over that of all."""
    got, want = got.double(), want.double()
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-9)).item()


def compare(case, plan, bound, **how):
    got, want = run(case, plan=plan, **how), coded_truth(case)
    for name, value in want.items():
        # What adapters learn is computed in bfloat16 from what is not rounded to codes.
        limit = bound if name in ("y", "dx") else 1e-2
        assert off(got[name], value) < limit, (name, off(got[name], value))


@pytest.mark.parametrize("plan", ProductPlan)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_codes(name, plan):
    case = CASES[name].dropping(0.1)
    if plan not in allowed(case):
        pytest.skip("no copy engines")
    # bfloat16 itself is off by 1.7e-3; the rest is what a tensor core cuts off of its sums.
    compare(case, plan, 3e-2 if "long" in name else 1e-2)


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("name", ["parts, bias and residual", "a long sum", "a longer one in the backward"])
def test_sums_in_float32_are_off_by_no_more_than_bfloat16(name, columns, monkeypatch):
    case = CASES[name]
    if ProductPlan.fused not in allowed(case):
        pytest.skip("no copy engines")
    monkeypatch.setattr(tiling, "ROUGH_SUMS", 0)
    compare(case, ProductPlan.fused, 4e-3, columns=columns)


def test_how_much_a_tensor_core_cuts_off(capsys):
    """No bar: the numbers that ROUGH_SUMS was chosen by."""
    if ProductPlan.fused not in allowed(CASES["one site"]):
        pytest.skip("no copy engines")
    for features in (512, 4096, 14336, 28672):
        case = Case([Job(256, rank=16)], features=features, widths=(1024,), **BIG)
        got, want = run(case, plan=ProductPlan.fused)["y"].double(), coded_truth(case)["y"].double()
        shrunk = 1 - ((got * want).sum() / want.square().sum()).item()
        with capsys.disabled():
            print(f"\n{features} products: off by {off(got, want):.2%}, too small by {shrunk:.3%}", end="")
        assert abs(shrunk) < 0.03


@pytest.mark.parametrize("plan", ProductPlan)
def test_what_a_young_adapter_adds_is_not_rounded_away(plan):
    case = Case([Job(512, rank=16)], gap=0, padding=0, features=1024, widths=(1024,), **BIG)
    if plan not in allowed(case):
        pytest.skip("no copy engines")
    for name, kept in kept_of_a_young_adapter(case, plan).items():
        assert kept == pytest.approx(1.0, abs=0.1), name


@pytest.mark.parametrize("plan", [ProductPlan.wide, ProductPlan.fused])
@pytest.mark.parametrize("poison", ["x", "a", "b", "dy", "padding"])
def test_a_nan_stays_with_its_owner(poison, plan):
    case = Case([Job(20, rank=4), Job(40, rank=8), Job(9, rank=2)], features=256, widths=(128, 16), **BIG)
    if plan not in allowed(case):
        pytest.skip("no copy engines")
    healthy_after(case.dropping(0.1), poison, plan)


def test_a_captured_graph_replays_to_the_bits_of_the_ops():
    case = replace(CASES["parts, bias and residual"], jobs=[Job(37, rank=8), Job(300, rank=8)])
    made = values(case)
    weight = frozen_weight(case, made)
    adapters, group, rows = attached(case, made)
    chosen = choose_tiling(rows, group, case.features, case.dtype)
    use = SiteCall(
        group,
        rows,
        True,
        chosen,
        ProductPlan.fused if ProductPlan.fused in allowed(case) else ProductPlan.wide,
    )

    def both():
        y, s, _ = forward(made.x, weight, made.bias, made.residual, use)
        return y, backward(made.dy, made.x, weight, s, use, needs_dx=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    made.x.normal_()
    made.dy.normal_()
    graph.replay()
    for replayed, wanted in zip(captured, both(), strict=True):
        assert torch.equal(replayed, wanted)
    del adapters
