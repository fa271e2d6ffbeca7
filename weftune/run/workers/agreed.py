"""Agreement of several workers on every optimizer step (Step). The sums over a job's global batch (loss,
squared gradient norm, metrics) are passed from stage to stage towards the first worker, which decides whether
the Step is made; the other workers follow its decision.

A worker that runs out of memory, or must end soon, computes nothing more in the running Program, but still
sends everything that the other workers wait for: zeros, and for every unfinished global batch a note that it
is abandoned. So all workers reach the end of the Program, and a Step is made by all workers or by none.

Shapes: T rows of a microbatch, D hidden width, N numbers that replicas exchange for one job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weftune.plan.program.program import (
    Action,
    GlobalBatch,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
)
from weftune.run.events import Event, Failed, SaveDue, Scored, Stepped
from weftune.run.measure.timers import ActionTimer, DeviceSpan, WaitTime
from weftune.run.parts import NOTHING_TO_DO, AdapterState
from weftune.run.passes.rows import TimedPass
from weftune.run.shards import Shards, ShardShortage
from weftune.run.training.state import EvaluationSums, OpenBatch
from weftune.run.training.steps import BatchSums, StepRequest, batch_totals, find_step_problem
from weftune.run.workers.transport import SUMS_PER_MESSAGE, Transport

DEAD = math.nan
"""Value that workers send in place of a job's sums and of the decision on its optimizer step if the job has
failed and makes no more steps."""
ABANDONED = -math.inf
"""Value that workers send in place of the loss of a global batch, and of the decision on its optimizer step,
if a worker could not finish the batch."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action that a worker has run, with its start and end on the worker's device in seconds of the
    machine's clock. The time that a Reduce or Step action waits for messages of other workers is not
    included."""

    action: Action
    start: float
    stop: float


@dataclass(slots=True)
class WorkerReport:
    """The report that each worker sends to the first worker after its last action of a Program."""

    evaluations: list[EvaluationSums] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Maps each job whose optimizer step failed on this worker, although the first worker had decided that
    the step is made, to the reason of the failure."""
    times: list[TimedAction] = field(default_factory=list)
    shortage: str = ""
    """Reason why this worker stopped computing before the end of the Program, such as a lack of memory. Empty
    if it computed everything."""
    copied_bytes: int = 0
    """Number of bytes copied from the host to the device since the worker began, if its stages are
    streamed."""
    peak_bytes: int = 0
    """Peak memory use of the worker in bytes. 0 in the report of the first worker."""
    waited_seconds: float = 0.0
    """Seconds for which the worker's device has waited for data of streamed stages since the worker began."""


class Agreed:
    """The `Agreement` of a worker that is one of several. Together they decide which optimizer steps are
    made."""

    def __init__(
        self,
        adapters: AdapterState,
        timer: ActionTimer,
        transport: Transport,
        worker: int,
        shards: Shards | None = None,
    ) -> None:
        """Create the agreement of one worker. `worker` is the index of the list of actions in a Program that
        it runs. `shards` is given if each layer is divided among several workers. These workers run the same
        list, and their sums are equal to the bit, so they make the same decisions."""
        self._shards = shards
        self._adapters, self._roster = adapters, adapters.roster
        self._program = NOTHING_TO_DO
        self.report = WorkerReport()
        self._timer, self._transport, self._worker = timer, transport, worker
        self._batches: dict[tuple[str, int], tuple[int, GlobalBatch]] = {}
        self._action_spans: list[tuple[Action, DeviceSpan]] = []
        self._sums: dict[int, Tensor] = {}
        """Maps the index of a global batch to its sums over all stages, until the decision on its optimizer
        step. Only the first worker stores them."""
        self._later_sums: dict[int, Tensor] = {}
        """Maps the index of a global batch to its sums over later stages, if they have arrived before this
        worker needed them."""
        self._decisions: dict[int, float] = {}

    @property
    def shortage(self) -> str:
        return self.report.shortage

    def begin_window(self, program: Program) -> None:
        self._program = program
        self._batches = {
            (one.job, one.step): (batch_index, one) for batch_index, one in enumerate(program.batches)
        }
        self._action_spans = []
        self.report = WorkerReport()
        sizes = {job: training.layout.size for job, training in self._roster.trainings.items()}
        self._transport.expect(program, self._worker, sizes)

    def end_window(self, wait_time: WaitTime) -> None:
        self.report.copied_bytes, self.report.waited_seconds = (
            wait_time.copied_bytes,
            wait_time.total_seconds(),
        )
        machine_times = [(action, *self._timer.machine_times(span)) for action, span in self._action_spans]
        self.report.times = [TimedAction(*one) for one in machine_times]
        if self.shortage or (self._roster.has_open_batch() and not self._program.hands_over):
            self._adapters.abandon()
        assert not self._later_sums, "sums came for which there is no Reduce"
        assert not self._decisions, "a decision was announced that no Step took"

    def without_failed_jobs(self, plan: MicrobatchPlan) -> MicrobatchPlan:
        """Return the whole planned microbatch, since other workers depend on all of its rows. The rows of
        failed jobs get no gradient."""
        return plan

    def receive(self, action: Recv) -> Tensor:
        return self._transport.receive(action)

    def send(self, action: Send, tensor_TD: Tensor | None) -> None:
        if tensor_TD is None:
            assert self.shortage, f"{action}: it was never made"
            tensor_TD = self._transport.zeros(self._program.microbatches[action.microbatch].rows)
        self._transport.send(action, tensor_TD)

    def report_action(
        self, action: Action, span: DeviceSpan, timed_pass: TimedPass | None
    ) -> Iterator[Event]:
        self._action_spans.append((action, span))
        return iter(())

    def handle_arrival(self, stage: int) -> Iterator[Event]:
        return iter(())

    def report_evaluations(self, sums: Sequence[EvaluationSums]) -> Iterator[Event]:
        """Record the evaluation sums in this worker's report. At the end of the Program the first worker adds
        up the sums of all workers."""
        self.report.evaluations += sums
        return iter(())

    def report_scores(self, scores: Sequence[Scored]) -> Iterator[Event]:
        """Record the scores in this worker's report. The first worker yields their events at the end of the
        Program."""
        self.report.scores += scores
        return iter(())

    def finish_steps(self) -> Iterator[Event]:
        return iter(())

    def report_shortage(self, reason: str) -> None:
        if self._shards is not None:
            raise ShardShortage(reason)
        self.report.shortage = f"worker {self._worker}: {reason}"

    def end_early(self) -> bool:
        self.report.shortage = self.report.shortage or f"worker {self._worker}: the run is to end"
        return False

    def save(self, job: str, step: int) -> Iterator[Event]:
        """Yield the event that a checkpoint of the job is to be written, unless the optimizer step before it
        was abandoned."""
        if job not in self._roster.failed_jobs and self._roster.trainings[job].progress.step == step:
            yield SaveDue(job, step)

    # -- what a batch came to ----------------------------------------------------------------------------

    def send_scores(self, job: str, step: int, sums: Sequence[float]) -> None:
        sent = [ABANDONED] * len(sums) if self.shortage else sums
        self._transport.scores.send_to_replicas((job, step), torch.tensor(sent, dtype=torch.float64))

    def add_scores(self, job: str, step: int) -> Sequence[float] | None:
        sums = self._transport.scores.sum((job, step), self._worker).tolist()
        return None if ABANDONED in sums else sums

    def reduce(self, action: Reduce) -> None:
        is_first = action.payload == "gradient" or self._program.replicas == 1
        if self._shards is not None and is_first:
            self._shards.sum_gradient(self._roster.trainings[action.job])
        if action.payload == "gradient":
            self._send_replica_sums(action.job, action.step)
        else:
            self._accumulate_sums(action.job, action.step)

    def _send_replica_sums(self, job: str, step: int) -> None:
        """Send this replica's gradient and sums for a job's global batch to the other replicas. Each replica
        has trained a part of the batch."""
        training = self._roster.trainings[job]
        gradient_N = training.gradient
        if job in self._roster.failed_jobs or self.shortage:
            nothing = ABANDONED if self.shortage else DEAD
            message_N = gradient_N.new_full((len(gradient_N) + SUMS_PER_MESSAGE,), nothing)
        else:
            message_N = torch.cat([gradient_N, batch_totals(training)])
        self._transport.exchange.send_to_replicas((job, step), message_N)

    def _add_replica_sums(self, job: str, step: int) -> None:
        """Replace this replica's gradient and sums for a job's global batch by their sums over all
        replicas."""
        one = self._roster.trainings[job]
        stop = one.layout.size + 2 + len(one.recipe.objective.metrics)
        maxima = slice(stop - one.recipe.objective.max_metric_count, stop)
        total_N = self._transport.exchange.sum((job, step), self._worker, maxima)
        self._timer.start()
        if job not in self._roster.failed_jobs:
            batch, training = self._batches[job, step][1], self._roster.trainings[job]
            training.gradient.copy_(total_N[:-SUMS_PER_MESSAGE])
            loss, correct, *_ = total_N[-SUMS_PER_MESSAGE:]
            tokens, metrics_M = batch.tokens - batch.prefix_rows, total_N[2 - SUMS_PER_MESSAGE :]
            training.open_batch = OpenBatch(loss, correct, tokens, metrics_M)

    def _accumulate_sums(self, job: str, step: int) -> None:
        """Add this worker's sums over a job's global batch to the sums of later stages, and send the result
        to the worker of the previous stage. The first worker keeps the result."""
        program = self._program
        if program.replicas > 1:
            self._add_replica_sums(job, step)
        if program.replica(self._worker) > 0:
            return
        batch_index, _ = self._batches[job, step]
        sums = self._own_sums(job)
        if self._worker + 1 < program.devices_per_replica:
            sums += self._receive_later_sums(batch_index)
        self._timer.start()
        if self._worker == 0:
            self._sums[batch_index] = sums
        else:
            self._transport.send_sums(torch.cat([sums.new_tensor([batch_index]), sums]))

    def _own_sums(self, job: str) -> Tensor:
        """Return this worker's sums over a job's global batch: the squared norm of the gradient, the loss,
        the correct predictions and the metrics."""
        if job in self._roster.failed_jobs:
            return torch.full((1 + SUMS_PER_MESSAGE,), DEAD, dtype=torch.float64)
        if self.shortage:
            none = [0.0] * (SUMS_PER_MESSAGE - 1)
            return torch.tensor([0.0, ABANDONED, *none], dtype=torch.float64)
        own = self._adapters.sums(self._roster.trainings[job])
        return torch.tensor([own.norm**2, own.loss, own.correct, *own.metrics], dtype=torch.float64)

    def _receive_later_sums(self, batch_index: int) -> Tensor:
        while batch_index not in self._later_sums:
            number, *sums = self._transport.receive_sums().tolist()
            self._later_sums[int(number)] = torch.tensor(sums, dtype=torch.float64)
        return self._later_sums.pop(batch_index)

    # -- the decision on a Step -----------------------------------------------------------------------------

    def step(self, steps: Sequence[Step]) -> Iterator[Event]:
        if len(self._program.devices) == 1:
            # A Program for one list has no Reduce, but several shards may run it.
            for action in steps:
                self.reduce(Reduce(action.job, action.step, "norm"))
        if self._shards is not None and self._worker == 0:
            self._agree_on_dead_jobs(steps, self._shards)
        for action in steps:
            self._timer.start()
            if self._worker == 0:
                yield from self._decide_step(action.job, action.step)
            else:
                self._follow_decision(action.job, action.step)
            self._action_spans.append((action, self._timer.stop()))

    def _agree_on_dead_jobs(self, steps: Sequence[Step], shards: Shards) -> None:
        """Mark each job that is to make one of these optimizer steps as failed on all shards if it has failed
        on any shard (worker with a part of every layer)."""
        dead = shards.any_over_shards([step.job in self._roster.failed_jobs for step in steps])
        for step, is_dead in zip(steps, dead, strict=True):
            if is_dead and step.job not in self._roster.failed_jobs:
                self._adapters.kill(step.job)

    def _decide_step(self, job: str, step: int) -> Iterator[Event]:
        """Decide whether an optimizer step is made, announce the decision, then make the step or mark the job
        as failed. Called only on the first worker, or on all of its shards."""
        batch_index, batch = self._batches[job, step]
        squares, loss, correct, *metrics = self._sums.pop(batch_index).tolist()
        if job in self._roster.failed_jobs:
            self._announce_decision(batch_index, DEAD)
            return
        if loss == ABANDONED:
            self._announce_decision(batch_index, ABANDONED)
            return
        training = self._roster.trainings[job]
        norm = math.sqrt(squares) if squares >= 0 else squares
        sums = BatchSums(loss=loss, norm=norm, correct=correct, metrics=metrics)
        reason = find_step_problem(training, sums)
        self._announce_decision(batch_index, DEAD if reason else sums.norm)
        outcome = reason or self._adapters.make_step(StepRequest(training, batch.supervised_tokens), sums)
        if isinstance(outcome, str):
            self._adapters.kill(job)
            yield Failed(job, outcome)
        else:
            yield Stepped(job, training.progress.step, outcome)

    def _follow_decision(self, job: str, step: int) -> None:
        """Receive the first worker's decision on an optimizer step, and make the step or mark the job as
        failed. Called on all workers that do not decide."""
        batch_index, batch = self._batches[job, step]
        while batch_index not in self._decisions:
            number, norm = self._transport.receive_decision().tolist()
            self._decisions[int(number)] = norm
        norm = self._decisions.pop(batch_index)
        self._timer.start()
        if job in self._roster.failed_jobs or norm == ABANDONED:
            return
        if math.isnan(norm):
            self._adapters.kill(job)
            return
        request = StepRequest(self._roster.trainings[job], batch.supervised_tokens)
        outcome = self._adapters.make_step(request, BatchSums(loss=0.0, norm=norm, correct=0.0))
        if isinstance(outcome, str):
            self.report.failures[job] = outcome
            self._adapters.kill(job)

    def _announce_decision(self, batch_index: int, norm: float) -> None:
        self._transport.send_decision(torch.tensor([batch_index, norm], dtype=torch.float64))
