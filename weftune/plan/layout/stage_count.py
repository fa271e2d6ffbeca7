"""The number of stages when the planner may choose: the whole base on each device if it fits, otherwise as
few stages as fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.errors import PlanError
from weftune.plan.cost.memory import MemoryModel, gib
from weftune.plan.layout.cut import PartCosts, cut_layers
from weftune.plan.program.layout import in_stages, one_device

LEAST = JobShape("", 0, 0, trainable=0, longest=1024)
"""Smallest job that must fit beside the base, for passes of 1024 tokens: adapters are small, jobs can
wait."""


@dataclass(frozen=True, slots=True)
class StageCount:
    stages: int
    why: str
    """Reason, as a sentence for the user."""
    shares: int = 1
    """Number of devices that each hold the whole base and train a share of the jobs."""


def choose_stages(
    memory: MemoryModel, devices: int, kind: str, jobs: int = 1, costs: PartCosts | None = None
) -> StageCount:
    """Choose the number of stages. `memory` is the model of one device, `kind` its name for the user, and
    `costs` are those that the run will cut by.

    If the base fits on one device, several devices share the jobs: they exchange nothing and never wait.
    """
    layers = memory.shape.layers
    max_stages = min(devices, layers)
    named = f"the {kind} has" if devices == 1 else f"each of {devices} {kind}s has"
    room = f"{named} {gib(memory.budget)} for a run"
    needs = []
    for stages in range(1, max_stages + 1):
        layout = one_device(layers) if stages == 1 else in_stages(cut_layers(memory.shape, stages, costs))
        needs.append(replace(memory, layout=layout).least_bytes([LEAST]))
        if needs[-1] > memory.budget:
            continue
        if stages == 1:
            shares = min(devices, jobs)
            processes = "one process" if shares == 1 else f"not cut, {shares} shares of the {jobs} jobs"
            why = f"the base and its passes need {gib(needs[0])} and {room}"
            return StageCount(1, f"--pipeline auto: {processes}, since {why}", shares)
        why = f"the base and its passes need {gib(needs[0])}, its largest stage {gib(needs[-1])}, and {room}"
        return StageCount(stages, f"--pipeline auto: {stages} stages, since {why}")
    lacking = f"even in {max_stages} stages the largest needs {gib(needs[-1])}"
    if max_stages == 1:
        lacking = f"the base and its passes need {gib(needs[0])}"
    raise PlanError(
        f"--pipeline auto: {lacking}, and {room}; use more or larger devices, start it on several machines "
        "with torchrun, or choose a smaller base"
    )
