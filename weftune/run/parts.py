"""The parts of an executor. Each has several implementations, and the executor never checks which it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from weftune.core.batch import Microbatch
from weftune.plan.program.program import (
    Action,
    Evaluate,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
)
from weftune.run.events import Event
from weftune.run.measure.timers import DeviceSpan, Waited
from weftune.run.passes.graphs import CapturedPasses
from weftune.run.passes.plain import PlainPasses
from weftune.run.passes.rows import TimedPass
from weftune.run.passes.stage_graphs import CapturedVisits
from weftune.run.resident_adapters import ResidentAdapters
from weftune.run.stream.activations import KeptActivations, OffloadedActivations
from weftune.run.stream.offloaded_optimizer import OffloadedOptimizer
from weftune.run.stream.travelling_adapters import TravellingAdapters
from weftune.run.stream.weights import ResidentWeights, StreamedWeights
from weftune.run.training.state import EvaluationSums

Fetch = Callable[[MicrobatchPlan, bool], Microbatch]
"""A function that lays out planned samples as tensors, of training rows or (True) of held-out rows."""
Weights = ResidentWeights | StreamedWeights
"""The base's weights."""
Activations = KeptActivations | OffloadedActivations
"""Inputs of stages until their backward, and tensors that go to other workers."""
Passes = PlainPasses | CapturedPasses | CapturedVisits
"""Passes of a microbatch through a stage."""
AdapterState = ResidentAdapters | OffloadedOptimizer | TravellingAdapters
"""Adapters with their master weights and moments."""


NOTHING_TO_DO = Program(capacity=0, microbatches=(), batches=(), devices=((),))


class Agreement(Protocol):
    """The decisions about what is computed, which Steps are made and which events are reported, by this
    worker alone or together with others."""

    @property
    def shortage(self) -> str:
        """Reason why this worker computes nothing more in this window; empty while it does."""

    def begin_window(self, program: Program) -> None: ...

    def end_window(self, waited: Waited) -> None:
        """End a window. `waited` is the time that the device has waited for weights since it began."""

    def alive(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """Return the part of a microbatch that is computed."""

    def receive(self, action: Recv) -> Tensor: ...

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        """Send a tensor to another worker; zeros if it was never computed, as the plan requires."""

    def reduce(self, action: Reduce) -> None: ...

    def ran(self, action: Action, span: DeviceSpan, passed: TimedPass | None) -> Iterator[Event]:
        """Report that an action ran here, and the microbatch that finished its visits with it."""

    def evaluate(self, stage: int, plan: MicrobatchPlan) -> Iterator[Event]:
        """Handle a microbatch of held-out samples that arrives at a stage."""

    def evaluated(self, sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        """Handle a microbatch of held-out samples that has passed the last stage."""

    def step(self, steps: Sequence[Step]) -> Iterator[Event]: ...

    def finish_steps(self) -> Iterator[Event]:
        """Wait for the requested Steps, and report them."""

    def save(self, job: str, step: int) -> Iterator[Event]: ...

    def fall_short(self, why: str) -> None:
        """Handle a pass that did not fit into memory; everything unfinished here has been dropped."""

    def ends_early(self) -> bool:
        """Compute nothing more, since a stop cannot wait for the window's end. Return True if the window ends
        here, False if other workers still wait for tensors from here."""


def delivered(program: Program, microbatches: Mapping[int, Microbatch]) -> Fetch:
    """Return a `Fetch` over microbatches laid out by another worker, by their numbers in the Program."""
    evaluated = {
        action.microbatch for actions in program.devices for action in actions if isinstance(action, Evaluate)
    }
    by_plan = {
        (program.microbatches[number], number in evaluated): laid for number, laid in microbatches.items()
    }
    return lambda plan, evaluates: by_plan[plan, evaluates]
