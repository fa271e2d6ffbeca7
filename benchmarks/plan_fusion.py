"""What fusing jobs, filling buckets, overlapping and chunking are worth on the planner's own numbers.

The stages are a base of 8 billion parameters in bf16, cut evenly, on devices of 400 TFLOP/s and 48 GiB that
need 2 ms to launch a pass over all of it. Jobs have 64 to 8192 tokens a microbatch, drawn evenly on a log
scale. The gap is to the best of all set partitions, whichever group goes first; what is gained is over every
job apart, and over groups filled in sorted order as far as memory goes.

    python -m benchmarks.plan_fusion [--instances N] [--json FILE]
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from functools import reduce
from math import gcd
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any

import weftune
from benchmarks.studies.fusion import (
    Fusion,
    GroupLoad,
    PipelineCost,
    Stage,
    StagePass,
    arrange_buckets,
    end_to_end,
    fuse,
    make_bucket,
    make_buckets,
    one_adapter,
    predict_seconds,
)
from benchmarks.studies.shards import Graph, Operator, OperatorKind, overlap
from weftune.bench.result import arguments, finish
from weftune.plan.cost.time import Line
from weftune.plan.pack.instance import pack

LENGTHS = Path(weftune.__file__).parent / "bench" / "lengths.json"
PARAMETERS, LAYERS, HIDDEN = 8e9, 32, 4096
FLOPS = 4e14
GIB = 1 << 30
SMALLEST_CHUNK = 64
"""Rows of the smallest chunk with which padding is counted, as in MuxTune."""


def pipeline(stages: int, communication: float = 0.0, budget: int = 48 * GIB) -> PipelineCost:
    """The base in even stages; `communication` is a pass's collectives as a share of its compute."""
    per_token = 2 * PARAMETERS / FLOPS / stages
    launch = 2e-3 / stages
    per_square = 2 * HIDDEN * LAYERS / FLOPS / stages
    bare = Line(communication * launch, communication * per_token)
    stage = Stage(
        forward=StagePass(Line(launch, per_token), per_square, bare),
        backward=StagePass(Line(launch, per_token), 2.5 * per_square, bare),
        resident_bytes=int(2 * PARAMETERS / stages),
        activation_bytes=17 * HIDDEN * 2 * LAYERS // stages,
        gradient_bytes=4 * HIDDEN * 2,
        budget=budget,
    )
    return PipelineCost((stage,) * stages, microbatches=2 * stages)


def jobs(count: int, stages: int, draw: random.Random) -> list[GroupLoad]:
    made = []
    for number in range(count):
        tokens = int(2 ** draw.uniform(6, 13))
        adapter = 20e-6 * LAYERS / stages + tokens * draw.choice([1, 2, 4, 8]) * 5e-7 / stages
        share = draw.uniform(0.1, 0.6)
        squares = tokens * min(tokens, int(2 ** draw.uniform(6, 10)))
        adapters = (one_adapter(adapter, 2 * adapter, share),) * stages
        made.append(GroupLoad((f"job{number}",), tokens, squares, adapters))
    return made


def best_of_all_partitions(loads: Sequence[GroupLoad], pipe: PipelineCost) -> float:
    """The least time over every set partition that fits, and every choice of the group that goes first."""
    whole = (1 << len(loads)) - 1
    first, added = [math.inf] * (whole + 1), [math.inf] * (whole + 1)
    for mask in range(1, whole + 1):
        group = reduce(add, (load for place, load in enumerate(loads) if mask >> place & 1))
        if pipe.shortage(group) is None:
            first[mask], added[mask] = pipe.first_seconds(group), pipe.added_seconds(group)
    rest = [0.0] + [math.inf] * whole
    for mask in range(1, whole + 1):
        lowest = mask & -mask
        part = mask
        while part:
            if part & lowest:
                rest[mask] = min(rest[mask], added[part] + rest[mask ^ part])
            part = (part - 1) & mask
    return min(first[mask] + rest[whole ^ mask] for mask in range(1, whole + 1))


def fill(loads: Sequence[GroupLoad], pipe: PipelineCost) -> list[GroupLoad]:
    """What one would do without a model: the next job joins while memory lets it."""
    groups: list[GroupLoad] = []
    for load in sorted(loads, key=lambda one: one.tokens):
        if groups and pipe.shortage(groups[-1] + load) is None:
            groups[-1] += load
        else:
            groups.append(load)
    return groups


def gaps(instances: int) -> list[dict[str, Any]]:
    rows = []
    print("jobs  stages   equal   mean gap   worst gap   over apart   over filled")
    for count, stages in [(5, 2), (5, 4), (7, 2), (7, 4), (9, 2), (9, 4)]:
        draw = random.Random(count * 100 + stages)
        gap: list[float] = []
        apart, filled = [], []
        for _ in range(instances):
            pipe, loads = pipeline(stages), jobs(count, stages, draw)
            found = fuse(loads, pipe)
            gap.append(found.seconds / best_of_all_partitions(loads, pipe) - 1)
            apart.append(predict_seconds(sorted(loads, key=lambda one: one.tokens), pipe) / found.seconds)
            filled.append(predict_seconds(fill(loads, pipe), pipe) / found.seconds)
        equal = sum(one < 1e-9 for one in gap) / len(gap)
        print(
            f"{count:4} {stages:7} {equal:8.0%} {fmean(gap):9.2%} {max(gap):11.2%}"
            f" {fmean(apart):10.2f} × {fmean(filled):10.3f} ×"
        )
        rows.append(
            {"jobs": count, "stages": stages, "equal": equal, "mean": fmean(gap), "worst": max(gap)}
            | {"over_apart": fmean(apart), "over_filled": fmean(filled)}
        )
    return rows


def many(count: int, stages: int) -> tuple[Fusion, float]:
    loads, pipe = jobs(count, stages, random.Random(1)), pipeline(stages, budget=80 * GIB)
    began = time.perf_counter()
    found = fuse(loads, pipe)
    return found, time.perf_counter() - began


def buckets() -> list[dict[str, Any]]:
    """Sixteen jobs in groups and buckets, for collectives of growing length."""
    print("\ncollectives   fused: groups, buckets, seconds   arranged: groups, buckets, seconds   apart")
    rows = []
    for share in (0.0, 0.1, 0.2, 0.4):
        pipe, loads = pipeline(4, share), jobs(16, 4, random.Random(2))
        fusion = fuse(loads, pipe)
        fused = make_buckets([group.load for group in fusion.groups], pipe)
        found = arrange_buckets(fusion, pipe)
        apart = all_apart(loads, pipe)
        groups = sum(len(one.groups) for one in found.buckets)
        print(
            f"{share:11.0%} {len(fusion.groups):14} {len(fused.buckets):8} {fused.seconds:9.3f}"
            f" {groups:17} {len(found.buckets):8} {found.seconds:9.3f} {apart:7.3f}"
        )
        rows.append({"share": share, "fused": fused.seconds, "arranged": found.seconds, "apart": apart})
    return rows


def all_apart(loads: Sequence[GroupLoad], pipe: PipelineCost) -> float:
    """Every job a group, and every group a bucket: nothing batched and nothing hidden."""
    made = sorted((make_bucket([load], pipe) for load in loads), key=lambda one: -one.paces[0])
    return end_to_end(made, pipe.microbatches)


def layers(count: int, reduce_seconds: float) -> Graph:
    """Layers under tensor parallelism, of compute 1: two collectives each, an adapter beside every linear."""
    made: list[Operator] = []
    before: tuple[str, ...] = ()
    for index in range(count):
        for part, linears in (("attention", ("qkv", "mix", "out")), ("mlp", ("up", "down"))):
            name = f"{part}{index}"
            for linear in linears:
                here = f"{name}.{linear}"
                made.append(Operator(here, OperatorKind.compute, 0.18, before))
                if linear == "mix":
                    before = (here,)
                    continue
                made.append(Operator(f"{here}.adapter", OperatorKind.adapter, 0.02, before))
                made.append(Operator(f"{here}.sum", OperatorKind.compute, 0.005, (here, f"{here}.adapter")))
                before = (f"{here}.sum",)
            made.append(Operator(f"{name}.reduce", OperatorKind.communication, reduce_seconds / 2, before))
            before = (f"{name}.reduce",)
    return tuple(made)


def overlaps() -> list[dict[str, Any]]:
    print("\ngroups   collectives   one by one   algorithm 1   by start   busier lane")
    rows = []
    for groups in (1, 2, 4):
        for share in (0.2, 0.5, 1.0):
            found = overlap([layers(8, share)] * groups)
            best = found.by_start
            lanes = [
                sum(span.stop - span.start for span in lane) for lane in (best.compute, best.communication)
            ]
            row = {"groups": groups, "share": share, "busier": max(lanes)}
            row |= {"one_by_one": found.sequential.seconds, "by_depth": found.by_depth.seconds}
            rows.append(row | {"by_start": best.seconds})
            print(
                f"{groups:6} {share:13.0%} {found.sequential.seconds:12.1f} {found.by_depth.seconds:13.1f}"
                f" {best.seconds:10.1f} {max(lanes):13.1f}"
            )
    return rows


def chunks() -> dict[str, float]:
    """Padded rows as a share of tokens when four jobs' batches of 32 samples are aligned with one another."""
    batches = [lengths[:32] for lengths in json.loads(LENGTHS.read_text()).values()]
    tokens = sum(map(sum, batches))
    longest = max(map(max, batches))
    padded = {"to the longest of all": sum(longest * len(batch) for batch in batches) / tokens - 1}
    common = gcd(*(length for batch in batches for length in batch))
    size = max(SMALLEST_CHUNK, common & -common)
    packs = [
        sum(batch[index] for index in held) for batch in batches for held in pack(batch, max(longest, 1024))
    ]
    for chunk in (size, 2 * size, 4 * size, 8 * size):
        padded[f"chunks of {chunk}"] = sum(-rows % chunk for rows in packs) / tokens
    print("\nrows of padding over tokens")
    for way, share in padded.items():
        print(f"{way:24} {share:6.1%}")
    return padded


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--instances", type=int, default=50, help="random instances for each row of the gap")
    asked = parser.parse_args()
    gap = gaps(asked.instances)
    print()
    times = {}
    for count in (32, 64, 128):
        found, times[count] = many(count, 8)
        print(f"{count} jobs on 8 stages: {len(found.groups)} groups in {times[count]:.2f} s")
    for group in found.groups[:4]:
        print(f"  {len(group.jobs)} jobs of {group.load.tokens} tokens: {group.reason}")
    numbers = {"gap": gap, "seconds": times, "buckets": buckets(), "overlap": overlaps(), "padding": chunks()}
    finish(numbers, asked.json)


if __name__ == "__main__":
    main()
