"""Which blocks, warps and stages are best for the kernels of the LoRA op at large ranks, on the GPU at hand.

    python -m benchmarks.band_sweep [--ranks 128x8] [--band N] [--kernels a,b] [--groups a,b] [--json FILE]

The four groups of sites of the 8B shape, 1024 rows for each job. Every kernel is timed with the launch that
training takes (marked *) and with some others; caches are overwritten before each launch. `large y` and
`large dx` are what a fused product finds written of slots with more than 64 ranks; `y` and `dx` have them in
their times. At the end: milliseconds of 32 layers, as training has them and with the best that was tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu_step import ranks_of
from weftune.bench.result import arguments, finish
from weftune.ops.lora import table as slot_table
from weftune.ops.lora import tiling
from weftune.ops.lora.choice import PlanTrial
from weftune.ops.lora.choice_trial import HEAD_START, TrialSite, synthetic_site
from weftune.ops.lora.products import fused_dx, fused_y
from weftune.ops.lora.table import required_bands
from weftune.ops.lora.tiled_kernels import (
    allocate_da,
    allocate_db,
    da,
    db,
    down,
    ds,
    ds_db,
    large_dx,
    large_y,
)
from weftune.ops.lora.tiling import KernelLaunch, ProductPlan, SiteCall, choose_tiling, rank_block

LAYERS = 32
ROWS = 1024
ROUNDS = 7
GROUPS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launcher, the field of the tiling that it is launched by, and what to put there."""

    field: str
    step: Callable[[TrialSite, SiteCall], Step]
    launches: tuple[KernelLaunch, ...]


def of_down(site: TrialSite, call: SiteCall) -> Step:
    return lambda: down(site.x_TK, call)


def of_ds(site: TrialSite, call: SiteCall) -> Step:
    return lambda: ds(site.dy_TN, call)


def of_ds_db(site: TrialSite, call: SiteCall) -> Step:
    call = replace(call, tiling=replace(call.tiling, reads_dy_once=True))
    s_TPR = down(site.x_TK, call)
    return lambda: ds_db(site.dy_TN, s_TPR, call)


def of_db(site: TrialSite, call: SiteCall) -> Step:
    s_TPR, partial = down(site.x_TK, call), allocate_db(site.dy_TN, call)
    return lambda: db(site.dy_TN, s_TPR, partial, call)


def of_da(site: TrialSite, call: SiteCall) -> Step:
    ds_TPR, partial = ds(site.dy_TN, call), allocate_da(site.x_TK, call)
    return lambda: da(site.x_TK, ds_TPR, partial, call)


def of_large_y(site: TrialSite, call: SiteCall) -> Step:
    s_TPR, y_TN = down(site.x_TK, call), torch.empty_like(site.dy_TN)
    return lambda: large_y(s_TPR, y_TN, call)


def of_large_dx(site: TrialSite, call: SiteCall) -> Step:
    ds_TPR, dx_TK = ds(site.dy_TN, call), torch.empty_like(site.x_TK)
    return lambda: large_dx(ds_TPR, dx_TK, call)


def of_y(site: TrialSite, call: SiteCall) -> Step:
    s_TPR = down(site.x_TK, call)
    return lambda: fused_y(site.x_TK, site.weight_NK, None, None, s_TPR, None, call)


def of_dx(site: TrialSite, call: SiteCall) -> Step:
    ds_TPR = ds(site.dy_TN, call)
    return lambda: fused_dx(site.dy_TN, site.weight_NK, ds_TPR, call)


def launches(*tried: tuple[int, ...]) -> tuple[KernelLaunch, ...]:
    """Of (columns, warps, stages) and, where they matter, rows and parts together."""
    return tuple(KernelLaunch(*one) for one in tried)


READING = launches(
    (64, 4, 4), (128, 4, 3), (128, 4, 4), (64, 4, 6), (64, 8, 4), (128, 8, 3), (64, 8, 3, 64, 2),
    (128, 8, 2, 64, 2), (64, 4, 4, 64, 2), (64, 8, 3, 64, 3), (64, 4, 3, 64, 3),
)  # fmt: skip
SUMMING = launches(
    (128, 8, 3), (128, 8, 4), (128, 4, 3), (256, 8, 3), (64, 4, 4), (64, 8, 4), (128, 8, 3, 128),
)  # fmt: skip
SUMMING_TOGETHER = launches((64, 8, 3, 64, 2), (128, 8, 3, 64, 2), (64, 8, 3, 64, 3), (128, 8, 2, 64, 3))
ADDING = launches(
    (64, 8, 3), (64, 8, 2), (128, 8, 2), (128, 8, 3), (128, 8, 1), (64, 4, 2), (32, 8, 3), (64, 8, 1),
)  # fmt: skip
KERNELS = {
    "down": Kernel("down", of_down, READING),
    "ds": Kernel("ds", of_ds, tuple(one for one in READING if one.parts_per_program == 1)),
    "db": Kernel(
        "db",
        of_db,
        launches(
            (128, 8, 3), (128, 8, 4), (128, 4, 3), (256, 8, 3), (64, 4, 4), (128, 8, 3, 128), (64, 8, 4)
        ),
    ),
    "ds_db": Kernel("ds_db", of_ds_db, launches((64, 8, 2), (128, 8, 2), (128, 8, 3), (128, 4, 3))),
    "da": Kernel("da", of_da, SUMMING + SUMMING_TOGETHER),
    "large y": Kernel("large_y", of_large_y, ADDING),
    "large dx": Kernel("large_dx", of_large_dx, ADDING),
    "y": Kernel("large_y", of_y, ()),
    "dx": Kernel("large_dx", of_dx, ()),
}


def site_of(
    features: int,
    widths: tuple[int, ...],
    ranks: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> TrialSite:
    """Jobs of these ranks at a group; smaller ones have the first ranks of the largest's."""
    trial = PlanTrial(
        plans=(ProductPlan.fused,),
        dtype=dtype,
        features=features,
        widths=widths,
        rows=ROWS * len(ranks),
        ranks=rank_block(max(ranks)),
        bands=required_bands(max(ranks)),
        slots=len(ranks),
        has_dropout=False,
        has_residual=False,
        is_transposed=False,
        is_aligned=True,
    )
    site = synthetic_site(trial, device)
    for slot, (rank, seated) in enumerate(zip(ranks, site.adapters, strict=True)):
        cut = ("a_RK", "b_RN", "da_RK", "db_RN")
        site.group.write(
            slot, [replace(one, **{name: getattr(one, name)[:rank] for name in cut}) for one in seated]
        )
    return site


def call_of(site: TrialSite, field: str, launch: KernelLaunch | None) -> SiteCall:
    chosen = choose_tiling(site.rows, site.group, site.x_TK.shape[1], site.x_TK.dtype)
    chosen = chosen if launch is None else replace(chosen, **{field: launch})
    return SiteCall(site.group, site.rows, True, chosen, ProductPlan.fused)


def steps_of(kernel: Kernel, site: TrialSite) -> Iterator[tuple[str, Callable[[], Step]]]:
    """(words, what prepares the step) of the launch that training takes, and of the others."""
    taken = call_of(site, kernel.field, None)
    own: KernelLaunch = getattr(taken.tiling, kernel.field)
    yield f"*{words(own)}", lambda: kernel.step(site, taken)
    for launch in kernel.launches:
        if launch != own and taken.sites % launch.parts_per_program == 0:
            call = call_of(site, kernel.field, launch)
            yield words(launch), lambda call=call: kernel.step(site, call)


def words(launch: KernelLaunch) -> str:
    rows = f" rows {launch.rows}" if launch.rows != 64 else ""
    together = f" together {launch.parts_per_program}" if launch.parts_per_program > 1 else ""
    return f"({launch.columns}, {launch.warps}, {launch.stages}){rows}{together}"


def prepared(options: Mapping[str, Callable[[], Step]]) -> dict[str, Step]:
    """Every step once, side by side, since each is compiled then; those that do not fit are left out."""

    def ready(make: Callable[[], Step]) -> Step | None:
        with suppress(Exception), torch.no_grad():
            step = make()
            step()
            return step
        return None

    with ThreadPoolExecutor(16) as threads:
        made = zip(options, threads.map(ready, options.values()), strict=True)
    torch.cuda.synchronize()
    return {name: step for name, step in made if step is not None}


def microseconds(steps: Mapping[str, Step], scratch: torch.Tensor) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        marks = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in steps}
        torch.cuda._sleep(HEAD_START)
        for name, step in steps.items():
            scratch.zero_()
            marks[name][0].record()
            step()
            marks[name][1].record()
        torch.cuda.synchronize()
        for name, (began, ended) in marks.items():
            taken[name].append(1000 * began.elapsed_time(ended))
    return {name: statistics.median(times) for name, times in taken.items()}


@torch.no_grad()
def sweep(ranks: tuple[int, ...], kernels: list[str], groups: list[str]) -> dict[str, Any]:
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    sites = {name: site_of(*GROUPS[name], ranks, scratch.device) for name in groups}
    options = {
        (kernel, group, option): make
        for kernel in kernels
        for group in groups
        for option, make in steps_of(KERNELS[kernel], sites[group])
    }
    ready = prepared(options)  # type: ignore[arg-type]
    found: dict[str, Any] = {kernel: {group: {} for group in groups} for kernel in kernels}
    for kernel in kernels:
        for group in groups:
            steps = {key[2]: step for key, step in ready.items() if key[:2] == (kernel, group)}
            found[kernel][group] = times = microseconds(steps, scratch)
            shown = sorted(times.items(), key=lambda item: item[1])[:4]
            own = next((f"{name} {time:.1f}" for name, time in times.items() if name[0] == "*"), "-")
            print(
                f"{kernel:8} {group:8} {own:34} | " + "   ".join(f"{t:.1f} {n}" for n, t in shown), flush=True
            )
    return found


def whole(found: dict[str, Any]) -> str:
    lines = []
    for kernel, groups in found.items():
        own = sum(time for times in groups.values() for name, time in times.items() if name[0] == "*")
        best = sum(min(times.values(), default=0.0) for times in groups.values())
        lines.append(f"{kernel:8} {own * LAYERS / 1000:7.2f} ms   best {best * LAYERS / 1000:7.2f} ms")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=ranks_of, default=ranks_of("128x8"), help="one of each job")
    parser.add_argument("--band", type=int, default=slot_table.BAND, help="ranks of a band: 64 or 128")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="some of them, with commas")
    parser.add_argument("--groups", default=",".join(GROUPS), help="some of them, with commas")
    options = parser.parse_args()
    kernels, groups = options.kernels.split(","), options.groups.split(",")
    if unknown := (set(kernels) - set(KERNELS)) | (set(groups) - set(GROUPS)):
        parser.error(f"{min(unknown)} is none of {', '.join((*KERNELS, *GROUPS))}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device that torch can use")
    slot_table.BAND = tiling.BAND = options.band
    found = sweep(options.ranks, kernels, groups)
    print(f"\nranks {options.ranks}, bands of {options.band}, {LAYERS} layers:\n{whole(found)}")
    finish({"ranks": options.ranks, "band": options.band, "microseconds": found}, options.json)


if __name__ == "__main__":
    main()
