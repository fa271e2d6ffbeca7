"""Correction factors of the memory model, fitted to the measured memory peaks of a run's windows (a few
global batches of every job each).

Non-negative least squares finds factors for adapter state, activations and slack (temporaries and rounding);
the factors known before the run count like a measurement. The factor for the logits stays as profiled. The
error of the fit is the largest number of bytes by which a recent peak exceeds its prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import UNFITTED, MemoryFit, MemoryModel, MemoryNeed
from weftune.plan.cost.nnls import solve_nnls
from weftune.plan.program.program import Backward, Evaluate, Forward, ForwardOnly, Program, Score

NOISE = 0.01
"""Relative error of one measured memory peak."""
DOUBT = (0.1, 0.5, 1.0)
"""Prior relative standard deviations of the memory correction factors for adapter state, activations and
slack."""
FLOOR = 0.1
"""Minimum of a fitted correction factor, relative to the factor known before the run. This minimum keeps
factors above zero."""
MAX_PEAKS = 100


@dataclass(frozen=True, slots=True)
class Peak:
    """The predicted memory of a window (a few global batches of every job), before correction factors are
    applied, and the measured peak."""

    predicted_need: MemoryNeed
    measured_bytes: int


def window_need(memory: MemoryModel, jobs: Sequence[JobShape], program: Program) -> MemoryNeed:
    """Return the predicted memory of a window (a few global batches of every job), computed from its largest
    microbatch or, in a pipeline, from the microbatches that are in flight at the same time. These
    microbatches may be smaller than the capacity allows."""
    if memory.layout.is_pipeline:
        rows = rows_in_flight(memory, program, memory.key_value_fractions(jobs, program.recompute))
        return memory.need_for_rows(jobs, rows, program.recompute, scored_rows(program))
    tokens = 0.0
    for action, microbatch in program.forward_passes():
        # A pass without a backward keeps nothing: it holds the activations of about one layer.
        share = 1 / memory.pass_layers if isinstance(action, ForwardOnly) else 1.0
        tokens = max(tokens, share * microbatch.rows)
    return memory.predict_need(jobs, tokens, program.recompute, scored_rows(program))


def scored_rows(program: Program) -> int:
    """Return the largest number of rows of a microbatch that go through the head (the output layer)."""
    return max(
        (
            sum(placed.supervised_tokens for segment in microbatch.segments for placed in segment.samples)
            for microbatch in program.microbatches
        ),
        default=0,
    )


def rows_in_flight(
    memory: MemoryModel, program: Program, key_value_fractions: Sequence[float]
) -> list[float]:
    """Return, for each worker of a replica, the largest number of rows that wait for their backward at a
    time.

    If a sample is cut into chunks, the keys and values of the whole sample are held from the forward of its
    first chunk until the backward of its first chunk, and their gradients from the backward of its last chunk
    on. These bytes are counted as rows with equally many activation bytes: `key_value_fractions` contains,
    for each worker, the fraction of a row's activation bytes that its keys and values take.
    """
    most = [0.0] * len(program.devices)
    for device, actions in enumerate(program.devices):
        share = key_value_fractions[device % program.devices_per_replica]
        held_rows = sum(
            _rows_of_forward(program, number, share)
            for number, one in enumerate(program.inherited)
            if one.replica == program.replica(device)
            and one.is_in_flight(device % program.devices_per_replica, len(program.stages))
        )
        most[device] = held_rows
        for action in actions:
            match action:
                case Forward(number):
                    held_rows += _rows_of_forward(program, number, share)
                    most[device] = max(most[device], held_rows)
                case Backward(number):
                    held_rows += _gradient_rows(program, number, memory.gradient_byte_ratio * share)
                    held_rows -= _rows_of_forward(program, number, share)
                    most[device] = max(most[device], held_rows)
                    if (chunk := program.microbatches[number].chunk) is not None and chunk.chunk_start == 0:
                        held_rows -= _sample_rows(program, number) * memory.gradient_byte_ratio * share
                case Evaluate(microbatch) | Score(microbatch):
                    passing = program.microbatches[microbatch].rows / memory.pass_layers
                    most[device] = max(most[device], held_rows + passing)
    return [
        max(most[device] for device in program.same_stage_devices(worker))
        for worker in range(program.devices_per_replica)
    ]


def _rows_of_forward(program: Program, number: int, key_value_fraction: float) -> float:
    """Return the rows that a forward adds to those that wait for their backward. The first chunk of a sample
    adds the keys and values of the whole sample, and the other chunks add none."""
    plan = program.microbatches[number]
    if (chunk := plan.chunk) is None:
        return plan.rows
    keys = _sample_rows(program, number) if chunk.chunk_start == 0 else 0
    return plan.rows + key_value_fraction * (keys - chunk.length)


def _gradient_rows(program: Program, number: int, gradient_fraction: float) -> float:
    """Return the size of the gradients of a sample's keys and values, as the number of rows with equally many
    activation bytes. The backward of the sample's last chunk allocates these gradients; for any other
    microbatch, return 0."""
    chunk, rows = program.microbatches[number].chunk, _sample_rows(program, number)
    is_last = chunk is not None and (chunk.chunk_start or 0) + chunk.length == rows
    return gradient_fraction * rows if is_last else 0.0


def _sample_rows(program: Program, number: int) -> int:
    """Return the number of rows of the sample of which the microbatch is a chunk, or 0 if it is not a
    chunk."""
    sample = program.whole_sample(program.microbatches[number])
    return 0 if sample is None else sample.length


def fit_memory(peaks: Sequence[Peak], initial_fit: MemoryFit = UNFITTED) -> MemoryFit:
    if not peaks:
        return initial_fit
    peaks = peaks[-MAX_PEAKS:]
    parts = np.array(
        [
            (
                one.predicted_need.state_bytes,
                one.predicted_need.activation_bytes,
                one.predicted_need.slack_bytes,
            )
            for one in peaks
        ],
        dtype=float,
    )
    measured = np.array([one.measured_bytes for one in peaks], dtype=float)
    rest = measured - [
        one.predicted_need.resident_bytes + initial_fit.head * one.predicted_need.logit_bytes for one in peaks
    ]
    noise, doubt = NOISE * measured, np.array(DOUBT)
    matrix = np.vstack([parts / noise[:, None] * doubt, np.eye(len(doubt))])
    start = np.array([initial_fit.state, initial_fit.activations, initial_fit.slack])
    floor = FLOOR * start
    above = np.concatenate([(rest - parts @ floor) / noise, (start - floor) / doubt])
    found = floor + doubt * solve_nnls(matrix, above)
    missed = rest - parts @ found
    return MemoryFit(
        state=float(found[0]),
        activations=float(found[1]),
        slack=float(found[2]),
        head=initial_fit.head,
        error=max(initial_fit.error, int(missed.max())),
    )


def larger_factors(first: MemoryFit, second: MemoryFit) -> MemoryFit:
    """Return the element-wise maximum of the correction factors of two fits."""
    return MemoryFit(**{name: max(getattr(first, name), value) for name, value in asdict(second).items()})
