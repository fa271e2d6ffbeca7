"""The memory model, refitted to the peaks of a run's windows by non-negative least squares.

The fit determines factors of the model's parts (adapter state, activations, slack); the factors known before
the run count like a measurement. The factor of the head stays as profiled. The stated error is how far the
recent peaks exceed the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import UNFITTED, MemoryFit, MemoryModel, Need
from weftune.plan.cost.nnls import non_negative
from weftune.plan.program.program import Backward, Evaluate, Forward, Program

NOISE = 0.01
"""Relative error of one measured peak."""
DOUBT = (0.1, 0.5, 1.0)
"""Expected deviation of the factors of state, activations and slack from the known ones: slack is a guess."""
FLOOR = 0.1
"""Share of a known factor that remains whatever is measured: a part that appears to be free never is."""
REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class Peak:
    """A window's need as the model counts it, with the measured peak."""

    need: Need
    measured: int


def window_need(memory: MemoryModel, jobs: Sequence[JobShape], program: Program) -> Need:
    """Return the need of a window with its largest microbatch, which may be far below its capacity, or, in a
    pipeline, with all microbatches that are in flight at a time."""
    if memory.layout.pipelined:
        return memory.holding(jobs, held_rows(memory, program), program.recompute, scored_rows(program))
    tokens = 0.0
    for action, microbatch in program.compute():
        # An evaluation keeps nothing for a backward: it holds the activations of about one layer.
        share = 1 / memory.pass_layers if isinstance(action, Evaluate) else 1.0
        tokens = max(tokens, share * microbatch.rows)
    return memory.need(jobs, tokens, program.recompute, scored_rows(program))


def scored_rows(program: Program) -> int:
    """Return the most rows of any microbatch that go through the head."""
    return max(
        (
            sum(placed.supervised for segment in microbatch.segments for placed in segment.samples)
            for microbatch in program.microbatches
        ),
        default=0,
    )


def held_rows(memory: MemoryModel, program: Program) -> list[float]:
    """Return, for each worker of a replica, the most rows between their Forward and Backward at a time."""
    most = [0.0] * len(program.devices)
    for device, actions in enumerate(program.devices):
        held = 0
        for action in actions:
            match action:
                case Forward(microbatch):
                    held += program.microbatches[microbatch].rows
                    most[device] = max(most[device], held)
                case Backward(microbatch):
                    held -= program.microbatches[microbatch].rows
                case Evaluate(microbatch):
                    passing = program.microbatches[microbatch].rows / memory.pass_layers
                    most[device] = max(most[device], held + passing)
    return [max(most[device] for device in program.group(worker)) for worker in range(program.width)]


def fit_memory(peaks: Sequence[Peak], known: MemoryFit = UNFITTED) -> MemoryFit:
    if not peaks:
        return known
    peaks = peaks[-REMEMBERED:]
    parts = np.array([(one.need.state, one.need.activations, one.need.slack) for one in peaks], dtype=float)
    measured = np.array([one.measured for one in peaks], dtype=float)
    rest = measured - [one.need.resident + known.head * one.need.head for one in peaks]
    noise, doubt = NOISE * measured, np.array(DOUBT)
    matrix = np.vstack([parts / noise[:, None] * doubt, np.eye(len(doubt))])
    start = np.array([known.state, known.activations, known.slack])
    floor = FLOOR * start
    above = np.concatenate([(rest - parts @ floor) / noise, (start - floor) / doubt])
    found = floor + doubt * non_negative(matrix, above)
    missed = rest - parts @ found
    return MemoryFit(
        state=float(found[0]),
        activations=float(found[1]),
        slack=float(found[2]),
        head=known.head,
        error=max(known.error, int(missed.max())),
    )


def safer(first: MemoryFit, second: MemoryFit) -> MemoryFit:
    """Return the larger of the two fits, factor by factor."""
    return MemoryFit(**{name: max(getattr(first, name), value) for name, value in asdict(second).items()})
