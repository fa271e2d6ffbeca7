"""What an executor is composed of. There are several classes of each part; the executor asks none which."""

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
from weftune.run.measure.timers import Span
from weftune.run.measure.waited import Waited
from weftune.run.passes.plain import MadeBackward, MadeForward
from weftune.run.passes.rows import RowsHere, Visitor
from weftune.run.training.evaluation import EvaluationSums
from weftune.run.training.state import Training
from weftune.run.training.steps import Due, Outcome, Sums, Underway

Fetch = Callable[[MicrobatchPlan, bool], Microbatch]
"""Lays out the planned samples, of the training or (True) of the held-out rows, as tensors."""


class Weights(Protocol):
    """Where the base's weights are: they stay, or stages come and go."""

    waited: Waited

    def settle(self) -> None: ...

    def load(self, stage: int) -> None: ...

    def evict(self, stage: int) -> None: ...

    def use(self, stage: int) -> bool: ...


class Activations(Protocol):
    """What stages are given, kept until their backward or offloaded, and what goes to other workers."""

    @property
    def empty(self) -> bool: ...

    def reserve(self, rows: int) -> None: ...

    def give(self, to: Visitor, given_TD: Tensor, returns: bool = True) -> None: ...

    def read(self, by: Visitor) -> Tensor: ...

    def passed(self, by: Visitor) -> None: ...

    def bring(self, to: Visitor) -> None: ...

    def drop(self, by: Visitor) -> None: ...

    def give_gradient(self, to: Visitor, dh_TD: Tensor) -> None: ...

    def take_gradient(self, by: Visitor) -> Tensor: ...

    def take_outgoing(self, to: Visitor, what: What) -> Tensor | None: ...

    def forget(self) -> None: ...


class Passes(Protocol):
    """How a microbatch goes through a stage: kernel by kernel, or by replaying what was captured."""

    @property
    def captures(self) -> int | None: ...

    @property
    def refused(self) -> int: ...

    def begin_window(self, program: Program) -> None: ...

    def begin_round(self) -> None: ...

    def forward(
        self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None, keep: bool
    ) -> MadeForward: ...

    def backward(
        self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None, dh_TD: Tensor
    ) -> MadeBackward: ...

    def evaluate(self, visitor: Visitor, rows: RowsHere, given_TD: Tensor | None) -> Tensor: ...

    def abandon(self) -> None: ...


class AdapterState(Protocol):
    """Where adapters live, with their masters and moments: on the device, or in host memory."""

    @property
    def home(self) -> torch.device: ...

    def attach(self, training: Training) -> None: ...

    def detach(self, job: str) -> Training: ...

    def kill(self, job: str) -> None: ...

    def abandon(self) -> None: ...

    def use(self, stage: int, jobs: Collection[str], returning: bool) -> None: ...

    def ask_ahead(self, stage: int, jobs: Collection[str]) -> None: ...

    def note_backward(self, stage: int, jobs: Collection[str]) -> None: ...

    def leave(self, stage: int) -> None: ...

    @property
    def heard_first(self) -> bool: ...

    def heard_before(self, stage: int) -> bool: ...

    def step(self, due: Sequence[Due]) -> Underway: ...

    def sums(self, training: Training) -> Sums: ...

    def make(self, due: Due, sums: Sums) -> Outcome: ...


@dataclass(slots=True)
class TimedPass:
    """How long a microbatch was at the stages here, and not what passed between its visits. It holds no
    tensors: the device may have yet to come to it."""

    plan: MicrobatchPlan
    training: bool
    settled: bool = True
    """Whether nothing was set up for it."""
    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)

    def add(self, action: Action, span: Span) -> None:
        (self.backward if isinstance(action, Backward) else self.forward).append(span)


class Agreement(Protocol):
    """How it is decided what is computed, which Steps are made, and who hears of it: by this worker alone, or
    together with others."""

    @property
    def shortage(self) -> str:
        """Why this worker computes nothing more in this window; empty while it does."""

    def begin_window(self, program: Program) -> None: ...

    def alive(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """What of a microbatch is computed."""

    def receive(self, action: Recv) -> Tensor: ...

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        """To another worker; zeros where it was never made, since a plan fixes what is sent."""

    def ran(self, action: Action, span: Span, passed: TimedPass | None) -> Iterator[Event]:
        """An action ran here; with it a microbatch may have ended its way through the stages here."""

    def evaluate(self, stage: int, plan: MicrobatchPlan) -> Iterator[Event]:
        """A microbatch of held-out samples comes to a stage."""

    def evaluated(self, segments: Sequence[Segment], sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        """It has been through the last one."""

    def reduce(self, action: Reduce) -> None: ...

    def step(self, steps: Sequence[Step]) -> Iterator[Event]: ...

    def save(self, job: str, step: int) -> Iterator[Event]: ...

    def settle(self) -> Iterator[Event]:
        """Report the Steps that were asked for; waits for them."""

    def fall_short(self, why: str) -> None:
        """A pass did not fit, and what was under way here has been dropped."""

    def ends_early(self) -> bool:
        """Nothing more is computed, since somebody cannot wait for the window's end. Whether it ends here, or
        others wait for what is still to be sent."""

    def end_window(self, waited: Waited) -> None:
        """`waited` is what the device has waited for its weights since it began."""


def delivered(program: Program, microbatches: Mapping[int, Microbatch]) -> Fetch:
    """Of microbatches that another worker has laid out, by their numbers in the Program."""
    evaluated = {
        action.microbatch for actions in program.devices for action in actions if isinstance(action, Evaluate)
    }
    by_plan = {
        (program.microbatches[number], number in evaluated): laid for number, laid in microbatches.items()
    }
    return lambda plan, evaluates: by_plan[plan, evaluates]
