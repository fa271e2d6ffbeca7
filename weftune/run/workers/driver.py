"""The first worker of a pipeline. To its caller it is an executor like any other; behind it are the other
workers.

It runs its own stage, forwards every command, and combines what no worker knows alone: checkpoints,
evaluations, and the adapters of jobs that leave.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType

import torch

from weftune.adapters.registry import kind_named
from weftune.adapters.vector import VectorLayout
from weftune.base.host.streamed import StreamedBase
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.interrupt import Leaving
from weftune.errors import UserError
from weftune.ops.adamw import AdamState
from weftune.plan.cost.time import PassTime, work_of
from weftune.plan.program.layout import Layout
from weftune.plan.program.program import Backward, Compute, Evaluate, Forward, Program
from weftune.run.events import Evaluated, Event, Failed, OutOfMemory, Passed
from weftune.run.measure.memory import limit_bytes
from weftune.run.parts import Fetch, delivered
from weftune.run.training import checkpoint
from weftune.run.training.slices import Slice, drop_partial, finish, write_slice
from weftune.run.training.state import Progress, Training
from weftune.run.workers.agreed import PartEvaluation, WorkerReport
from weftune.run.workers.loaded import base_of, load_part, worker_executor
from weftune.run.workers.messages import (
    Answer,
    Attach,
    Begin,
    Begun,
    Detach,
    EndEarly,
    HandedOver,
    KeepBest,
    Refused,
    RunProgram,
    Saved,
    SaveSlice,
    Staff,
    Through,
)
from weftune.run.workers.paces import Paces
from weftune.run.workers.transport import Transport

EVERY = 0.5
"""Seconds between two checks for a request to stop, while the other workers finish their windows."""


@dataclass(slots=True)
class _Pending:
    """A checkpoint that still lacks slices, or whose evaluation is not known yet."""

    folder: Path
    progress: Progress
    slices: dict[int, Slice] = field(default_factory=dict)


class Driver:
    def __init__(
        self,
        staff: Staff,
        loaded: Base | StreamedBase,
        layout: Layout,
        checkpoints: Callable[[str], Path],
        delay: float = 0.0,
    ) -> None:
        """`loaded` is what this worker has of the base. `checkpoints` says where each job's are, the same for
        every worker."""
        self.base = base = base_of(loaded)
        self.staff = staff
        wires = staff.wires
        self.stages, self.replicas = wires.place.stages, wires.place.replicas
        self.layout = layout
        self.paces = Paces([stage.count for stage in layout.stages])
        self.reports: list[WorkerReport] = []
        """Reports of the last window, in the order of workers."""
        self.peaks: list[int] = []
        """The peak of bytes in use on each of the other workers."""
        self._transport = Transport(wires.lanes, base.shape.hidden, base.dtype, base.device, delay)
        self._own, self._agreed = worker_executor(loaded, layout.on(0), self._transport, wires.place.worker)
        self._checkpoints = checkpoints
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._early: dict[tuple[str, int], dict[int, Saved]] = {}
        """Slices that other workers wrote before this one reached its own Save."""
        self._through: dict[int, Through] = {}
        """Worker → its message that its list of this window is finished."""
        self._awaited: set[tuple[str, int]] = set()
        """Evaluations of this window whose result is not known yet."""
        self._left = False
        """Whether this window ends early."""

    # -- as an executor ----------------------------------------------------------------------------------

    @property
    def aboard(self) -> dict[str, Training]:
        """The first stage's slice of every job, which also holds the job's progress."""
        return self._own.aboard

    @property
    def home(self) -> torch.device:
        return self._own.home

    @property
    def fused(self) -> bool:
        return self._own.fused

    @property
    def captures(self) -> int | None:
        """How many CUDA graphs this worker has captured so far; None where passes are not captured."""
        return self._own.captures

    def unweave(self) -> None:
        self._own.unweave()
        self._transport.close()

    def attach(self, training: Training) -> None:
        """Attach a job on every worker; `training` is the first stage's slice."""
        checkpoints = self._checkpoints(training.job)
        drop_partial(checkpoints)
        self._own.attach(training)
        resumes = checkpoint.newest_progress(checkpoints) is not None
        self.staff.command_all(Attach(training.member, training.recipe, checkpoints, resumes))

    def detach(self, job: str) -> Training:
        """The whole job, assembled from the slices of all workers."""
        own = self._own.detach(job)
        self.staff.command_all(Detach(job))
        best = None if own.best is None else own.best.cpu()
        parts = [HandedOver(job, own.layout, own.master.cpu(), best)]
        for _ in self.staff.first_replica:
            _, answer = self.staff.wait()
            assert isinstance(answer, HandedOver), f"{answer} came where weights were asked for"
            parts.append(answer)
        drop_partial(self._checkpoints(job))
        self._pending = {key: one for key, one in self._pending.items() if key[0] != job}
        self._early = {key: one for key, one in self._early.items() if key[0] != job}
        layout = kind_named(own.member.spec.kind).layout(own.member.spec, self.base.whole_sites)
        return _whole(own, parts, layout)

    def kill(self, job: str) -> None:
        """The job makes no more steps; the other workers learn of it with the next decision."""
        self._own.kill(job)

    def note_evaluation(self, job: str, loss: float, keep_best: bool, min_delta: float) -> None:
        best = self.aboard[job].note_evaluation(loss, keep_best, min_delta)
        if best and keep_best:
            self.staff.command_all(KeepBest(job))

    def run(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        """Run a window on all workers. A window that has begun is finished, even if `stop` returns True,
        unless that would take long: then nothing more is computed, and unfinished global batches are
        dropped."""
        self._left, leaving = False, Leaving(stop)
        evaluations = [(action, plan) for action, plan in program.compute() if isinstance(action, Evaluate)]
        held_out = {action.microbatch for action, _ in evaluations}
        self._awaited = {(segment.job, segment.step) for _, plan in evaluations for segment in plan.segments}
        microbatches = {
            number: fetch(plan, number in held_out)
            for number, plan in enumerate(program.microbatches)
            if plan.segments
        }
        self._through.clear()
        shares = [
            {action.microbatch: microbatches[action.microbatch] for action, _ in program.compute_in(replica)}
            for replica in range(self.replicas)
        ]
        for worker in self.staff.workers:
            self.staff.command(worker, RunProgram(program, shares[program.replica(worker)]))
        for event in self._own.run(
            program, delivered(program, shares[0]), overdue=lambda: self._leaves(leaving)
        ):
            yield event
            while (heard := self.staff.heard()) is not None:
                yield from self._hear(*heard)
            yield from self._finish_saves()
        self._transport.settle()
        while len(self._through) < len(self.staff.workers):
            if (heard := self.staff.heard(EVERY)) is not None:
                yield from self._hear(*heard)
            self._leaves(leaving)
        yield from self._end_window(program)

    def _leaves(self, leaving: Leaving) -> bool:
        """Whether the window ends early; all workers are told at once."""
        if leaving.overdue() and not self._left:
            self._left = True
            self.staff.command_all(EndEarly())
        return self._left

    def _hear(self, worker: int, answer: Answer) -> Iterator[Event]:
        if isinstance(answer, Through):
            self._through[worker] = answer
            return
        assert isinstance(answer, Saved), f"worker {worker} answers {answer} where nobody asked"
        yield from self._on_saved(worker, answer)

    def _end_window(self, program: Program) -> Iterator[Event]:
        ordered = [self._through[worker] for worker in sorted(self._through)]
        self.reports = [self._agreed.report, *(one.report for one in ordered)]
        self.peaks = [one.peak_bytes for one in ordered]
        short = [report.shortage for report in self.reports if report.shortage]
        yield from self._late_failures()
        if not short:
            self.paces.learn(program, self.reports)
            yield from self._passed(program)
            yield from self._evaluations([one for report in self.reports for one in report.evaluations])
        self._awaited.clear()
        yield from self._finish_saves()
        self._early.clear()
        if short and not self._left:
            # Steps that were made are made everywhere; of all else nothing was kept.
            raise OutOfMemory("; ".join(short))

    def _passed(self, program: Program) -> Iterator[Passed]:
        """Every microbatch's pass over the base, with its share of the workers' time."""
        forward, backward = (shares(self.reports, kinds) for kinds in (Forward | Evaluate, Backward))
        sizes = {job: training.layout.size for job, training in self.aboard.items()}
        for action, plan in program.compute():
            number = action.microbatch
            time = PassTime(
                work=work_of(plan, sizes),
                forward=forward[number],
                backward=backward.get(number, 0.0),
                training=isinstance(action, Forward),
            )
            yield Passed(plan, time)

    def _late_failures(self) -> Iterator[Event]:
        """Jobs that failed on another worker after the decision on their step."""
        for report in self.reports[1:]:
            for job, reason in report.failures.items():
                if job not in self._own.dead:
                    self.kill(job)
                    yield Failed(job, reason)

    def _evaluations(self, evaluations: Sequence[PartEvaluation]) -> Iterator[Event]:
        sums: dict[tuple[str, int], PartEvaluation] = {}
        for evaluation in evaluations:
            key = evaluation.job, evaluation.step
            sums[key] = sums[key] + evaluation if key in sums else evaluation
        for one in sums.values():
            if one.job in self._own.dead:
                continue
            if math.isfinite(one.loss):
                yield Evaluated(
                    one.job, one.step, one.loss / one.tokens, one.tokens, one.correct / one.tokens
                )
            else:
                self.kill(one.job)
                yield Failed(one.job, f"its evaluation loss at step {one.step} is {one.loss}")

    # -- checkpoints -------------------------------------------------------------------------------------

    def save(self, job: str, folder: Path) -> None:
        """At the Program's Save: write this worker's slice. The checkpoint is complete when all workers have
        written theirs."""
        training = self.aboard[job]
        folder.mkdir(parents=True, exist_ok=True)
        pending = _Pending(folder, copy.copy(training.progress))
        pending.slices[0] = write_slice(folder, training, 0)
        key = job, training.progress.step
        for worker, early in self._early.pop(key, {}).items():
            if early.slice is None:
                raise OSError(early.error)
            pending.slices[worker] = early.slice
        self._pending[key] = pending

    def save_now(self, job: str, folder: Path) -> None:
        """Between windows: write a checkpoint of the job's current state, on all workers."""
        if checkpoint.holds(folder, self.aboard[job].progress):
            return
        self.save(job, folder)
        for worker in self.staff.first_replica:
            self.staff.command(worker, SaveSlice(job))
        for _ in self.staff.first_replica:
            worker, answer = self.staff.wait()
            assert isinstance(answer, Saved), (
                f"worker {worker} answers {answer} where a slice was to be written"
            )
            for failure in (*self._on_saved(worker, answer), *self._finish_saves()):
                raise OSError(failure.reason)

    def _on_saved(self, worker: int, answer: Saved) -> Iterator[Failed]:
        key = answer.job, answer.step
        if key not in self._pending:
            self._early.setdefault(key, {})[worker] = answer
            return
        if answer.slice is None:
            del self._pending[key]
            self.kill(answer.job)
            yield Failed(answer.job, answer.error, unsaved=True)
            return
        self._pending[key].slices[worker] = answer.slice

    def _finish_saves(self) -> Iterator[Failed]:
        """Rename complete checkpoints into place, except those whose evaluation is still to come."""
        for key in list(self._pending):
            if key not in self._awaited:
                yield from self._finish(key)

    def _finish(self, key: tuple[str, int]) -> Iterator[Failed]:
        """Rename a checkpoint into place if all its slices are written."""
        pending, job = self._pending[key], key[0]
        if len(pending.slices) < self.stages:
            return
        del self._pending[key]
        if job in self._own.dead:
            return
        training = self.aboard[job]
        # An evaluation of this very step may have been noted since.
        progress = training.progress if training.progress.step == key[1] else pending.progress
        try:
            finish(pending.folder, progress, training.member.seed, pending.slices, training.best is not None)
        except OSError as error:
            self.kill(job)
            yield Failed(job, str(error), unsaved=True)


def open_pipeline(
    staff: Staff,
    spec: BaseSpec,
    device: torch.device,
    layout: Layout,
    checkpoints: Callable[[str], Path],
    delay: float = 0.0,
    most: int | None = None,
) -> Driver:
    """Load every worker's part of the base, and wait for all. No worker uses more than `most` bytes of its
    GPU."""
    for worker in staff.workers:
        staff.command(worker, Begin(spec, layout.on(worker % layout.workers), delay, most))
    limit_bytes(device, most)
    loaded = load_part(spec, device, layout.on(0))
    for _ in staff.workers:
        _, answer = staff.wait()
        if isinstance(answer, Refused):
            raise UserError(answer.sentence)
        assert isinstance(answer, Begun), f"{answer} came where a stage was to be loaded"
    return Driver(staff, loaded, layout, checkpoints, delay)


def shares(reports: Sequence[WorkerReport], kinds: type | UnionType) -> dict[int, float]:
    """Microbatch → seconds of its passes of these kinds, divided by the number of workers."""
    seconds: dict[int, float] = {}
    for report in reports:
        for one in report.times:
            if isinstance(one.action, kinds) and isinstance(one.action, Compute):
                number = one.action.microbatch
                seconds[number] = seconds.get(number, 0.0) + (one.stop - one.start) / len(reports)
    return seconds


def _whole(own: Training, parts: Sequence[HandedOver], layout: VectorLayout) -> Training:
    """A training state with all parameters. Moments stay on their workers, since the job is not continued."""
    stored = VectorLayout(tuple(parameter for part in parts for parameter in part.layout.parameters))
    master = layout.slice_of(stored, torch.cat([part.master for part in parts]))
    kept = [part.best for part in parts if part.best is not None]
    best = layout.slice_of(stored, torch.cat(kept)) if len(kept) == len(parts) else None
    nothing = master.new_zeros(0)
    state = AdamState(master=master, exp_avg=nothing, exp_avg_sq=nothing, gradient=nothing, weights=nothing)
    return Training(own.member, own.recipe, layout, state, own.progress, best)
