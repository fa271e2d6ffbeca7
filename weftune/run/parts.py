"""Protocols of the parts of an executor. Each has several implementations, and the executor never checks
which it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weftune.core.batch import Microbatch, Segment
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
    What,
)
from weftune.run.events import Event
from weftune.run.measure.timers import DeviceSpan
from weftune.run.measure.waited import Waited
from weftune.run.passes.plain import MadeBackward, MadeForward
from weftune.run.passes.rows import RowsHere, StageVisit
from weftune.run.training.evaluation import EvaluationSums
from weftune.run.training.state import Training
from weftune.run.training.steps import Due, Outcome, StepsUnderway, Sums

Fetch = Callable[[MicrobatchPlan, bool], Microbatch]
"""A function that lays out planned samples as tensors: of the training rows, or (True) of the held-out
rows."""


class Weights(Protocol):
    """The base's weights: resident on the device, or streamed stage by stage."""

    waited: Waited

    def settle(self) -> None: ...

    def load(self, stage: int) -> None: ...

    def evict(self, stage: int) -> None: ...

    def use(self, stage: int) -> bool: ...


class Activations(Protocol):
    """Inputs of stages, kept or offloaded until their backward, and tensors that go to other workers."""

    @property
    def empty(self) -> bool: ...

    def reserve(self, rows: int) -> None: ...

    def give(self, to: StageVisit, given_TD: Tensor, returns: bool = True) -> None: ...

    def read(self, by: StageVisit) -> Tensor: ...

    def passed(self, by: StageVisit) -> None: ...

    def bring(self, to: StageVisit) -> None: ...

    def drop(self, by: StageVisit) -> None: ...

    def give_gradient(self, to: StageVisit, dh_TD: Tensor) -> None: ...

    def take_gradient(self, by: StageVisit) -> Tensor: ...

    def take_outgoing(self, to: StageVisit, what: What) -> Tensor | None: ...

    def forget(self) -> None: ...


class Passes(Protocol):
    """Passes of a microbatch through a stage: kernel by kernel, or by replaying a captured graph."""

    @property
    def captures(self) -> int | None: ...

    @property
    def refused(self) -> int: ...

    def begin_window(self, program: Program) -> None: ...

    def begin_round(self) -> None: ...

    def forward(
        self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None, keep: bool
    ) -> MadeForward: ...

    def backward(
        self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None, dh_TD: Tensor
    ) -> MadeBackward: ...

    def evaluate(self, visit: StageVisit, rows: RowsHere, given_TD: Tensor | None) -> Tensor: ...

    def abandon(self) -> None: ...


class AdapterState(Protocol):
    """Adapters with their master weights and moments: on the device, or in host memory."""

    @property
    def home(self) -> torch.device: ...

    def attach(self, training: Training) -> None: ...

    def detach(self, job: str) -> Training: ...

    def kill(self, job: str) -> None: ...

    def abandon(self) -> None: ...

    def show(self, job: str, weights: Tensor) -> None: ...

    def use(self, stage: int, jobs: Collection[str], returning: bool) -> bool: ...

    def ask_ahead(self, stage: int, jobs: Collection[str]) -> None: ...

    def note_backward(self, stage: int, jobs: Collection[str]) -> None: ...

    def leave(self, stage: int) -> None: ...

    @property
    def needs_previous_outcome(self) -> bool: ...

    def needs_outcome_before(self, stage: int) -> bool: ...

    def step(self, due: Sequence[Due]) -> StepsUnderway: ...

    def sums(self, training: Training) -> Sums: ...

    def make(self, due: Due, sums: Sums) -> Outcome: ...


@dataclass(slots=True)
class TimedPass:
    """The time that a microbatch spent in the stages of this worker, without the time between its visits. It
    holds no tensors, since the device may not have finished it yet."""

    plan: MicrobatchPlan
    training: bool
    settled: bool = True
    """Whether it ran without compiling or capturing anything."""
    forward: list[DeviceSpan] = field(default_factory=list)
    backward: list[DeviceSpan] = field(default_factory=list)

    def add(self, action: Action, span: DeviceSpan) -> None:
        (self.backward if isinstance(action, Backward) else self.forward).append(span)


class Agreement(Protocol):
    """The decisions about what is computed, which Steps are made and which events are reported, by this
    worker alone or together with others."""

    @property
    def shortage(self) -> str:
        """Reason why this worker computes nothing more in this window; empty while it does."""

    def begin_window(self, program: Program) -> None: ...

    def alive(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """Return the part of a microbatch that is computed."""

    def receive(self, action: Recv) -> Tensor: ...

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        """Send a tensor to another worker; zeros if it was never computed, since the plan fixes what is
        sent."""

    def ran(self, action: Action, span: DeviceSpan, passed: TimedPass | None) -> Iterator[Event]:
        """Report that an action ran here; with it a microbatch may have finished its visits to the stages
        here."""

    def evaluate(self, stage: int, plan: MicrobatchPlan) -> Iterator[Event]:
        """Handle a microbatch of held-out samples that arrives at a stage."""

    def evaluated(self, segments: Sequence[Segment], sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        """Handle a microbatch of held-out samples that has passed the last stage."""

    def reduce(self, action: Reduce) -> None: ...

    def step(self, steps: Sequence[Step]) -> Iterator[Event]: ...

    def save(self, job: str, step: int) -> Iterator[Event]: ...

    def settle(self) -> Iterator[Event]:
        """Wait for the requested Steps, and report them."""

    def fall_short(self, why: str) -> None:
        """Handle a pass that did not fit into memory; everything unfinished here has been dropped."""

    def ends_early(self) -> bool:
        """Compute nothing more, since a stop cannot wait for the window's end. Return True if the window ends
        here, False if other workers still wait for tensors from here."""

    def end_window(self, waited: Waited) -> None:
        """End a window. `waited` is the time that the device has waited for weights since it began."""


def delivered(program: Program, microbatches: Mapping[int, Microbatch]) -> Fetch:
    """Return a `Fetch` over microbatches that another worker has laid out, by their numbers in the
    Program."""
    evaluated = {
        action.microbatch for actions in program.devices for action in actions if isinstance(action, Evaluate)
    }
    by_plan = {
        (program.microbatches[number], number in evaluated): laid for number, laid in microbatches.items()
    }
    return lambda plan, evaluates: by_plan[plan, evaluates]
