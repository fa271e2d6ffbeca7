"""Device time by kind of work, from the names of the events in torch's profiler.

Triton kernels are known by name, library kernels by a word in their name. The name of a product does not say
what it belongs to: products next to the kernel of the loss are counted for the head, all others as frozen
ones. Where the adapters' part is added within a frozen product (`ProductPlan.fused`), it is counted there.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from weftune.bench.table import aligned, number
from weftune.bench.timing import synchronise

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op",)
"""Trace categories of the events that are counted, on a GPU and on the CPU."""
MOST_NAMES = 24
"""Number of kernels that are named; they are those that took the most time."""


class KernelKind(StrEnum):
    FROZEN = "frozen products"
    ADAPTERS = "adapters' kernels"
    ATTENTION = "attention"
    ELEMENTS = "norms, rotary, activation"
    HEAD = "head and loss"
    OPTIMIZER = "optimizer"
    COPIES = "copies"
    OTHER = "other"
    IDLE = "idle"


KERNELS = {
    **dict.fromkeys(("product", "expert_product"), KernelKind.FROZEN),
    **dict.fromkeys(("write_nf4", "write_rows", "row_codes"), KernelKind.FROZEN),
    **dict.fromkeys(("down_share", "up_shares"), KernelKind.ADAPTERS),
    **dict.fromkeys(("down", "sum_rows", "up", "ds_db", "ds_alone", "da"), KernelKind.ADAPTERS),
    **dict.fromkeys(("add_dx", "add_gradients", "assign_runs"), KernelKind.ADAPTERS),
    **dict.fromkeys(("large_y", "large_dx"), KernelKind.ADAPTERS),
    **dict.fromkeys(("scale", "unscale", "add_shares", "row_lengths"), KernelKind.ADAPTERS),
    **dict.fromkeys(("write_pairs", "add_pair_gradients"), KernelKind.ADAPTERS),
    **dict.fromkeys(
        ("norm_forward", "norm_backward", "rotary_forward", "rotary_backward"), KernelKind.ELEMENTS
    ),
    **dict.fromkeys(("swiglu_forward", "swiglu_backward"), KernelKind.ELEMENTS),
    **dict.fromkeys(("gated_forward", "gated_backward", "summed_choices"), KernelKind.ELEMENTS),
    **dict.fromkeys(("attend_share", "combine_shares"), KernelKind.ATTENTION),
    **dict.fromkeys(("target_logprobs", "sample_row"), KernelKind.HEAD),
    **dict.fromkeys(("squares", "update"), KernelKind.OPTIMIZER),
}
"""Kinds of Weftune's own kernels, by their whole names."""
WORDS = (
    (KernelKind.ATTENTION, ("flash", "fmha", "sdpa", "cudnn", "attention")),
    (KernelKind.FROZEN, ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv")),
    (KernelKind.OPTIMIZER, ("multi_tensor", "adam")),
    (KernelKind.COPIES, ("memcpy", "memset", "copy", "fillfunctor")),
)
"""Kinds of library kernels: the first line with a word that the lower-case name contains applies. Attention
comes first, since its kernels are built from a library of products."""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    name: str
    start: float
    """Start in microseconds, the unit of all times in this module."""
    duration: float


@dataclass(frozen=True, slots=True)
class Heavy:
    """The total time of all events of one name and kind."""

    name: str
    kind: KernelKind
    microseconds: float


@dataclass(frozen=True, slots=True)
class Spent:
    by_kind: dict[KernelKind, float]
    """Kind → microseconds, idle included; the sum is the whole time."""
    heaviest: tuple[Heavy, ...]

    @property
    def microseconds(self) -> float:
        return sum(self.by_kind.values())


def kind_of(name: str) -> KernelKind:
    if name in KERNELS:
        return KERNELS[name]
    small = name.lower()
    return next((kind for kind, words in WORDS if any(word in small for word in words)), KernelKind.OTHER)


def kinds_of(names: Sequence[str]) -> list[KernelKind]:
    """Return the kind of each event, in order.

    Consecutive products, copies aside, are counted for the head if the loss is among them.
    """
    kinds = [kind_of(name) for name in names]
    open_to_the_head = (KernelKind.FROZEN, KernelKind.HEAD, KernelKind.COPIES)
    found: list[KernelKind] = []
    for joins, run in groupby(kinds, lambda kind: kind in open_to_the_head):
        stretch = list(run)
        heads = joins and KernelKind.HEAD in stretch
        found += [KernelKind.HEAD if heads and kind is KernelKind.FROZEN else kind for kind in stretch]
    return found


def spent(events: Iterable[KernelEvent]) -> Spent:
    """Divide the time from the first event's start to the last one's end by kind.

    Where events overlap, the earlier one counts.
    """
    ordered = sorted(events, key=lambda event: (event.start, -event.duration))
    by_kind = dict.fromkeys(KernelKind, 0.0)
    names: Counter[tuple[str, KernelKind]] = Counter()
    reached = ordered[0].start if ordered else 0.0
    for event, kind in zip(ordered, kinds_of([event.name for event in ordered]), strict=True):
        end = event.start + event.duration
        by_kind[KernelKind.IDLE] += max(0.0, event.start - reached)
        alone = max(0.0, end - max(event.start, reached))
        by_kind[kind] += alone
        names[event.name, kind] += alone  # type: ignore[assignment]
        reached = max(reached, end)
    heaviest = (Heavy(name, kind, time) for (name, kind), time in names.most_common(MOST_NAMES))
    return Spent(by_kind, tuple(heaviest))


def traced(run: Callable[[], object], device: torch.device) -> list[KernelEvent]:
    """Return the events of the second of two runs; the first one warms up the profiler.

    On a GPU these are kernels and copies, including those of a replayed graph; otherwise torch operations.
    """
    on_device = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda made: made.export_chrome_trace(str(file)),
        ) as profiler:
            for _ in range(2):
                run()
                synchronise(device)
                profiler.step()
        said = json.loads(file.read_text())["traceEvents"]
    counted = ON_DEVICE if on_device else ON_HOST
    return [KernelEvent(one["name"], one["ts"], one["dur"]) for one in said if one.get("cat") in counted]


def drawn(found: Spent) -> str:
    """Format one line per kind, and the heaviest names among the kernels of kind `OTHER`."""
    whole = found.microseconds or 1.0
    lines = [
        (str(kind), number(time, scale=1e-3), number(time / whole, ".1f", 100.0), "")
        for kind, time in (*found.by_kind.items(), ("together", found.microseconds))
    ]
    others = [
        f"{one.microseconds / 1e3:.1f} ms {one.name[:90]}"
        for one in found.heaviest
        if one.kind is KernelKind.OTHER
    ]
    return "\n".join([aligned(("", "ms", "%", ""), lines), *(f"  other: {line}" for line in others[:3])])
