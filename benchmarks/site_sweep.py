"""Which blocks, warps and stages are best for each kernel of the tiled route on the device at hand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.site_case import SiteAdapters, SiteCase, microseconds, site_case
from weftune.ops.lora.products import fused_dx, fused_y
from weftune.ops.lora.tiled_kernels import allocate_da, da, down, ds_db
from weftune.ops.lora.tiling import KernelLaunch, ProductPlan, product_blocks

Step = Callable[[int], object]
Option = tuple[str, Callable[[SiteCase], Step]]


def sweep(
    adapters: SiteAdapters, shapes: tuple[tuple[int, int], ...], kernels: Sequence[str], seconds: float
) -> dict[str, Any]:
    """The times of each option of these kernels by shape; what the time does not allow is left out.

    An option is tried on all shapes in turn: it is compiled but once for them.
    """
    ends = time.monotonic() + seconds
    cases = {f"{k} -> {n}": site_case(adapters, k, n) for k, n in shapes}
    found: dict[str, Any] = {shape: {kernel: {} for kernel in kernels} for shape in cases}
    for index, kernel in enumerate(kernels):
        now = time.monotonic()
        until = now + (ends - now) / (len(kernels) - index)
        for name, step_of in KERNELS[kernel]():
            if time.monotonic() > until:
                print(f"({kernel}: no time for {name} and what follows)")
                break
            for shape, case in cases.items():
                found[shape][kernel] |= _timed(f"{kernel} {name}", name, case, step_of)
        for shape in cases:
            best = sorted(found[shape][kernel].items(), key=lambda item: item[1])[:3]
            print(f"{shape:16} {kernel:6} " + "   ".join(f"{t:.1f} us {n}" for n, t in best), flush=True)
    return {adapters.name: found}


def _timed(what: str, name: str, case: SiteCase, step_of: Callable[[SiteCase], Step]) -> dict[str, float]:
    try:
        return microseconds({name: step_of(case)}, case.turns, replays=8)
    except Exception as error:
        # Blocks that do not fit the device, or that the compiler refuses, are part of the search.
        print(f"({what}: {type(error).__name__})")
        return {}


def _product_options(forward: bool) -> Iterator[Option]:
    for columns, stages, group in ((256, 3, 8), (256, 3, 16), (256, 3, 4), (128, 4, 8)):
        name = f"columns {columns} stages {stages} group {group}"
        yield name, partial(_product_step, forward, columns, stages, group)


def _product_step(forward: bool, columns: int, stages: int, group: int, case: SiteCase) -> Step:
    call = case.call(ProductPlan.fused)
    blocks = product_blocks(columns, case.x[0].dtype, call.tiling.y.programs)
    blocks = replace(blocks, stages=stages, group=group)
    call = replace(call, tiling=replace(call.tiling, y=blocks, dx=blocks))
    s = down(case.x[0], call)
    if forward:
        return lambda turn: fused_y(case.x[turn], case.weight_NK, None, None, s, None, call)
    return lambda turn: fused_dx(case.dy[turn], case.weight_NK, s, call)


def _down_options() -> Iterator[Option]:
    for launch, split in itertools.product(
        (KernelLaunch(128, 4, 4), KernelLaunch(128, 8, 4), KernelLaunch(64, 8, 4)), (2, 4)
    ):
        yield f"{_words(launch)} split {split}", partial(_down_step, launch, split)


def _down_step(launch: KernelLaunch, split: int, case: SiteCase) -> Step:
    call = case.call()
    call = replace(call, tiling=replace(call.tiling, down=launch, down_splits=split))
    return lambda turn: down(case.x[turn], call)


def _ds_db_options() -> Iterator[Option]:
    # For 64 ranks four warps have registers for 128 columns, eight for 256, which halves the shares of ds.
    launches = (
        KernelLaunch(256, 4, 4),
        KernelLaunch(256, 4, 2),
        KernelLaunch(128, 4, 4),
        KernelLaunch(128, 4, 2),
        KernelLaunch(256, 8, 2),
        KernelLaunch(256, 8, 3),
        KernelLaunch(512, 8, 2),
        KernelLaunch(256, 8, 4),
        KernelLaunch(256, 4, 3),
        KernelLaunch(256, 8, 3, rows=128),
    )
    for piece, launch in itertools.product((1024, 512), launches):
        yield f"{_words(launch)} piece {piece}", partial(_ds_db_step, launch, piece)


def _ds_db_step(launch: KernelLaunch, piece: int, case: SiteCase) -> Step:
    call = case.call(piece=piece)
    call = replace(call, tiling=replace(call.tiling, ds_db=launch))
    s = down(case.x[0], call)
    return lambda turn: ds_db(case.dy[turn], s, call)


def _da_options() -> Iterator[Option]:
    launches = (
        KernelLaunch(128, 8, 3),
        KernelLaunch(128, 4, 4),
        KernelLaunch(64, 8, 3),
        KernelLaunch(64, 4, 4),
        KernelLaunch(128, 8, 4),
        KernelLaunch(256, 8, 3),
    )
    for piece, launch in itertools.product((1024, 512), launches):
        yield f"{_words(launch)} piece {piece}", partial(_da_step, launch, piece)


def _da_step(launch: KernelLaunch, piece: int, case: SiteCase) -> Step:
    call = case.call(piece=piece)
    call = replace(call, tiling=replace(call.tiling, da=launch))
    ds, partial_da = down(case.x[0], call), allocate_da(case.x[0], call)
    return lambda turn: da(case.x[turn], ds, partial_da, call)


def _words(launch: KernelLaunch) -> str:
    return f"columns {launch.columns} rows {launch.rows} warps {launch.warps} stages {launch.stages}"


KERNELS: dict[str, Callable[[], Iterator[Option]]] = {
    "y": partial(_product_options, True),
    "dx": partial(_product_options, False),
    "ds_db": _ds_db_options,
    "down": _down_options,
    "dA": _da_options,
}
