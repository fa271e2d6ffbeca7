"""The time model, refitted to the measurements of a run, starting from the model known before it.

The fit first finds the level: how much slower or faster everything is than the known model. Then it fits the
terms by non-negative least squares of relative errors, in which the known terms count like measurements: a
few passes do not change them much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weftune.plan.cost.nnls import Array, non_negative
from weftune.plan.cost.time import CostModel, PassTime, PassWork, Rate, StateTime, Terms, counts, terms_of

REMEMBERED = 400
"""Number of passes, and of Steps and of Saves, that the model is fitted to."""
HALF_LIFE = 60
"""Number of later passes after which a measurement counts half, since a machine's pace changes."""
NOISE = 0.1
"""Relative error of one measurement."""
DOUBT = 0.25
"""Expected deviation of a term from the known one, relative to it."""
GUESSED = 10.0
"""Expected relative deviation of a term if nothing was known."""
FAINT = 0.02
"""Share of a pass to which a term that was not known at all may grow, approximately."""
CAUTION = 2.0
"""Number of measurements after which the measured level is trusted half."""
REFITTED = ", refitted to this run"
OUTLIER = 3.0
"""Multiple of the typical error above which errors count less."""


@dataclass(slots=True)
class Times:
    """Recent measurements of a run."""

    passes: list[PassTime] = field(default_factory=list)
    steps: list[StateTime] = field(default_factory=list)
    saves: list[StateTime] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Seconds per action of each window outside its passes, Steps and Saves."""

    def forget(self) -> None:
        """Drop measurements that are too old to be fitted to."""
        for kept in (self.passes, self.steps, self.saves, self.between):
            del kept[:-REMEMBERED]


def refit(known: CostModel, times: Times) -> CostModel:
    """Return `known` fitted to the measurements, or `known` itself without any."""
    passes = [one for one in times.passes if one.settled]
    training = [one for one in passes if one.training]
    evaluations = [one for one in passes if not one.training]
    if not passes:
        return known
    caution = CAUTION if known.measured else 0.0
    level = _level(known, training or evaluations, caution)
    start = known.times(level)
    return replace(
        start,
        forward=fit_terms(start.forward, [(p.work, p.forward) for p in training]),
        backward=fit_terms(start.backward, [(p.work, p.backward) for p in training]),
        evaluation=fit_terms(start.evaluation, [(p.work, p.forward) for p in evaluations]),
        step=fit_rate(known.step, times.steps),
        save=fit_rate(known.save, times.saves),
        between=float(np.median(times.between[-20:])) if times.between else known.between,
        source=known.source if known.source.endswith(REFITTED) else known.source + REFITTED,
        measured=True,
    )


def _level(known: CostModel, passes: Sequence[PassTime], caution: float) -> float:
    """Return how much longer passes take than the known model predicts; close to 1 for few passes."""
    expected = [known.pass_seconds(p.work) if p.training else known.evaluation(p.work) for p in passes]
    logs = np.log([max(p.seconds, 1e-9) / at for p, at in zip(passes, expected, strict=True)])
    weights = _recent(len(passes))
    order = np.argsort(logs)
    middle = int(np.searchsorted(weights[order].cumsum(), weights.sum() / 2))
    trust = len(passes) / (len(passes) + caution)
    return float(np.exp(trust * logs[order][middle]))


def fit_terms(known: Terms, measured: Sequence[tuple[PassWork, float]]) -> Terms:
    if not measured:
        return known
    units = np.array([counts(work) for work, _ in measured], dtype=float)
    seconds = np.maximum([one for _, one in measured], 1e-9)
    return terms_of(fit_values(np.array(known.values()), units, seconds, _recent(len(seconds))))


def fit_rate(known: Rate, measured: Sequence[StateTime]) -> Rate:
    if not measured:
        return known
    units = np.array([(one.jobs, one.parameters) for one in measured], dtype=float)
    seconds = np.maximum([one.seconds for one in measured], 1e-9)
    start, doubt = np.array([known.job, known.parameter]), DOUBT
    if not start.any():
        # Nothing was known: attributing half to jobs and half to parameters is only a starting point.
        start, doubt = np.median(seconds[:, None] / np.maximum(units, 1.0), axis=0) / 2, GUESSED
    job, parameter = fit_values(start, units, seconds, _recent(len(seconds)), doubt)
    return Rate(job=job, parameter=parameter)


def fit_values(
    known: Array, units: Array, seconds: Array, weights: Array, doubt: float = DOUBT
) -> list[float]:
    """Return values for the columns of `units` whose sums approximate `seconds` and that stay close to the
    known ones.

    Errors are relative, and outliers count less. `weights` are those of the measurements.
    """
    typical = np.maximum(np.median(units, axis=0), 1.0)
    doubts = np.maximum(doubt * known, FAINT * np.median(seconds) / typical)
    rows, wanted = units / seconds[:, None] / NOISE, np.full(len(seconds), 1.0 / NOISE)
    trust, found = np.sqrt(weights), known
    for _ in range(3):
        # Solve in units of the doubts, so that terms of very different sizes have equal weight.
        matrix = np.vstack([trust[:, None] * rows * doubts, np.eye(len(known))])
        found = doubts * non_negative(matrix, np.concatenate([trust * wanted, known / doubts]))
        errors = np.abs(rows @ found - wanted)
        bound = OUTLIER * max(float(np.median(errors)), 0.2)
        trust = np.sqrt(weights * np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return [float(value) for value in found]


def _recent(count: int) -> Array:
    """Return weights of measurements, the newest last."""
    ages = np.arange(count - 1, -1, -1)
    return np.asarray(0.5 ** (ages / HALF_LIFE))
