"""The benchmark of forced routes as far as it goes without a GPU: its errors in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import device_routes
from benchmarks.site_case import SiteAdapters, made_up_case
from tests.interpreter import interpret
from weftune.core.device_class import class_for_capability
from weftune.ops.lora.tiling import ProductPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a GPU")

SMALL = SiteAdapters("small", (2, 20), rows=40)


def test_routes_are_as_exact_as_plain_torch_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    case = made_up_case(SMALL, 32, 48, 1, torch.device("cpu"), torch.float32)
    by_plan = device_routes.calls(case, class_for_capability((8, 6)))
    assert list(by_plan) == [ProductPlan.wide, ProductPlan.wide_beside]
    some = {"wide": by_plan["wide"]}
    ratios = device_routes.error_ratios(case, some)
    assert 0.0 < ratios["wide"] <= device_routes.MAX_RATIO
    case.group.write(0, [None])
    assert device_routes.error_ratios(case, some)["wide"] > device_routes.MAX_RATIO
