"""Conversion of a profile (the measurements of a device) into the time model of a base and memory factors.

One fit over all measured passes separates the time outside the layers from the time per layer. The time of
adapters is not multiplied by the number of layers, since the parameter count of an adapter covers all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftune.core.shapes import ModelShape
from weftune.plan.cost.memory import MemoryFit, MemoryModel
from weftune.plan.cost.memory_fit import FLOOR
from weftune.plan.cost.nnls import solve_nnls
from weftune.plan.cost.prior import DirectionTerms, KindTerms, flop_terms
from weftune.plan.cost.profile import LayeredPass, Profile
from weftune.plan.cost.refit import fit_rate, fit_values
from weftune.plan.cost.time import TERMS, CostModel, PassTime, Rate, Terms, term_counts

OUTSIDE = ("fixed", "token", "supervised", "adapter")
INSIDE = ("fixed", "token", "square", "sample", "segment")


DOUBT = 1.0
"""Relative standard deviation of a fitted coefficient of the time model around its initial value, which
follows from the shape of the base."""


def pass_terms(profile: Profile, shape: ModelShape) -> DirectionTerms:
    start = flop_terms(shape)
    training = [one for one in profile.passes if one.time.training]
    evaluations = [one for one in profile.passes if not one.time.training]
    return DirectionTerms(
        forward=fit_kinds(start.forward, training, lambda time: time.forward),
        backward=fit_kinds(start.backward, training, lambda time: time.backward),
        evaluation=fit_kinds(start.evaluation, evaluations, lambda time: time.forward),
    )


def fit_kinds(
    initial_terms: KindTerms, passes: Sequence[LayeredPass], seconds: Callable[[PassTime], float]
) -> KindTerms:
    if not passes:
        # The base's context is too short for any pass that a profile measures.
        return initial_terms
    units = np.array([term_counts(one.time.work) for one in passes], dtype=float)
    layers = np.array([one.layers for one in passes], dtype=float)
    outside = units[:, [TERMS.index(name) for name in OUTSIDE]]
    inside = units[:, [TERMS.index(name) for name in INSIDE]] * layers[:, None]
    matrix = np.hstack([outside, inside])
    taken = np.maximum([seconds(one.time) for one in passes], 1e-9)
    free = initial_terms.embedding.add(initial_terms.head).add(initial_terms.adapter)
    start = np.array(
        [getattr(free, name) for name in OUTSIDE] + [getattr(initial_terms.layer, name) for name in INSIDE]
    )
    start *= np.median(taken / (matrix @ start))
    found = fit_values(start, matrix, taken, np.ones(len(taken)), DOUBT)
    fixed, token, supervised, adapter = found[: len(OUTSIDE)]
    return KindTerms(
        embedding=Terms(fixed=fixed, token=token),
        layer=Terms(**dict(zip(INSIDE, found[len(OUTSIDE) :], strict=True))),
        head=Terms(supervised=supervised),
        adapter=Terms(adapter=adapter),
    )


def profile_cost_model(profile: Profile, shape: ModelShape) -> CostModel:
    """Return the time model of the whole base that follows from a profile."""
    return pass_terms(profile, shape).base_cost(shape.layers, profile_source(profile), step_rate(profile))


def step_rate(profile: Profile) -> Rate:
    return fit_rate(Rate(), profile.steps)


def profile_source(profile: Profile) -> str:
    key = profile.key
    device = f"{key.device}, {key.threads} threads" if key.threads else key.device
    return f"from the profile of this {device} with torch {key.torch}"


def fit_profile_memory(profile: Profile, memory: MemoryModel) -> MemoryFit:
    """Return correction factors of the memory model for activations, logits and slack, fitted to the memory
    peaks of the training passes in a profile."""
    passes = [one for one in profile.passes if one.time.training and one.peak_bytes]
    if not passes:
        return memory.fit
    per_layer = memory.bytes_per_token() / memory.shape.layers
    most_slack = memory.predict_need((), 0).slack_bytes
    predicted_bytes = np.array(
        [_predicted_bytes(one, per_layer, memory, most_slack) for one in passes], dtype=float
    )
    peaks = np.array([one.peak_bytes for one in passes], dtype=float)
    # If an allocator reserved memory ahead, no peak changes, and tokens would appear to take nothing.
    floor = FLOOR * np.array([memory.fit.activations, memory.fit.head, memory.fit.slack])
    found = floor + solve_nnls(predicted_bytes / peaks[:, None], (peaks - predicted_bytes @ floor) / peaks)
    missed = peaks - predicted_bytes @ found
    activations, head, slack = (float(factor) for factor in found)
    error = int(max(0.0, missed.max()))
    return MemoryFit(activations=activations, head=head, slack=slack, error=error)


def _predicted_bytes(
    measured_pass: LayeredPass, per_layer: float, memory: MemoryModel, slack_bytes: int
) -> tuple[float, int, int]:
    """Return the bytes of activations, of logits and of slack that the memory model predicts for a measured
    pass. `per_layer` is the activation bytes per token and layer."""
    work = measured_pass.time.work
    return measured_pass.layers * work.tokens * per_layer, memory.logit_bytes(work.supervised), slack_bytes
