"""The first worker of a pipeline, which controls the other workers. Its caller uses the `Driver` like the
executor of a single process.

The driver runs its own stage, forwards every command, and combines the results of all workers: checkpoints,
evaluations, and the adapters of detached jobs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from weftune.adapters.registry import get_kind
from weftune.adapters.vector import VectorLayout
from weftune.base.host.streamed import StreamedBase
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.interrupt import StopRequest
from weftune.errors import UserError
from weftune.ops.adamw import AdamState
from weftune.plan.cost.time import PassTime, pass_work
from weftune.plan.program.handover import FINISHED, unfinished_work
from weftune.plan.program.layout import Layout
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Compute,
    Evaluate,
    Forward,
    ForwardHalf,
    ForwardPass,
    HalfPass,
    Program,
)
from weftune.run.events import Event, Failed, OutOfMemory, Passed, evaluation_event, score_event
from weftune.run.measure.memory import set_memory_limit
from weftune.run.parts import Fetch, fetch_from
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import Slice, drop_partial, finish, write_slice
from weftune.run.training.snapshot import Snapshot, weights_snapshot
from weftune.run.training.state import EvaluationSums, Progress, Training
from weftune.run.training.writer import Unsaved, find_disk_error
from weftune.run.workers.agreed import WorkerReport
from weftune.run.workers.messages import (
    Answer,
    Attach,
    Begin,
    Begun,
    End,
    JobCommand,
    RunProgram,
    WorkerControl,
)
from weftune.run.workers.paces import Paces
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import load_part, loaded_base, shard_team, worker_executor

STOP_CHECK_SECONDS = 0.5
"""Seconds between two checks whether the user has requested a stop, while the other workers finish the
Program."""


@dataclass(slots=True)
class _PendingCheckpoint:
    """A checkpoint that is not complete: files of other workers (slices) or the result of the job's
    evaluation are missing, or its folder is still to be renamed."""

    folder: Path
    progress: Progress
    seed: int
    keeps_best: bool
    own_slice: Future[Slice]
    """Future of the slice (file of a checkpoint) that this worker writes, done when the file has been
    written."""
    slices: dict[int, Slice] = field(default_factory=dict)
    final_rename: Future[Path] | None = None

    @property
    def pending_write(self) -> Future[Any] | None:
        """Future of this worker's last write for the checkpoint (its slice, or the final rename), or None if
        that write is done."""
        under_way = self.final_rename or self.own_slice
        return None if under_way.done() else under_way


class Driver:
    def __init__(
        self,
        control: WorkerControl,
        loaded_part: Base | StreamedBase,
        layout: Layout,
        checkpoints: Callable[[str], Path],
        delay: float = 0.0,
    ) -> None:
        """Create the driver of workers that have loaded their parts of the base. `loaded_part` is this
        worker's part. `checkpoints` returns the folder of a job's checkpoints, which is the same for every
        worker. `delay` is the number of seconds by which tests delay every message."""
        self.base = base = loaded_base(loaded_part)
        self.control = control
        position = control.connections.position
        self.stages, self.replicas, self.shards = position.stages, position.replicas, position.shards
        self.layout = layout
        self.paces = Paces([stage.layer_count for stage in layout.stages])
        self.reports: list[WorkerReport] = []
        """Reports of all workers on the last Program, in the order of workers."""
        self.peaks: list[int] = []
        """Peak memory use, in bytes, of each of the other workers."""
        self._transport = Transport(control.connections, base.shape.hidden, base.dtype, base.device, delay)
        self._own, self._agreed = worker_executor(
            loaded_part,
            layout.for_worker(0),
            self._transport,
            position.list_index,
            shard_team(control.connections),
        )
        self.attached = self._own.attached
        """Maps each job to its training state in the first stage, which also holds the job's progress."""
        self.home, self.is_fused = self._own.home, self._own.is_fused
        self._checkpoints = checkpoints
        self.writer = self._own.writer
        self._pending_checkpoints: dict[tuple[str, int], _PendingCheckpoint] = {}
        self._unsaved_checkpoints: list[Unsaved] = []
        """Checkpoints that could not be written and that `take_unsaved` has not returned yet."""
        self._early_slices: dict[tuple[str, int], dict[int, Slice | Unsaved]] = {}
        """Maps (job, step) to the answers of other workers, by worker, that say whether their file (slice) of
        this checkpoint has been written. Only answers that arrived before this worker began the checkpoint
        are kept here."""
        self._window_reports: dict[int, WorkerReport] = {}
        """Maps each other worker that has finished its actions of the current Program to its report."""
        self._awaited_evaluations: set[tuple[str, int]] = set()
        """Evaluations (job, step) of the current Program whose result is not known yet."""
        self._ends_early = False
        self.unfinished = FINISHED
        """Global batches that the last Program left unfinished. Their microbatches are in flight on all
        workers."""
        self._seconds_before: dict[int, tuple[float, float]] = {}
        """Maps the index of each microbatch in flight to two times in seconds: of its forward passes and of
        its backward passes in earlier Programs."""

    # -- as an executor ----------------------------------------------------------------------------------

    @property
    def captures(self) -> int | None:
        """Number of CUDA graphs that this worker has captured so far. None if passes are not captured."""
        return self._own.captures

    def restore_base(self) -> None:
        self._own.restore_base()
        self._transport.close()

    def attach(self, training: Training) -> None:
        """Attach a job on every worker. `training` is the job's training state in the first stage."""
        checkpoints = self._checkpoints(training.job)
        drop_partial(checkpoints)
        self._own.attach(training)
        resumes = checkpoint.newest_progress(checkpoints) is not None
        self.control.broadcast(Attach(training.adapter, training.recipe, checkpoints, resumes))

    def detach(self, job: str) -> Training:
        """Detach a job on every worker, and return its training state with the weights of all workers."""
        own = self._own.detach(job)
        self.control.broadcast(JobCommand("detach", job))
        parts = [weights_snapshot(own)]
        while len(parts) < self.stages:
            worker, answer = self.control.wait()
            if isinstance(answer, Snapshot):
                parts.append(answer)
            else:
                self._handle_answer(worker, answer)
        # From here on no worker writes a slice of it.
        self.writer.wait(job)
        drop_partial(self._checkpoints(job))
        self._pending_checkpoints = {
            key: one for key, one in self._pending_checkpoints.items() if key[0] != job
        }
        self._early_slices = {key: one for key, one in self._early_slices.items() if key[0] != job}
        layout = get_kind(own.adapter.spec.kind).layout(own.adapter.spec, self.base.whole_sites)
        return _assemble_training(own, parts, layout)

    def kill(self, job: str) -> None:
        """Mark the job as failed. The other workers learn of the failure from the first worker's next
        decision on an optimizer step of the job."""
        self._own.kill(job)

    def record_evaluation(
        self,
        job: str,
        loss: float,
        keep_best: bool,
        min_delta: float,
        is_requested: bool = True,
        score: float | None = None,
    ) -> None:
        training = self.attached[job]
        best = training.record_evaluation(loss, keep_best, min_delta, is_requested, score)
        if best and keep_best:
            self.control.broadcast(JobCommand("keep best", job))
        if (pending := self._pending_checkpoints.get((job, training.progress.step))) is not None:
            pending.progress = copy.copy(training.progress)
            pending.keeps_best = training.best_weights is not None

    def use_mean_weights(self, job: str) -> None:
        self._own.use_mean_weights(job)
        self.control.broadcast(JobCommand("show mean", job))

    def use_latest_weights(self, job: str) -> None:
        self._own.use_latest_weights(job)
        self.control.broadcast(JobCommand("show master", job))

    def run(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        """Run a Program on all workers and yield its events. A Program that has begun is finished even if
        `stop` returns True, unless that would take long: then nothing more is computed, and unfinished global
        batches are dropped."""
        self._ends_early, request = False, StopRequest(stop)
        self.unfinished = FINISHED
        kinds = program.pass_kinds()
        entered = {
            one.microbatch for actions in program.devices for one in actions if isinstance(one, ForwardPass)
        }
        self._awaited_evaluations = {
            (segment.job, segment.step)
            for number, kind in kinds.items()
            if kind is Evaluate
            for segment in program.microbatches[number].segments
        }
        microbatches = {
            number: fetch(plan, kinds[number])
            for number, plan in enumerate(program.microbatches)
            if number in entered
        }
        self._window_reports.clear()
        shares = [
            {
                action.microbatch: microbatches[action.microbatch]
                for action, _ in program.replica_passes(replica)
                if action.microbatch in entered
            }
            for replica in range(self.replicas)
        ]
        for worker in self.control.workers:
            replica = program.replica(worker // self.shards)
            self.control.command(worker, RunProgram(program, shares[replica]))
        fetch = fetch_from(program, shares[0])
        yield from self._own.run(program, fetch, is_overdue=lambda: self._ends_window_early(request))
        self._transport.flush()
        while len(self._window_reports) < len(self.control.workers):
            if (received := self.control.next_answer(STOP_CHECK_SECONDS)) is not None:
                self._handle_answer(*received)
            self._ends_window_early(request)
        yield from self._end_window(program)

    def _ends_window_early(self, request: StopRequest) -> bool:
        """Return whether the Program ends early because of a stop request that has waited too long. The first
        call that returns True also sends this decision to all workers."""
        # Shards of the same layers would stop at different actions, and wait for one another.
        if request.is_overdue() and not self._ends_early and self.shards == 1:
            self._ends_early = True
            self.control.broadcast(End(ends_window_only=True))
        return self._ends_early

    def _handle_answer(self, worker: int, answer: Answer) -> None:
        if isinstance(answer, WorkerReport):
            self._window_reports[worker] = answer
            return
        assert isinstance(answer, Slice | Unsaved), f"worker {worker} sends {answer} without a command"
        self._handle_slice(worker, answer)

    def _end_window(self, program: Program) -> Iterator[Event]:
        others = [self._window_reports[worker] for worker in sorted(self._window_reports)]
        self.peaks = [report.peak_bytes for report in others]
        # The shards of the same layers report the same.
        self.reports = [self._agreed.report, *others][:: self.shards]
        short = [report.shortage for report in self.reports if report.shortage]
        yield from self._late_failure_events()
        if not short:
            self.unfinished = unfinished_work(program)
            self.paces.add_measurements(program, self.reports)
            yield from self._pass_events(program)
            yield from self._evaluation_events()
            yield from self._score_events()
        self._awaited_evaluations.clear()
        self._early_slices.clear()
        if short and not self._ends_early:
            # Steps that were made are made everywhere; nothing else was kept.
            raise OutOfMemory("; ".join(short))

    def _pass_events(self, program: Program) -> Iterator[Passed]:
        """Yield an event for every microbatch that has ended in this Program, with the time of its pass over
        the base, a mean over workers."""
        directions = (ForwardPass | ForwardHalf, Backward | BackwardHalf)
        forward, backward = (microbatch_seconds(self.reports, kinds) for kinds in directions)
        for number, one in enumerate(program.inherited):
            before_forward, before_backward = self._seconds_before.get(one.number, (0.0, 0.0))
            forward[number] = forward.get(number, 0.0) + before_forward
            backward[number] = backward.get(number, 0.0) + before_backward
        met = {job: training.layout.active_size for job, training in self.attached.items()}
        in_flight = {one.number for one in self.unfinished.progress if one.backwards < self.stages}
        done = {number for number, one in enumerate(program.inherited) if one.backwards == self.stages}
        for action, plan in program.forward_passes():
            number = action.microbatch
            if number in in_flight or number in done:
                continue
            time = PassTime(
                work=pass_work(plan, met),
                forward=forward[number],
                backward=backward.get(number, 0.0),
                training=isinstance(action, Forward),
            )
            yield Passed(plan, time)
        self._seconds_before = {
            number: (forward.get(number, 0.0), backward.get(number, 0.0)) for number in in_flight
        }

    def _late_failure_events(self) -> Iterator[Event]:
        """Yield failure events for the jobs whose optimizer step failed on another worker after the first
        worker had decided to make the step."""
        for report in self.reports[1:]:
            for job, reason in report.failures.items():
                if job not in self._own.failed_jobs:
                    self.kill(job)
                    yield Failed(job, reason)

    def _evaluation_events(self) -> Iterator[Event]:
        sums: dict[tuple[str, int], EvaluationSums] = {}
        for report in self.reports:
            for one in report.evaluations:
                key = one.job, one.step
                sums[key] = sums[key] + one if key in sums else one
        for one in sums.values():
            if one.job in self._own.failed_jobs:
                continue
            if not math.isfinite(one.loss):
                self.kill(one.job)
            yield evaluation_event(one, self.attached[one.job].recipe.objective)

    def _score_events(self) -> Iterator[Event]:
        for one in (one for report in self.reports for one in report.scores):
            if one.job in self._own.failed_jobs:
                continue
            if isinstance(event := score_event(one), Failed):
                self.kill(one.job)
            yield event

    # -- checkpoints -------------------------------------------------------------------------------------

    def save(self, job: str, folder: Path) -> None:
        """Take a snapshot of the job at the Program's Save action, and write this worker's slice (file of the
        checkpoint) while training continues. The checkpoint is complete when all workers have written their
        slices."""
        training = self.attached[job]
        folder.mkdir(parents=True, exist_ok=True)
        snapshot = self._own.snapshot(job)
        key = job, snapshot.progress.step
        own_slice = self.writer.write(snapshot, partial(write_slice, folder, worker=0))
        self._pending_checkpoints[key] = _PendingCheckpoint(
            folder, snapshot.progress, training.adapter.seed, training.best_weights is not None, own_slice
        )
        for worker, early in self._early_slices.pop(key, {}).items():
            self._handle_slice(worker, early)

    def save_now(self, job: str, folder: Path) -> None:
        """Request a checkpoint from all workers, unless one with the job's progress exists. Called between
        two Programs; `finish_saves` waits until the checkpoint is written."""
        if checkpoint.has_progress(folder, self.attached[job].progress):
            return
        self.save(job, folder)
        for worker in self.control.writers:
            self.control.command(worker, JobCommand("save slice", job))

    def take_unsaved(self) -> list[Unsaved]:
        """Return the checkpoints that could not be written and that no earlier call has returned."""
        while (received := self.control.next_answer()) is not None:
            self._handle_answer(*received)
        self._commit_checkpoints()
        found, self._unsaved_checkpoints = self._unsaved_checkpoints, []
        return found

    def finish_saves(self, job: str) -> None:
        """Wait for the job's checkpoints, except checkpoints that need the result of an evaluation later in
        the Program."""
        while True:
            self._commit_checkpoints()
            keys = [
                key
                for key in self._pending_checkpoints
                if key[0] == job and key not in self._awaited_evaluations
            ]
            if not keys:
                return
            pending = self._pending_checkpoints[keys[0]]
            if (writing := pending.pending_write) is not None:
                wait([writing])
            elif len(pending.slices) < self.stages - 1:
                self._handle_answer(*self.control.wait())
            # Otherwise this worker's slice has been written since the first line, and there is no other
            # message to wait for.

    def _handle_slice(self, worker: int, answer: Slice | Unsaved) -> None:
        key = answer.job, answer.step
        if key not in self._pending_checkpoints:
            self._early_slices.setdefault(key, {})[worker] = answer
        elif isinstance(answer, Unsaved):
            self._drop_checkpoint(key, answer.reason)
        else:
            self._pending_checkpoints[key].slices[worker] = answer

    def _commit_checkpoints(self) -> None:
        """Rename the folders of checkpoints to their final names once all files are written, except
        checkpoints whose evaluation is still to come."""
        for key, pending in list(self._pending_checkpoints.items()):
            if key[0] in self._own.failed_jobs:
                del self._pending_checkpoints[key]
            elif pending.pending_write is None:
                self._advance_save(key, pending)

    def _advance_save(self, key: tuple[str, int], pending: _PendingCheckpoint) -> None:
        if (trouble := find_disk_error(pending.final_rename or pending.own_slice)) is not None:
            self._drop_checkpoint(key, trouble)
        elif pending.final_rename is not None:
            del self._pending_checkpoints[key]
        elif len(pending.slices) == self.stages - 1 and key not in self._awaited_evaluations:
            slices = {0: pending.own_slice.result(), **pending.slices}
            done = partial(finish, pending.folder, pending.progress, pending.seed, slices, pending.keeps_best)
            pending.final_rename = self.writer.run(key[0], done)

    def _drop_checkpoint(self, key: tuple[str, int], reason: str) -> None:
        del self._pending_checkpoints[key]
        self._unsaved_checkpoints.append(Unsaved(*key, reason))


def open_pipeline(
    control: WorkerControl,
    spec: BaseSpec,
    device: torch.device,
    layout: Layout,
    checkpoints: Callable[[str], Path],
    delay: float = 0.0,
    max_bytes: int | None = None,
    deterministic: bool = False,
) -> Driver:
    """Load every worker's part of the base, wait for all workers, and return the driver. No worker uses more
    than `max_bytes` bytes of its GPU's memory. If `deterministic`, the other workers use torch's
    deterministic kernels; the caller has enabled them for this worker."""
    for worker in control.workers:
        part = layout.for_worker(worker // layout.shards % layout.workers)
        control.command(worker, Begin(spec, part, delay, max_bytes, deterministic))
    set_memory_limit(device, max_bytes)
    loaded = load_part(spec, device, layout.for_worker(0), shard_team(control.connections))
    for _ in control.workers:
        _, answer = control.wait()
        assert isinstance(answer, Begun), f"{answer} came where a stage was to be loaded"
        if answer.refusal:
            raise UserError(answer.refusal)
    return Driver(control, loaded, layout, checkpoints, delay)


def microbatch_seconds(reports: Sequence[WorkerReport], kinds: type | UnionType) -> dict[int, float]:
    """Return a dict from each microbatch's index to the total seconds of its actions of the given kinds, as a
    mean over the workers that report."""
    seconds: dict[int, float] = {}
    for report in reports:
        for one in report.times:
            if isinstance(one.action, kinds) and isinstance(one.action, Compute | HalfPass):
                number = one.action.microbatch
                seconds[number] = seconds.get(number, 0.0) + (one.stop - one.start) / len(reports)
    return seconds


def _assemble_training(own_training: Training, parts: Sequence[Snapshot], layout: VectorLayout) -> Training:
    """Return the training state of a whole job, assembled from the snapshots `parts` of all stages.
    `own_training`, this worker's part, provides the recipe and the progress. The result has no moments, since
    the job is not trained any further."""
    stored = VectorLayout(tuple(parameter for part in parts for parameter in part.layout.parameters))
    master, best = (
        layout.slice_vector(stored, torch.cat([part.vectors[name] for part in parts]))
        if all(name in part.vectors for part in parts)
        else None
        for name in ("master", "best")
    )
    assert master is not None
    nothing = master.new_zeros(0)
    state = AdamState(master=master, exp_avg=nothing, exp_avg_sq=nothing, gradient=nothing, weights=nothing)
    return Training(own_training.adapter, own_training.recipe, layout, state, own_training.progress, best)
