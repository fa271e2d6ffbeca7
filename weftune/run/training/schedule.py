"""Learning-rate schedules, which give the same values as the schedules of transformers. Optimizer steps are
counted from 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weftune.objectives.spec import SFT_SPEC, ObjectiveSpec

Schedule = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The optimizer settings and the objective of one job."""

    steps: int
    learning_rate: float = 2e-4
    schedule: Schedule = "linear"
    warmup: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = 1.0
    seed: int = 0
    averaged_spans: tuple[tuple[int, int], ...] = ()
    """Spans of steps, each as (first step, last step). For each span, the mean of the master weights over its
    steps is computed."""
    objective: ObjectiveSpec = SFT_SPEC


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step. It rises linearly from 0 during warm-up, then decays to 0 linearly
    or along a cosine, or stays constant, as `recipe.schedule` says."""
    past = step - 1
    if past < recipe.warmup:
        return recipe.learning_rate * past / max(1, recipe.warmup)
    progress = (past - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    match recipe.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = max(0.0, 1.0 - progress)
        case "cosine":
            share = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return recipe.learning_rate * share
