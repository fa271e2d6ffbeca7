"""The types of an executor's exchangeable parts, such as its weights and its passes. Each type has several
implementations with a common interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from weftune.core.batch import Microbatch
from weftune.plan.program.program import (
    Action,
    ForwardPass,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
)
from weftune.run.events import Event, Scored
from weftune.run.measure.timers import DeviceSpan, WaitTime
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

Fetch = Callable[[MicrobatchPlan, type[ForwardPass]], Microbatch]
"""A function that returns the tensors of a planned microbatch for a kind of forward pass: training samples
for Forward, held-out samples for Evaluate, and either of them for Score."""
Weights = ResidentWeights | StreamedWeights
"""The part of an executor that provides the base's weights: all resident on the device, or streamed to the
device stage by stage."""
Activations = KeptActivations | OffloadedActivations
"""The part of an executor that stores each stage's input until its backward, and tensors until they are sent
to other workers."""
Passes = PlainPasses | CapturedPasses | CapturedVisits
"""The part of an executor that runs forward and backward passes of microbatches over stages, with or without
CUDA graphs."""
AdapterState = ResidentAdapters | OffloadedOptimizer | TravellingAdapters
"""The part of an executor that keeps adapters with their master weights and moments, on the device or in host
memory."""


NOTHING_TO_DO = Program(capacity=0, microbatches=(), batches=(), devices=((),))


class Agreement(Protocol):
    """The part of an executor that decides which rows are computed, which optimizer steps are made and which
    events are reported. `Alone` decides for a single worker, `Agreed` together with other workers."""

    @property
    def shortage(self) -> str:
        """Reason why this worker has stopped computing before the end of its Program, such as a lack of
        memory. Empty if it has not stopped."""

    def begin_window(self, program: Program) -> None: ...

    def end_window(self, wait_time: WaitTime) -> None:
        """End a window (the run of one Program). `wait_time` is the time that the device has waited for data
        from the host since the run began."""

    def without_failed_jobs(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """Return the part of a planned microbatch that this worker computes: rows of failed jobs are left
        out, unless other workers depend on them."""

    def receive(self, action: Recv) -> Tensor: ...

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        """Send a tensor to another worker. If `tensor_TD` is None, because it was never computed, send zeros,
        since the receiver waits for a tensor."""

    def reduce(self, action: Reduce) -> None: ...

    def send_scores(self, job: str, step: int, sums: Sequence[float]) -> None:
        """Send this replica's sums for the KL term of KTO, computed by `Scorer.kl_sums`, to the other
        replicas."""

    def add_scores(self, job: str, step: int) -> Sequence[float] | None:
        """Return the sums for the KL term of KTO over all replicas, or None if one of the replicas could not
        score its samples."""

    def report_action(
        self, action: Action, span: DeviceSpan, timed_pass: TimedPass | None
    ) -> Iterator[Event]:
        """Report that an action ran, and yield the resulting events. `timed_pass` is given if the action was
        the last one of a microbatch on this worker: the times of the microbatch's pass."""

    def handle_arrival(self, stage: int) -> Iterator[Event]:
        """Prepare for a forward without a backward (for evaluation or scoring) over a stage: report the
        outcomes of optimizer steps that must be known before it, and yield their events."""

    def report_evaluations(self, sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        """Record the evaluation sums of a microbatch of held-out samples that has passed the last stage.
        Yield the events of evaluations that are complete."""

    def report_scores(self, scores: Sequence[Scored]) -> Iterator[Event]:
        """Report the scores of the samples of a microbatch that has passed the last stage."""

    def step(self, steps: Sequence[Step]) -> Iterator[Event]: ...

    def finish_steps(self) -> Iterator[Event]:
        """Wait for the requested optimizer steps, and yield an event with the outcome of each."""

    def save(self, job: str, step: int) -> Iterator[Event]: ...

    def report_shortage(self, reason: str) -> None:
        """Record that a pass ran out of memory, or raise an error if the Program cannot continue. Called
        after this worker has dropped its unfinished work; `reason` is the message of the memory error."""

    def end_early(self) -> bool:
        """Stop computing before the end of the Program. Return True if its run ends now, and False if it
        continues because other workers still wait for tensors from this worker."""


def fetch_from(program: Program, microbatches: Mapping[int, Microbatch]) -> Fetch:
    """Return a `Fetch` (a function that returns the tensors of a planned microbatch) that looks up
    microbatches received from the first worker. `microbatches` maps the index of each in the Program to its
    tensors."""
    kinds = program.pass_kinds()
    by_plan = {(program.microbatches[number], kinds[number]): laid for number, laid in microbatches.items()}
    return lambda plan, kind: by_plan[plan, kind]
