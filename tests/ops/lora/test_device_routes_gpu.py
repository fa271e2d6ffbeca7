"""The routes that other classes of GPUs take, forced on the GPU at hand: run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import device_routes
from benchmarks.site_case import SiteAdapters, made_up_case
from tests.ops.lora.site_cases import Case, Job, run
from tests.ops.lora.test_tiled_gpu import BIG, no_worse_than_plain_torch
from weftune.core.device_class import CLASSES, get_device_class, pretend_device_class
from weftune.ops.experts import supports_grouped_mm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES = {
    "ranks 8 to 64": Case(
        [Job(137, rank=8), Job(300, rank=16, dropout=0.1), Job(64, rank=32), Job(129, rank=64)],
        **(BIG | dict(features=2048, widths=(1024, 256))),
    ),
    "ranks 16 and 128 in three parts": Case(
        [Job(130, rank=16), Job(300, rank=128, dropout=0.1)],
        **(BIG | dict(widths=(512, 128, 128), bias=True, residual=True)),
    ),
    "rank 256": Case([Job(200, rank=256), Job(77, rank=3)], **(BIG | dict(widths=(384,)))),
    "float16": Case([Job(300, rank=16)], **(BIG | dict(dtype=torch.float16))),
}


def runnable():
    """Classes whose instructions the GPU at hand has: it must have copy engines for theirs."""
    own = get_device_class(torch.device("cuda", 0)) if torch.cuda.is_available() else CLASSES[-1]
    return [one for one in CLASSES if own.has_copy_engines or not one.has_copy_engines]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("one", runnable(), ids=lambda one: one.architecture)
def test_a_forced_route_is_as_exact_as_plain_torch(one, name):
    with pretend_device_class(one):
        got = run(CASES[name])
    no_worse_than_plain_torch(got, CASES[name])


@pytest.mark.parametrize("one", runnable(), ids=lambda one: one.architecture)
def test_the_benchmark_of_forced_routes_finds_every_plan_exact(one):
    adapters = SiteAdapters("small", (16,) * 4, rows=512)
    case = made_up_case(adapters, 512, 768, 1, torch.device("cuda", 0), torch.bfloat16)
    by_plan = device_routes.calls(case, one)
    ratios = device_routes.error_ratios(case, by_plan)
    assert ratios.keys() == by_plan.keys()
    assert all(ratio <= device_routes.MAX_RATIO for ratio in ratios.values()), ratios


@pytest.mark.parametrize("one", runnable(), ids=lambda one: one.architecture)
def test_grouped_products_are_torchs_only_on_classes_that_have_the_kernel(one):
    weight_EKN = torch.empty(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pretend_device_class(one):
        assert supports_grouped_mm(weight_EKN) == one.has_grouped_mm
