"""A trace of every worker's actions over a run, in the format of Chrome's trace viewer and Perfetto."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftune.plan.program.program import (
    Action,
    Backward,
    BackwardHalf,
    Compute,
    Evaluate,
    Forward,
    ForwardHalf,
    HalfPass,
    OfJob,
    Program,
    Recv,
    Reduce,
    Save,
    Score,
    Send,
    Step,
    Transport,
)
from weftune.plan.program.simulate import Event, Lane, Timeline
from weftune.run.workers.agreed import WorkerReport

MAX_ACTIONS = 200_000
"""Maximum number of actions that are kept. In a longer run, the earliest actions are dropped."""


class Trace:
    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_ACTIONS)
        self._workers = 0

    def add(self, program: Program, reports: Sequence[WorkerReport]) -> None:
        """Add the actions of the Program that has just run, as reported by all workers."""
        self._workers = max(self._workers, len(reports))
        for worker, report in enumerate(reports):
            for one in report.times:
                self._events.append(
                    {
                        "name": _event_name(one.action),
                        "cat": type(one.action).__name__,
                        "ph": "X",
                        "pid": 0,
                        "tid": worker,
                        "ts": round(one.start * 1e6),
                        "dur": round((one.stop - one.start) * 1e6),
                        "args": _event_arguments(one.action, program),
                    }
                )

    def write(self, path: Path) -> None:
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": worker, "args": {"name": f"worker {worker}"}}
            for worker in range(self._workers)
        ]
        path.write_text(json.dumps({"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}))


def make_timeline(reports: Sequence[WorkerReport]) -> Timeline:
    """Return the measured timeline of a Program in the same form as the simulator's timelines. A worker is
    busy in its passes and its optimizer steps."""
    passes = [
        Event(worker, Lane.compute, one.action, one.start, one.stop)
        for worker, report in enumerate(reports)
        for one in report.times
        if isinstance(one.action, Compute | HalfPass | Step)
    ]
    begin = min((one.start for one in passes), default=0.0)
    moved = (replace(one, start=one.start - begin, stop=one.stop - begin) for one in passes)
    return Timeline(len(reports), tuple(sorted(moved, key=lambda one: one.stop)), ((),) * len(reports))


def _event_name(action: Action) -> str:
    match action:
        case Forward(number) | Backward(number) | Evaluate(number) | Score(number):
            return f"{type(action).__name__} {number}"
        case ForwardHalf(number, _, index) | BackwardHalf(number, _, index):
            return f"{type(action).__name__} {index} of {number}"
        case Send(number, _, what) | Recv(number, _, what):
            return f"{type(action).__name__} {what} {number}"
        case Reduce(job, step, "gradient" | "scores" | "kl" as what):
            return f"Reduce {what} {job} {step}"
        case Reduce(job, step) | Step(job, step) | Save(job, step):
            return f"{type(action).__name__} {job} {step}"
    return type(action).__name__


def _event_arguments(action: Action, program: Program) -> dict[str, Any]:
    if isinstance(action, Compute | HalfPass | Transport):
        plan = program.microbatches[action.microbatch]
        return {"rows": plan.rows, "jobs": {one.job: one.tokens for one in plan.segments}}
    if isinstance(action, OfJob):
        return {"job": action.job, "step": action.step}
    return {}
