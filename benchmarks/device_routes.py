"""One site with 8 adapters by the routes that other classes of GPUs take, forced on the GPU at hand.

python -m benchmarks.device_routes [--class 8.6] [--json FILE]

For every class (`weftune.core.device_class`): the product plan and launch parameters that it selects, with
its shared memory and without copy engines if it has none; the error of y, dx, dA and dB against float64 over
that of plain torch in bfloat16 (at most 2); and the time over that of the GPU's own route. Element-wise
kernels are launched alike on all classes.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_site import SHAPES
from benchmarks.site_case import SiteAdapters, SiteCase, microseconds, site_case
from weftune.bench.result import arguments, finish
from weftune.core.device_class import CLASSES, DeviceClass, get_device_class, pretend_device_class
from weftune.ops.lora.routes import Block, Blocks, Route, add_lora
from weftune.ops.lora.table import LowRank
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import SiteCall, candidate_plans

ADAPTER_SETS = (SiteAdapters("8 x r16", (16,) * 8), SiteAdapters("8 x r128", (128,) * 8))
MAX_RATIO = 2.0
"""Maximum error of a route, as a multiple of the error of plain torch."""
OWN = "own"
"""Name of the class that the GPU has."""


def calls(case: SiteCase, device_class: DeviceClass | None) -> dict[str, SiteCall]:
    """Return a call by every plan that a class would try. None: the class of the GPU."""
    with pretend_device_class(device_class) if device_class is not None else nullcontext():
        plans = candidate_plans(case.weight_NK, case.group, case.weight_NK.device)
        return {str(plan): case.call(plan) for plan in plans}


def results(case: SiteCase, call: SiteCall) -> dict[str, Tensor]:
    """Return y, dx, and the gradients of all adapters."""
    for entry in case.entries:
        entry.da_RK.zero_()
        entry.db_RN.zero_()
    y_TN, s_TPR, u_TN = forward(case.x[0], case.weight_NK, None, None, call)
    dx_TK = backward(case.dy[0], case.x[0], case.weight_NK, s_TPR, call, needs_dx=True, u_TN=u_TN)
    assert dx_TK is not None
    return {"y": y_TN, "dx": dx_TK, **_gradients(case.entries)}


def _gradients(entries: Sequence[LowRank]) -> dict[str, Tensor]:
    """Return the gradients of all adapters as two vectors."""
    return {
        "dA": torch.cat([entry.da_RK.flatten() for entry in entries]),
        "dB": torch.cat([entry.db_RN.flatten() for entry in entries]),
    }


def plain_results(case: SiteCase, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the results of plain autograd in `dtype`, one job after another."""
    entries = [
        LowRank(
            entry.a_RK.to(dtype),
            entry.b_RN.to(dtype),
            torch.zeros_like(entry.a_RK, dtype=dtype),
            torch.zeros_like(entry.b_RN, dtype=dtype),
            scale=entry.scale,
            dropout=entry.dropout,
        )
        for entry in case.entries
    ]
    pairs = zip(case.seats, entries, strict=True)
    jobs = tuple(Block(seat.start, seat.stop, entry, seat.key) for seat, entry in pairs)
    device = case.weight_NK.device
    token_index_T = torch.arange(len(case.x[0]), dtype=torch.int32, device=device)
    anchor = torch.zeros((), device=device, dtype=dtype, requires_grad=True)
    x_TK = case.x[0].detach().to(dtype, copy=True).requires_grad_()
    y_TN = x_TK @ case.weight_NK.to(dtype).T
    y_TN = add_lora(x_TK, y_TN, Blocks(jobs, token_index_T, anchor), Route.reference)
    y_TN.backward(case.dy[0].to(dtype))
    assert x_TK.grad is not None
    return {"y": y_TN.detach(), "dx": x_TK.grad, **_gradients(entries)}


def error_ratios(case: SiteCase, by_call: dict[str, SiteCall]) -> dict[str, float]:
    """Return, for each call, the largest error against float64 over that of plain torch in the same dtype."""
    exact, plain = plain_results(case, torch.float64), plain_results(case, case.weight_NK.dtype)
    least = {name: torch.finfo(case.weight_NK.dtype).eps / 8 * want.norm() for name, want in exact.items()}
    usual = {
        name: (plain[name].double() - want).norm().clamp(min=least[name]) for name, want in exact.items()
    }
    del plain
    found = {}
    for name, call in by_call.items():
        got = results(case, call)
        ratios = [((got[key].double() - want).norm() / usual[key]).item() for key, want in exact.items()]
        found[name] = max(ratios)
    return found


def report(classes: list[DeviceClass], shapes: tuple[tuple[int, int], ...] = SHAPES) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (features, outputs), adapters in ((shape, one) for shape in shapes for one in ADAPTER_SETS):
        gc.collect()
        torch.cuda.empty_cache()
        case = site_case(adapters, features, outputs)
        named = {OWN: calls(case, None)} | {one.architecture: calls(case, one) for one in classes}
        by_call = {f"{name}, {plan}": call for name, own in named.items() for plan, call in own.items()}
        ratios = error_ratios(case, by_call)
        gc.collect()
        torch.cuda.empty_cache()
        steps = {name: partial(case.tiled, call) for name, call in by_call.items()}
        taken = microseconds({"frozen": case.frozen} | steps, case.turns)
        own = min(taken[name] for name in by_call if name.startswith(f"{OWN},"))
        title = f"{features} -> {outputs}, {adapters.name}"
        print(f"\n{title}: frozen {taken['frozen']:.1f} us, own route {own:.1f} us")
        rows = {}
        for name, call in by_call.items():
            rows[name] = {
                "microseconds": taken[name],
                "over own route": taken[name] / own,
                "over frozen": taken[name] / taken["frozen"],
                "error over plain": ratios[name],
                "down": _launch(call, "down"),
            }
            print(
                f"    {name:22} {taken[name]:8.1f} us   {taken[name] / own:5.3f} x own route   "
                f"{taken[name] / taken['frozen']:5.3f} x frozen   error {ratios[name]:4.2f} x plain torch",
                flush=True,
            )
        found[title] = {"frozen": taken["frozen"], "own": own, "routes": rows}
    return found


def _launch(call: SiteCall, kernel: str) -> str:
    launch = getattr(call.tiling, kernel)
    return f"{launch.columns} columns, {launch.warps} warps, {launch.stages} stages"


def main() -> None:
    parser = arguments(__doc__ or "")
    known = {f"{one.capability[0]}.{one.capability[1]}": one for one in CLASSES}
    parser.add_argument(
        "--class", dest="classes", action="append", choices=known, help="default: all classes"
    )
    options = parser.parse_args()
    assert torch.cuda.is_available(), "this benchmark needs a CUDA device"
    print(f"own class: {get_device_class(torch.device('cuda', torch.cuda.current_device())).architecture}")
    found = report([known[name] for name in options.classes or known])
    finish(found, options.json)
    wrong = [
        f"{title}, {name}"
        for title, one in found.items()
        for name, row in one["routes"].items()
        if not row["error over plain"] <= MAX_RATIO
    ]
    if wrong:
        raise SystemExit(f"less exact than {MAX_RATIO} x plain torch: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
