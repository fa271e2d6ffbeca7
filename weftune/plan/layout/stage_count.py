"""The number of stages when the planner may choose: the whole base on each device if it fits, otherwise as
few stages as fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.memory import MemoryModel, gib
from weftune.plan.layout.cut import PartCosts, cut_layers
from weftune.plan.program.layout import in_stages, one_device

LEAST = JobShape("", 0, 0, trainable=0, longest=1024)
"""Smallest job that must fit beside the base, for passes of 1024 tokens: adapters are small, jobs can
wait."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of this machine, all alike. The processes of a CPU share one."""

    kind: str
    """Name of such a device in messages to the user."""
    count: int
    budget: int
    """Bytes available to a run on each device."""
    taken: int = 0
    """Bytes held by a process before anything is loaded."""
    fused: bool = False

    def shared_by(self, replicas: int) -> Devices:
        """Return the devices of one of `replicas` replicas: its part of them, or of the one that all
        share."""
        if self.count >= replicas:
            return replace(self, count=self.count // replicas)
        return replace(self, count=1, budget=self.budget * self.count // replicas)

    @property
    def named(self) -> str:
        return f"the {self.kind} has" if self.count == 1 else f"each of {self.count} {self.kind}s has"


@dataclass(frozen=True, slots=True)
class StageCount:
    stages: int
    why: str
    """Reason, as a sentence for the user."""
    shares: int = 1
    """Number of devices that each hold the whole base and train a share of the jobs."""


def choose_stages(
    shape: ModelShape, devices: Devices, spare: int, jobs: int = 1, costs: PartCosts | None = None
) -> StageCount:
    """Choose the number of stages. `spare` microbatches are in flight beyond what 1F1B has; each keeps its
    activations. `costs` are those that the run will cut by.

    If the base fits on one device, several devices share the jobs: they exchange nothing and never wait.
    """
    most = min(devices.count, shape.layers)
    room = f"{devices.named} {gib(devices.budget)} for a run"
    for stages in range(1, most + 1):
        need = _need(shape, devices, stages, spare, costs)
        if need > devices.budget:
            continue
        if stages == 1:
            shares = min(devices.count, jobs)
            way = "one process" if shares == 1 else f"not cut, {shares} shares of the {jobs} jobs"
            why = f"the base and its passes need {gib(need)} and {room}"
            return StageCount(1, f"--pipeline auto: {way}, since {why}", shares)
        whole = gib(_need(shape, devices, 1, spare, costs))
        why = f"the base and its passes need {whole}, its largest stage {gib(need)}, and {room}"
        return StageCount(stages, f"--pipeline auto: {stages} stages, since {why}")
    least = _need(shape, devices, most, spare, costs)
    raise PlanError(f"--pipeline auto: {_too_large(least, most)}, and {room}; {ADVICE}")


ADVICE = "use more or larger devices, start it on several machines with torchrun, or choose a smaller base"


def _too_large(need: int, most: int) -> str:
    if most == 1:
        return f"the base and its passes need {gib(need)}"
    return f"even in {most} stages the largest needs {gib(need)}"


def _need(shape: ModelShape, devices: Devices, stages: int, spare: int, costs: PartCosts | None) -> int:
    """Return the bytes on the fullest device."""
    layout = one_device(shape.layers) if stages == 1 else in_stages(cut_layers(shape, stages, costs))
    memory = MemoryModel(shape, devices.budget, devices.taken, devices.fused, layout=layout, spare=spare)
    return memory.least_bytes([LEAST])
