"""Fit of the time model to the measurements of a run, starting from the model known before the run.

First, the level is fitted: one factor by which all passes are slower or faster than predicted. Then
non-negative least squares of relative errors finds the terms (the costs per token, per sample, per segment).
The terms known before the run count like measurements, so that a few passes do not change them much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weftune.plan.cost.nnls import Array, solve_nnls
from weftune.plan.cost.time import (
    CostModel,
    PassTime,
    PassWork,
    Rate,
    StateTime,
    Terms,
    make_terms,
    term_counts,
)

MAX_MEASUREMENTS = 400
"""Maximum number of measurements of each kind (passes, optimizer steps, saves) that the time model is fitted
to: the latest ones."""
HALF_LIFE = 60
"""Number of later measurements after which the weight of a measurement in the fit has halved. Weights
decrease because the speed of a machine changes."""
NOISE = 0.1
"""Relative error of one time measurement."""
DOUBT = 0.25
"""Relative standard deviation of a fitted coefficient of the time model around the value known before the
run."""
GUESSED = 10.0
"""Relative standard deviation of a fitted coefficient of the time model for which no value was known before
the run."""
FAINT = 0.02
"""Approximate maximum fraction of a pass's time for which a fitted term of the time model can account if the
term was 0 before the run."""
CAUTION = 2.0
"""Number of measured passes with which the measured level (the overall ratio of measured to predicted time)
has half of its full weight."""
REFITTED = ", refitted to this run"
OUTLIER = 3.0
"""Errors above this multiple of the typical error count less in the fit."""


@dataclass(slots=True)
class Times:
    """Recent time measurements of a run."""

    passes: list[PassTime] = field(default_factory=list)
    steps: list[StateTime] = field(default_factory=list)
    saves: list[StateTime] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    """For each window (a few global batches of every job), the seconds per action that were spent outside
    passes, optimizer steps and saves."""

    def drop_old_measurements(self) -> None:
        """Drop all measurements of each kind but the latest ones, to which the time model is fitted."""
        for kept in (self.passes, self.steps, self.saves, self.overheads):
            del kept[:-MAX_MEASUREMENTS]


def refit_cost_model(initial_cost: CostModel, times: Times) -> CostModel:
    """Return the time model `initial_cost` fitted to the measurements, or unchanged if there are none."""
    passes = [one for one in times.passes if one.settled]
    training = [one for one in passes if one.training]
    evaluations = [one for one in passes if not one.training]
    if not passes:
        return initial_cost
    caution = CAUTION if initial_cost.is_measured else 0.0
    level = _speed_ratio(initial_cost, training or evaluations, caution)
    start = initial_cost.multiply_by(level)
    return replace(
        start,
        forward=fit_terms(start.forward, [(p.work, p.forward) for p in training]),
        backward=fit_terms(start.backward, [(p.work, p.backward) for p in training]),
        evaluation=fit_terms(start.evaluation, [(p.work, p.forward) for p in evaluations]),
        step=fit_rate(initial_cost.step, times.steps),
        save=fit_rate(initial_cost.save, times.saves),
        overhead_per_action=float(np.median(times.overheads[-20:]))
        if times.overheads
        else initial_cost.overhead_per_action,
        source=initial_cost.source
        if initial_cost.source.endswith(REFITTED)
        else initial_cost.source + REFITTED,
        is_measured=True,
    )


def _speed_ratio(initial_cost: CostModel, passes: Sequence[PassTime], prior_weight: float) -> float:
    """Return the weighted median of the ratios of measured to predicted times, shrunk towards 1 if there are
    few measurements."""
    expected = [
        initial_cost.pass_seconds(p.work) if p.training else initial_cost.evaluation(p.work) for p in passes
    ]
    logs = np.log([max(p.seconds, 1e-9) / at for p, at in zip(passes, expected, strict=True)])
    weights = _age_weights(len(passes))
    order = np.argsort(logs)
    middle = int(np.searchsorted(weights[order].cumsum(), weights.sum() / 2))
    trust = len(passes) / (len(passes) + prior_weight)
    return float(np.exp(trust * logs[order][middle]))


def fit_terms(initial_terms: Terms, measurements: Sequence[tuple[PassWork, float]]) -> Terms:
    if not measurements:
        return initial_terms
    units = np.array([term_counts(work) for work, _ in measurements], dtype=float)
    seconds = np.maximum([one for _, one in measurements], 1e-9)
    return make_terms(
        fit_values(np.array(initial_terms.values()), units, seconds, _age_weights(len(seconds)))
    )


def fit_rate(initial_rate: Rate, measurements: Sequence[StateTime]) -> Rate:
    if not measurements:
        return initial_rate
    units = np.array([(one.jobs, one.parameters) for one in measurements], dtype=float)
    seconds = np.maximum([one.seconds for one in measurements], 1e-9)
    start, prior_weight = np.array([initial_rate.job, initial_rate.parameter]), DOUBT
    if not start.any():
        # Nothing was known: attributing half to jobs and half to parameters is only a starting point.
        start, prior_weight = np.median(seconds[:, None] / np.maximum(units, 1.0), axis=0) / 2, GUESSED
    job, parameter = fit_values(start, units, seconds, _age_weights(len(seconds)), prior_weight)
    return Rate(job=job, parameter=parameter)


def fit_values(
    initial_values: Array, units: Array, seconds: Array, weights: Array, prior_weight: float = DOUBT
) -> list[float]:
    """Return x ≥ 0 close to `initial_values` such that `units` @ x approximates `seconds`.

    Errors are relative, and outliers count less. `weights` contains the weight of each measurement, and
    `prior_weight` is the relative standard deviation of x around `initial_values`.
    """
    typical = np.maximum(np.median(units, axis=0), 1.0)
    doubts = np.maximum(prior_weight * initial_values, FAINT * np.median(seconds) / typical)
    rows, wanted = units / seconds[:, None] / NOISE, np.full(len(seconds), 1.0 / NOISE)
    trust, found = np.sqrt(weights), initial_values
    for _ in range(3):
        # Solve in units of the doubts, so that terms of very different sizes have equal weight.
        matrix = np.vstack([trust[:, None] * rows * doubts, np.eye(len(initial_values))])
        found = doubts * solve_nnls(matrix, np.concatenate([trust * wanted, initial_values / doubts]))
        errors = np.abs(rows @ found - wanted)
        bound = OUTLIER * max(float(np.median(errors)), 0.2)
        trust = np.sqrt(weights * np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return [float(value) for value in found]


def _age_weights(count: int) -> Array:
    """Return the weights of `count` measurements, the oldest first. Older measurements have less weight."""
    ages = np.arange(count - 1, -1, -1)
    return np.asarray(0.5 ** (ages / HALF_LIFE))
