"""Jobs that scale the outputs or the inputs of a site, in Triton's interpreter, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.cases import slow_but
from tests.ops.lora.site_cases import Case, Job, Values, attached, scale, values
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.scales import SiteScale, scale_table, set_scales
from weftune.ops.lora.table import Group, LowRank
from weftune.ops.lora.tiled import lora_linear
from weftune.ops.lora.tiling import ProductPlan

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("device")

CASES = {
    "one job": Case([Job(37, rank=3)]),
    "jobs that cross blocks of rows": Case([Job(140, rank=7), Job(3, rank=16), Job(155, rank=24)]),
    "several pieces": Case([Job(100, rank=4), Job(31, rank=5), Job(70, rank=16)], piece=32),
    "bias and residual": Case([Job(112, rank=4), Job(47, rank=3), Job(9, rank=2)], bias=True, residual=True),
    "parts": Case(
        [Job(120, rank=4), Job(49, rank=8, sites=(1,)), Job(20, rank=3)], widths=(256, 128, 40), bias=True
    ),
}


class Forced:
    """Takes one plan whatever the device."""

    def __init__(self, plan: ProductPlan) -> None:
        self._order = plan

    def choose_plan(self, *_: object) -> ProductPlan:
        return self._order


def drawn(seed: int, size: int) -> Tensor:
    return 1.0 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(
    case: Case,
) -> tuple[dict[int, list[LowRank | None]], Group, Rows, dict[tuple[int, int], SiteScale], Values]:
    """As `attached`, with a scale of outputs for all slots but the second: the first divided by the lengths
    of rows, the third with its bias."""
    found = values(case)
    by_slot, group, rows = attached(case, found)
    device = torch.device(case.device)
    table = scale_table(len(case.widths), rows.key_S.shape[0], device)
    scales: dict[tuple[int, int], SiteScale] = {}
    for slot in by_slot:
        if slot == 1:
            continue
        for site, width in enumerate(case.widths):
            value = drawn(10 * slot + site, width).to(device)
            inverse = torch.full((width,), torch.nan, device=device) if slot == 0 else None
            scales[slot, site] = SiteScale(value, torch.zeros_like(value), inverse, scales_bias=slot == 2)
        set_scales(table, slot, [scales[slot, site] for site in range(len(case.widths))])
    table.copy_to_device()
    return by_slot, replace(group, g_out=table, has_dora=True), rows, scales, found


def plain(case: Case, by_slot: dict[int, list[LowRank | None]], found: Values) -> dict[str, Tensor]:
    """The same in float64 by autograd."""
    x = found.x.double().requires_grad_()
    residual = torch.zeros(()) if found.residual is None else found.residual.double()
    bias = torch.zeros(()) if found.bias is None else found.bias.double()
    weight = found.weight.double()
    leaves: dict[str, Tensor] = {"dx": x}
    rows = []
    y = (x @ weight.T + bias).clone()
    for slot, entries in by_slot.items():
        own = case.rows_of(slot)
        rows.append(own)
        for site, (low, high) in enumerate(case.columns):
            u = x[own] @ weight[low:high].T
            entry = entries[site]
            if entry is not None:
                a = leaves[f"da {slot} {site}"] = entry.a_RK.double().requires_grad_()
                b = leaves[f"db {slot} {site}"] = entry.b_RN.double().requires_grad_()
                u = u + scale(slot, site) * x[own] @ a.T @ b
            here = bias if bias.ndim == 0 else bias[low:high]
            if slot != 1:
                g = leaves[f"dg {slot} {site}"] = (
                    drawn(10 * slot + site, high - low).double().requires_grad_()
                )
                if slot == 0:
                    whole = weight[low:high]
                    if entry is not None:
                        whole = whole + scale(slot, site) * (b.T @ a).detach()
                    g = g / whole.norm(dim=1)
                u = (u + here) * g if slot == 2 else u * g + here
            else:
                u = u + here
            y[own, low:high] = u
    y = y + residual
    y.backward(found.dy.double())
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


PLANS = [ProductPlan.wide, ProductPlan.fused, ProductPlan.fused_beside]


@pytest.mark.parametrize(
    ("name", "plan"),
    slow_but(
        product(CASES, PLANS), [("parts", PLANS[0]), ("parts", PLANS[2]), ("bias and residual", PLANS[1])]
    ),
)
def test_scaled_outputs_and_their_gradients_equal_plain_autograd(name: str, plan: ProductPlan) -> None:
    case = CASES[name]
    if not case.residual and plan is ProductPlan.fused_beside and name != "parts":
        case = replace(case, residual=True)
    by_slot, group, rows, scales, found = made(case)
    x, anchor = found.x.clone().requires_grad_(), torch.zeros((), requires_grad=True, device=found.x.device)
    forced = Forced(plan)
    y = lora_linear(
        x, found.weight, found.bias, found.residual, anchor, group, rows, True, forced  # type: ignore[arg-type]
    )  # fmt: skip
    # A group of several sites takes the gradient for its own.
    y.backward(found.dy.clone())
    assert x.grad is not None
    got = {"y": y.detach(), "dx": x.grad}
    for slot, entries in by_slot.items():
        for site, entry in enumerate(entries):
            if entry is not None:
                got |= {f"da {slot} {site}": entry.da_RK, f"db {slot} {site}": entry.db_RN}
    got |= {f"dg {slot} {site}": one.total_M for (slot, site), one in scales.items()}
    want = plain(case, by_slot, found)
    assert got.keys() == want.keys()
    for one, value in want.items():
        bound = 5e-6 * value.abs().max().clamp(min=1.0)
        assert (got[one].double() - value).abs().max() < bound, one
