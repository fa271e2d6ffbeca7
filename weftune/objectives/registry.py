"""Construction of objectives from their specs."""

from __future__ import annotations

from importlib import import_module

from weftune.objectives.objective import Objective
from weftune.objectives.spec import ObjectiveSpec


def make_objective(spec: ObjectiveSpec) -> Objective:
    module, _, name = spec.implementation.partition(":")
    objective: Objective = getattr(import_module(module), name)(spec)
    return objective
