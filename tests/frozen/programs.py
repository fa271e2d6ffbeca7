"""Windows that are drawn by seeds, and what was planned for them, as text that outlives a rebuilt planner.

`python -m tests.frozen.programs` records them anew in programs.json; whatever differs then is listed in
docs/design.md with its reason.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

from tests.plan.program.test_check import course
from weftune.core.shapes import LayerRange
from weftune.plan.cost.time import Line
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout, pipeline_layout
from weftune.plan.program.program import Action, MicrobatchPlan, Program, Recompute
from weftune.plan.window.pace import StagePace
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing, plan_window

FILE = Path(__file__).parent / "programs.json"
SEEDS = range(8)
PACES = StagePace(Line(0.0, 1.0), Line(0.0, 2.0), step_seconds=3.0), StagePace(Line(2.0, 1.5), Line(1.0, 2.5))
Plan = Callable[[], Program]


def courses(seed: int) -> list[JobWindow]:
    """Two to five jobs with up to four batches each; some begin, evaluate and save on the way."""
    rng = random.Random(seed)

    def lengths(most: int) -> list[int]:
        return [rng.randint(1, 40) for _ in range(rng.randint(1, most))]

    found = []
    for number in range(rng.randint(2, 5)):
        step = rng.choice((0, 0, 3, 7))
        batches = [lengths(8) for _ in range(rng.randint(1, 4))]
        looks = {step + rng.randint(1, 4)} | ({0} if rng.random() < 0.3 else set())
        evaluation = lengths(6) if rng.random() < 0.6 else []
        saves = {step + rng.randint(0, 3)}
        found.append(course(f"job{number}", batches, step, evaluation, looks, saves, begins=step == 0))
    return found


def stages(seed: int, fewest: int = 1) -> tuple[StageLayers, ...]:
    """Stages of one to three layers, some of which stay on their device."""
    rng = random.Random(1000 + seed)
    ends = accumulate((rng.randint(1, 3) for _ in range(rng.randint(fewest, 6))), initial=0)
    return tuple(StageLayers(start, stop, rng.random() < 0.3) for start, stop in pairwise(ends))


def plans() -> Iterator[tuple[str, Plan]]:
    """The four ways of running, for every seed."""
    for seed in SEEDS:
        yield from _on_one_device(seed)
        yield from _streamed(seed)
        yield from _pipelined(seed)
        yield from _streamed_by_workers(seed)


def _on_one_device(seed: int) -> Iterator[tuple[str, Plan]]:
    made = courses(seed)
    recompute = Recompute(seed % 2 == 0, seed % 3)
    yield f"one device {seed}", lambda: plan_window(made, one_device_layout(), 48)
    yield (
        f"one device {seed} on a ladder",
        lambda: plan_window(made, one_device_layout(), 256, True, recompute),
    )
    yield f"one device {seed}, job1 dead", lambda: plan_window(made, one_device_layout(), 48).without("job1")


def _streamed(seed: int) -> Iterator[tuple[str, Plan]]:
    made, cut = courses(seed), stages(seed)
    for slots in (1, 2):
        kept = Layout(cut, (slots,))
        yield f"streamed {seed}, {slots} slots", lambda kept=kept: plan_window(made, kept, 48)
    away = Layout(cut, (2,), adapters_travel=True, offloaded_rows=64)
    yield f"streamed {seed}, offloaded", lambda: plan_window(made, away, 48, pads_to_ladder=True)
    yield f"streamed {seed}, job0 dead", lambda: plan_window(made, away, 48).without("job0")


def _pipelined(seed: int) -> Iterator[tuple[str, Plan]]:
    made, count = courses(seed), 2 + seed % 3
    paces = tuple(PACES[(seed + stage) % 2] for stage in range(count))
    layers = [LayerRange(stage, stage + 1, count) for stage in range(count)]
    alone, shared = pipeline_layout(layers), pipeline_layout(layers, replicas=2)
    for order in (None, *PipelineOrder):
        pacing = Pacing(paces, order, spare_microbatches=seed % 2)
        yield (
            f"pipeline {seed} of {count}, {order}",
            lambda pacing=pacing: plan_window(made, alone, 64, pacing=pacing),
        )
    replicated = partial(plan_window, made, shared, 64, pacing=Pacing(paces))
    yield f"pipeline {seed} of {count}, replicas", replicated
    yield f"pipeline {seed} of {count}, job1 dead", lambda: replicated().without("job1")


def _streamed_by_workers(seed: int) -> Iterator[tuple[str, Plan]]:
    made, cut = courses(seed), stages(seed, fewest=3)
    for slots in ((1, 1), (2, 1), (1, 1, 1)):
        ranks = Layout(cut, slots)
        yield f"streamed {seed} by {len(slots)}, {slots}", lambda ranks=ranks: plan_window(made, ranks, 48)


def digest(program: Program) -> dict[str, object]:
    """What a program is, short enough to be kept: its sizes, and hashes that say which part has changed."""
    recomputed = program.recompute.recomputes_outputs, program.recompute.recomputed_layers
    return {
        "microbatches": _hash(map(_microbatch, program.microbatches)),
        "batches": _hash(f"{one.job} {one.step} {one.supervised_tokens}" for one in program.batches),
        "devices": [f"{len(actions)} {_hash(map(_action, actions))}" for actions in program.devices],
        "rest": str(
            (program.capacity, program.stages, recomputed, int(program.has_chunks), program.replicas)
        ),
    }


def _microbatch(plan: MicrobatchPlan) -> str:
    held = (f"{one.job} {one.step} {[placed.sample for placed in one.samples]}" for one in plan.segments)
    return f"{plan.padded_rows}: {'; '.join(held)}"


def _action(action: Action) -> str:
    return " ".join(map(str, (type(action).__name__, *astuple(action))))


def _hash(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: digest(plan()) for name, plan in plans()}, indent=1) + "\n")
