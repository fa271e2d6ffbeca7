"""One site with many adapters, forward + backward (dX, dA, dB), over the frozen linear alone (forward + dX).

python -m benchmarks.gpu_site [--only TEXT] [--breakdown] [--sweep [--kernels a,b] [--seconds N]]
                              [--json FILE]

--breakdown: microseconds of every launch by itself / the least that its bytes need at the rate of a copy, or
its arithmetic at that of the frozen product.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.site_case import SiteAdapters, SiteCase, microseconds, site_case
from benchmarks.site_floor import Rates, Timed, beside_floors, needs
from benchmarks.site_plain import plain_steps
from benchmarks.site_sweep import KERNELS, sweep
from weftune.bench.result import arguments, finish
from weftune.ops.lora.products import fused_dx, fused_y, product_in_float32
from weftune.ops.lora.tiled_kernels import (
    ColumnSpan,
    add_dx,
    add_gradients,
    allocate_da,
    da,
    db,
    down,
    ds_db,
    sum_rows,
    up,
)
from weftune.ops.lora.tiled_kernels import ds as ds_alone
from weftune.ops.lora.tiling import ProductPlan, supported_plans

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
ADAPTER_SETS = (
    SiteAdapters("8 x r16", (16,) * 8),
    SiteAdapters("8 x r16 dropout 0.1", (16,) * 8, dropout=0.1),
    SiteAdapters("r 8 8 16 16 32 32 64 64", (8, 8, 16, 16, 32, 32, 64, 64)),
    SiteAdapters("1 x r16", (16,)),
    SiteAdapters("32 x r16", (16,) * 32),
    SiteAdapters("64 x r16", (16,) * 64),
    SiteAdapters("8 x r16, 2048 rows", (16,) * 8, rows=2048),
)


def compare(case: SiteCase) -> dict[str, float]:
    """Microseconds of the frozen linear, and of each route with adapters."""
    steps: dict[str, Callable[[int], object]] = {"frozen": case.frozen}
    for plan in supported_plans(case.weight_NK, case.group, case.weight_NK.device):
        steps[f"tiled {plan}"] = partial(case.tiled, case.call(plan))
    return microseconds(steps | plain_steps(case), case.turns)


def breakdown(case: SiteCase, rates: Rates) -> dict[str, Timed]:
    """Every launch of the tiled route beside its floor, and what those of an order come to together."""
    measured = microseconds(launches(case), case.turns)
    outputs, features = case.weight_NK.shape
    return beside_floors(measured, needs(case.adapters, features, outputs, case.shares), rates)


def launches(case: SiteCase) -> dict[str, Callable[[int], object]]:
    """Those of the tiled route, and the library's products in 16 bits and in float32.

    `ds, dB` has the sum of the shares of ds in it, which is also measured by itself.
    """
    call, weight_NK = case.call(), case.weight_NK
    x, dy = case.x[0], case.dy[0]
    s = down(x, call)
    ds, partial_db = ds_db(dy, s, call)
    partial_da = allocate_da(x, call)
    da(x, ds, partial_da, call)
    return {
        "y = xWt": lambda turn: case.x[turn] @ weight_NK.T,
        "dx = dyW": lambda turn: case.dy[turn] @ weight_NK,
        "down": lambda turn: down(case.x[turn], call),
        **_wide_steps(case, s, ds),
        "ds, dB": lambda turn: ds_db(case.dy[turn], s, call),
        "ds": lambda turn: ds_alone(case.dy[turn], call),
        "dB": lambda turn: db(case.dy[turn], s, partial_db, call),
        **_sum_step(case, ds),
        "dA": lambda turn: da(case.x[turn], ds, partial_da, call),
        "add gradients": lambda turn: add_gradients(partial_da, partial_db, call),
        **_fused_steps(case, s, ds),
        "copy of x": lambda turn: torch.empty_like(case.x[turn]).copy_(case.x[turn]),
    }


def _sum_step(case: SiteCase, ds: Tensor) -> dict[str, Callable[[int], object]]:
    shares, call = case.shares, case.call()
    if shares == 0:
        return {}
    each = [shares] * call.bands
    partial_ds = ds.new_zeros(sum(each), len(ds), call.ranks, dtype=torch.float32)
    return {"sum of ds": lambda turn: sum_rows(partial_ds, torch.empty_like(ds), each, call)}


def _wide_steps(case: SiteCase, s: Tensor, ds: Tensor) -> dict[str, Callable[[int], object]]:
    """The library's products in float32, whole, and what adds the adapters' part to them."""
    call, weight_NK = case.call(), case.weight_NK
    outputs, features = weight_NK.shape
    y_TN, dx_TK = product_in_float32(case.x[0], weight_NK.T), product_in_float32(case.dy[0], weight_NK)
    columns = call.tiling.up.columns
    of_y, of_dx = (ColumnSpan(0, -(-width // columns), 0, width) for width in (outputs, features))
    return {
        "xWt in float32": lambda turn: product_in_float32(case.x[turn], weight_NK.T),
        "dyW in float32": lambda turn: product_in_float32(case.dy[turn], weight_NK),
        "up": lambda turn: up(s, y_TN, of_y, None, None, torch.empty_like(case.dy[turn]), None, call),
        "add dx": lambda turn: add_dx(ds, dx_TK, of_dx, torch.empty_like(case.x[turn]), call),
    }


def _fused_steps(case: SiteCase, s: Tensor, ds: Tensor) -> dict[str, Callable[[int], object]]:
    """The products that have the adapters in them, and the same with nobody aboard."""
    if ProductPlan.fused not in supported_plans(case.weight_NK, case.group, s.device):
        return {}
    call, nobody, weight_NK = case.call(ProductPlan.fused), case.nobody(), case.weight_NK
    return {
        "y fused": lambda turn: fused_y(case.x[turn], weight_NK, None, None, s, None, call),
        "y fused, nobody": lambda turn: fused_y(case.x[turn], weight_NK, None, None, s, None, nobody),
        "dx fused": lambda turn: fused_dx(case.dy[turn], weight_NK, ds, call),
        "dx fused, nobody": lambda turn: fused_dx(case.dy[turn], weight_NK, ds, nobody),
    }


def rates_of(case: SiteCase) -> Rates:
    taken = microseconds(
        {
            "product": lambda turn: case.x[turn] @ case.weight_NK.T,
            "copy": lambda turn: torch.empty_like(case.x[turn]).copy_(case.x[turn]),
        },
        case.turns,
    )
    x = case.x[0]
    operations = 2 * x.numel() * case.weight_NK.shape[0]
    copied = 2 * x.numel() * x.element_size()
    return Rates(operations / taken["product"], copied / taken["copy"])


def line(name: str, taken: dict[str, float]) -> str:
    frozen = taken["frozen"]
    others = "  ".join(f"{key} {taken[key] / frozen:5.3f}" for key in taken if key != "frozen")
    return f"{name:24} frozen {frozen:7.1f} us   {others}"


def report(sets: list[SiteAdapters], wants_breakdown: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for features, outputs in SHAPES:
        shape = f"{features} -> {outputs}"
        found[shape] = {}
        for adapters in sets:
            gc.collect()
            torch.cuda.empty_cache()
            case = site_case(adapters, features, outputs)
            if adapters is sets[0]:
                rates = rates_of(case)
                by_name = {
                    "tera-operations/s": rates.operations / 1e6,
                    "terabytes/s": rates.bytes / 1e6,
                }
                found[shape]["rates"] = by_name
                print(f"\n{shape}   " + "   ".join(f"{v:.2f} {k}" for k, v in by_name.items()))
            taken = compare(case)
            row: dict[str, Any] = {**taken}
            found[shape][adapters.name] = row
            print(line(adapters.name, taken), flush=True)
            if wants_breakdown:
                parts = breakdown(case, rates)
                row["launches"] = {name: asdict(part) for name, part in parts.items()}
                print(f"    {compact(parts)}", flush=True)
    return found


def compact(parts: dict[str, Timed]) -> str:
    return "   ".join(f"{name} {part.measured:.1f}/{part.floor:.1f}" for name, part in parts.items())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="", help="only sets of adapters whose name has this in it")
    parser.add_argument("--breakdown", action="store_true", help="time every launch by itself")
    parser.add_argument("--sweep", action="store_true", help="try blocks, warps and stages of every kernel")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="what is swept, with commas")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long a sweep may take")
    options = parser.parse_args()
    kernels = options.kernels.split(",")
    if unknown := set(kernels) - set(KERNELS):
        parser.error(f"--kernels: {min(unknown)} is none of {', '.join(KERNELS)}")
    assert torch.cuda.is_available(), "this benchmark needs a CUDA device"
    sets = [adapters for adapters in ADAPTER_SETS if options.only in adapters.name]
    if options.sweep:
        finish(sweep(sets[0], SHAPES, kernels, options.seconds), options.json)
    else:
        finish(report(sets, options.breakdown), options.json)


if __name__ == "__main__":
    main()
