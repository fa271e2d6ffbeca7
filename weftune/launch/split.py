"""Training in shares: the jobs are divided among teams of processes, which train without communication.

A share is the part of the jobs that one team trains. A team is one process that holds the whole base, or
several workers that hold its stages, replicas and shards. The jobs are divided so that shares take equally
long by prediction. Each share has its own store of job records; when all shares have ended, these records are
merged into the store of the output folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from weftune.base.load import inspect
from weftune.core.clock import Phase, PhaseClock, phase, use_clock
from weftune.core.shapes import ModelShape
from weftune.errors import Mistake, PlanError, UserError
from weftune.jobs.spec.spec import RunSpec
from weftune.jobs.store.shares import create_shares
from weftune.jobs.store.status import WORKER_LOGS, State, resume_line
from weftune.jobs.store.store import Store, open_store
from weftune.jobs.sweeps.record import SweepRecord
from weftune.launch.supervise import INTERRUPTED, POLL_SECONDS, ProcessSpec, Supervisor, Team, TeamEnd
from weftune.launch.workers import WorkerMain, connect_workers, connected_team
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.profile_cost import profile_cost_model
from weftune.plan.cost.time import CostModel
from weftune.plan.layout.choose import Machine
from weftune.plan.layout.seats import find_misfits
from weftune.plan.layout.split import DeviceShare, JobWork, data_sheet_cost, job_seconds, share_jobs
from weftune.plan.window.pace import data_sheet_device_speed
from weftune.report.effort import wall_time_sentence
from weftune.report.read import JobRecord
from weftune.report.words import count_noun, duration_text
from weftune.run.training import checkpoint
from weftune.run.training.state import Progress
from weftune.run.workers.groups import read_position
from weftune.run.workers.heartbeat import LOST
from weftune.run.workers.messages import WorkerControl
from weftune.trainer.job import PreparedJob
from weftune.trainer.journal import View
from weftune.trainer.machine import launcher_machine
from weftune.trainer.options import Options
from weftune.trainer.results import CHECKPOINTS
from weftune.trainer.sweeps import Sweeps
from weftune.trainer.train import make_trainer
from weftune.trainer.trainer import Result, Trainer

SILENT_SECONDS = 30.0
"""Seconds without a message after which a process that trains a share (a part) of the jobs counts as lost.
The time is long because Python's GIL may delay messages."""
USER_ERROR = 2
"""Exit code of the processes of a share (a subset of the jobs) if a user error has ended them."""
SAMPLED_BATCHES = 16
"""Number of global batches, spread over a job's steps, from which the time of all its batches is
estimated."""


@dataclass(frozen=True, slots=True)
class ShareMistake:
    """A message to the launcher: a user error has ended the processes of a share (a subset of the jobs)."""

    share: int
    sentence: str


ShareMessage = JobRecord | SweepRecord | str | ShareMistake | dict[str, Result]
"""A message from a training process to the launcher: progress, a sentence for the user, a user error or, if
one team of processes trains all jobs, the results of the jobs."""


def train_shares(
    run: RunSpec, trainer: Trainer, devices: Sequence[str]
) -> tuple[dict[str, Result], set[int]]:
    """Train all jobs of a run in shares (parts of the jobs), one team of processes per share. `devices`
    contains the device of each team's first process. Return the results of all jobs and the exit codes of the
    shares."""
    options, device = trainer.options, torch.device(devices[0])
    shape = inspect(trainer.spec, device)
    machine = launcher_machine(options, device, shape, len(devices))
    trainer.restore_added_jobs()
    trainer.check(shape)
    with open_store(trainer.output, options.resume, options.command) as store:
        sweeps = trainer.restore_sweeps(store)
        ready = trainer.prepare_unfinished_jobs(store, shape)
        team_ends: list[TeamEnd] = []
        if ready:
            # Several workers find by themselves which jobs fit beside their part of the base.
            alone = options.workers_per_share == 1
            names = frozenset(job.name for job in ready)
            fits = fitting_jobs(shape, machine, ready, trainer.view) if alone else names
            trainer.prepare_output(store, ready)
            cost = share_cost(shape, machine, len(devices))
            memory = options.memory if machine.on_gpu else machine.budget_bytes
            for jobs in _sweep_rounds(trainer, store, sweeps, ready, shape):
                fits |= {job.name for job in jobs if sweeps.is_trial(job.name)}
                shares = divide_jobs(jobs, cost, machine, len(devices), trainer.output, fits)
                _show_shares(trainer.view, shares, devices, has_seconds=cost.is_measured and alone)
                teams = _share_teams(run, trainer, shares, devices, memory)
                team_ends = _run_shares(trainer, store, jobs, shares, teams)
                if any(one.code for one in team_ends):
                    break
            sweeps.decide_rungs(store)
            _pause_waiting_trials(trainer, store, sweeps)
        sweeps.finish()
        results = trainer.results(store)
    codes = {one.code for one in team_ends}
    have_ended = all(result.state.has_ended for result in results.values())
    trainer.interrupted = INTERRUPTED in codes and not have_ended
    return results, codes


def _sweep_rounds(
    trainer: Trainer, store: Store, sweeps: Sweeps, prepared_jobs: Sequence[PreparedJob], shape: ModelShape
) -> Iterator[list[PreparedJob]]:
    """Yield lists of jobs to train, one list per round, until no job remains. Without sweeps, there is one
    round.

    In a round, the trials of a sweep train up to their next rung, the step at which halving compares them.
    After each round, when all trials have been evaluated, trials are dropped or continue. Every round divides
    its jobs among the devices again, so that all devices have trials.
    """
    prepared = {job.name: job for job in prepared_jobs}
    previous_steps: dict[str, int] | None = None
    while True:
        for job in prepared.values():
            sweeps.add_trial(job)
        sweeps.decide_rungs(store)
        sweeps.propose_trials(trainer.add, trainer.view.note)
        new = [job for name, job in trainer.jobs.items() if name not in prepared and sweeps.is_trial(name)]
        new = [job for job in new if job.name not in store or not store.job(job.name).state.has_ended]
        for job in trainer.prepare_all(new, shape, store):
            prepared[job.name] = sweeps.add_trial(job)
            store.add_job(job.name)
        unfinished = [job for job in prepared.values() if not store.job(job.name).state.has_ended]
        steps = {job.name: store.job(job.name).step for job in unfinished}
        jobs = [job for job in unfinished if not sweeps.is_waiting_at_rung(job.name)]
        if previous_steps is not None:
            jobs = [job for job in jobs if sweeps.is_trial(job.name)]
        if not jobs or steps == previous_steps:
            return
        yield jobs
        previous_steps = steps


def _show_shares(
    view: View, shares: Sequence[DeviceShare], devices: Sequence[str], has_seconds: bool
) -> None:
    for number, share in enumerate(shares):
        time = f", predicted {duration_text(share.seconds)}" if has_seconds else ""
        view.note(f"share {number} on {devices[number]}: {count_noun(len(share.jobs), 'job')}{time}")


def _pause_waiting_trials(trainer: Trainer, store: Store, sweeps: Sweeps) -> None:
    """After all processes have ended, pause the trials for which their sweep has not decided whether they
    continue."""
    for name in filter(sweeps.is_waiting_at_rung, trainer.jobs):
        if name in store and store.job(name).state is State.QUEUED:
            reason = f"waits for other trials of its sweep; resume with {store.resume_line()}"
            store.move_job(name, State.PAUSED, reason)
    store.write_status()


def train_in_processes(run: RunSpec, trainer: Trainer, devices: Sequence[str]) -> dict[str, Result]:
    """Train all jobs of a run in new processes: one team of processes for each of several `devices`, or else
    one team for all jobs. Return the results of all jobs. Raise UserError if a user error has ended a
    process."""
    if len(devices) < 2:
        return _train_team(run, trainer, devices)
    with use_clock(PhaseClock()) as clock:
        results, codes = train_shares(run, trainer, devices)
        trainer.view.note(wall_time_sentence(clock.read()))
    if USER_ERROR in codes:
        paused = (result.reason for result in results.values() if result.state is State.PAUSED)
        raise UserError(Mistake("", reason) for reason in dict.fromkeys(paused))
    return results


def _train_team(run: RunSpec, trainer: Trainer, devices: Sequence[str]) -> dict[str, Result]:
    """Train all jobs of a run in one team of workers, whose first worker opens the output folder."""
    options = replace(trainer.options, gpus=None)
    options = replace(options, device=devices[0]) if devices else options
    main = partial(run_share, run, trainer.output.absolute(), trainer.max_steps, options)
    names = [f"worker {number}" for number in range(options.workers_per_share)]
    team, resume = connected_team(main, names, "all workers"), resume_line(options.command)
    (ended,), failures, results = _supervise_teams([team], trainer.output, trainer.view, resume)
    if failures:
        raise UserError(failures[0])
    if ended.code == INTERRUPTED and not results:
        raise KeyboardInterrupt
    if not results:
        logs = trainer.output / WORKER_LOGS
        raise UserError(f"the first worker ended with code {ended.code}; its output is in {logs}")
    trainer.interrupted = ended.code == INTERRUPTED
    return results


def fitting_jobs(
    shape: ModelShape, machine: Machine, prepared_jobs: Sequence[PreparedJob], view: View
) -> frozenset[str]:
    """Return the names of the jobs that each fit on a device together with the base model when no other job
    is there. Raise PlanError if no job fits."""
    memory = MemoryModel(shape, machine.budget_bytes, machine.process_bytes, uses_fused_ops=machine.on_gpu)
    refused = find_misfits([job.shape for job in prepared_jobs], memory.misfit_reason)
    if len(refused) == len(prepared_jobs):
        raise PlanError(
            Mistake(
                f"job {job.name}",
                f"beside the base on one device it {refused[job.name]}; {memory.advice(job.shape)}, or "
                "cut the base into stages with --pipeline",
            )
            for job in prepared_jobs
        )
    for name, sentence in refused.items():
        view.note(f"warning: {name}: beside the base on one device it {sentence}")
    return frozenset(job.name for job in prepared_jobs if job.name not in refused)


def share_cost(shape: ModelShape, machine: Machine, shares: int) -> CostModel:
    """Return a model of training time. The model predicts seconds from a profile of the device or, without a
    profile, from the device's data sheet. If both are missing, predicted times have an arbitrary unit and can
    only be compared."""
    if machine.profile is not None:
        return profile_cost_model(machine.profile, shape)
    if (speed := data_sheet_device_speed(machine.on_gpu)) is None:
        return uncalibrated_cost_model(shape)
    # Processes on the CPU share it.
    return data_sheet_cost(shape, replace(speed, flops=speed.flops / (1 if machine.on_gpu else shares)))


def _run_shares(
    trainer: Trainer,
    store: Store,
    prepared_jobs: Sequence[PreparedJob],
    shares: Sequence[DeviceShare],
    teams: Sequence[Team],
) -> list[TeamEnd]:
    """Train every share (part) of the jobs in its own team of processes, and merge the job records of all
    shares into the store. Return how each team ended."""
    for job in prepared_jobs:
        store.add_job(job.name)
        status = store.job(job.name)
        step, tokens = status.step, status.trained_tokens
        trainer.view.update(
            JobRecord(name=job.name, step=step, steps=job.recipe.steps, trained_tokens=tokens)
        )
    store.set_description(trainer.spec.model, store.status.device, store.status.dtype)
    store.write_status()
    create_shares(trainer.output, store.status, shares)
    ended, troubles, _ = _supervise_teams(teams, trainer.output, trainer.view, store.resume_line())
    store.merge_shares()
    reasons = {name: sentence for share, sentence in troubles.items() for name in shares[share].jobs}
    interrupted = any(one.code == INTERRUPTED for one in ended)
    for name in [job.name for job in prepared_jobs if store.job(job.name).state is State.QUEUED]:
        if name in reasons or interrupted:
            paused = f"interrupted at step {store.job(name).step}; resume with {store.resume_line()}"
            store.move_job(name, State.PAUSED, reasons.get(name, paused))
    store.write_status()
    return ended


@phase(Phase.TRAINING)
def _supervise_teams(
    teams: Sequence[Team], output: Path, view: View, resume: str
) -> tuple[list[TeamEnd], dict[int, str], dict[str, Result]]:
    """Run teams of processes, and restart a team if one of its processes crashes or hangs. Return how each
    team ended, a dict from the index of each failed team to the reason, and the results of a team that trains
    all jobs. `resume` is the command line that resumes the run."""
    failures: dict[int, str] = {}
    results: dict[str, Result] = {}
    shown_sentences: set[str] = set()

    def show_message(message: ShareMessage) -> None:
        match message:
            case JobRecord():
                view.update(message)
            case SweepRecord():
                view.sweep(message)
            case dict():
                results.update(message)
            case ShareMistake():
                failures[message.share] = message.sentence
                show_message(message.sentence)
            case str() if message not in shown_sentences:
                # Shown once: all shares send the same sentence about what concerns them all.
                shown_sentences.add(message)
                view.note(message)

    ended = Supervisor(teams, output, view.note, show_message, resume).run()
    lost = {share: one.loss_reason for share, one in enumerate(ended) if one.code == LOST}
    lost_reasons = {share: f"{loss}; resume with {resume}" for share, loss in lost.items()}
    return ended, failures | lost_reasons, results


def divide_jobs(
    prepared_jobs: Sequence[PreparedJob],
    cost: CostModel,
    machine: Machine,
    shares: int,
    output: Path,
    fitting_names: frozenset[str],
) -> list[DeviceShare]:
    """Divide the jobs into shares (parts with their own processes) of about equal predicted time, and return
    the non-empty shares. A job that is not in `fitting_names` counts as zero seconds, since it cannot
    train."""
    seconds = {}
    for job in prepared_jobs:
        progress = checkpoint.newest_progress(output / job.name / CHECKPOINTS) or Progress()
        work = remaining_work(job, progress)
        seconds[job.name] = job_seconds(work, cost, machine.max_tokens) if job.name in fitting_names else 0.0
    sources = {job.name: job.shape.source_job for job in prepared_jobs}
    return [share for share in share_jobs(seconds, shares, sources) if share.jobs]


def remaining_work(job: PreparedJob, progress: Progress) -> JobWork:
    """Return the work of a job (its global batches and evaluations) that remains after the given progress."""
    steps = job.recipe.steps - progress.step
    count = min(SAMPLED_BATCHES, steps)
    spread = [progress.step + number * steps // count for number in range(count)]
    windows = [job.job_window(step, 1, is_first_window=False) for step in spread]
    return JobWork(
        shape=job.shape,
        steps=steps,
        batches=tuple(batch for window in windows for batch in window.batches),
        evaluations=sum(step > progress.evaluated for step in job.evaluate_at),
        held_out_samples=windows[0].evaluation if windows else (),
    )


def _share_teams(
    run: RunSpec, trainer: Trainer, shares: Sequence[DeviceShare], devices: Sequence[str], memory: int | None
) -> list[Team]:
    """Return one team of processes for each share (subset of the jobs). The team trains only the jobs of its
    share."""
    options = replace(trainer.options, gpus=None, memory=memory, resume=True, restart=(), retry=())
    found = []
    for number, share in enumerate(shares):
        own = replace(
            run,
            jobs=tuple(job for job in trainer.jobs.values() if job.name in share.jobs),
            sweeps=tuple(sweep for sweep, _ in trainer.sweeps.values()),
        )
        mine = replace(options, device=devices[number], share=number, shares=len(shares))
        main = partial(run_share, own, trainer.output.absolute(), trainer.max_steps, mine)
        found.append(_share_team(f"share {number}", main, options.workers_per_share))
    return found


def _share_team(name: str, main: WorkerMain, workers: int) -> Team:
    if workers > 1:
        names = [f"{name} worker {number}" for number in range(workers)]
        return connected_team(main, names, f"all workers of {name}")
    alone = ProcessSpec(name, partial(main, 0, {}))
    return Team(members=lambda _attempt: [alone], silent_seconds=SILENT_SECONDS)


# -- one share ------------------------------------------------------------------------------------------


class ShareView:
    """The progress view in a process that trains a share of the jobs. The view sends all messages to the
    launcher, which displays them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._one_at_a_time = threading.Lock()

    def send_heartbeats(self) -> None:
        """Send an empty message every second, forever, to show the launcher that this process is alive."""
        while True:
            self.send(None)
            time.sleep(POLL_SECONDS)

    def update(self, row: JobRecord) -> None:
        self.send(row)

    def sweep(self, record: SweepRecord) -> None:
        self.send(record)

    def note(self, text: str) -> None:
        self.send(text)

    def send(self, message: ShareMessage | None) -> None:
        try:
            with self._one_at_a_time:
                self._connection.send(message)
        except OSError:
            os._exit(LOST)


def run_share(
    run: RunSpec,
    output: Path,
    max_steps: int | None,
    options: Options,
    attempt: int,
    environment: Mapping[str, str],
    connection: Connection,
) -> None:
    """Train the jobs of one share (a part of the jobs), or all jobs if they are not divided. This is the main
    function of every process of the share. If the share has several processes, the first one runs the
    training loop and the others execute its commands."""
    view = ShareView(connection)
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    threading.Thread(target=view.send_heartbeats, daemon=True).start()
    os.environ.update(environment)
    if attempt > 0:
        options = replace(options, resume=output.exists(), restart=(), retry=(), changes={})
    try:
        with _connected_workers(options, options.workers_per_share) as control:
            if control is None and options.workers_per_share > 1:
                return
            mine = replace(options, staff=control)
            trainer = make_trainer(run, output=output, max_steps=max_steps, options=mine, view=view)
            results = trainer.run()
    except UserError as error:
        print(error, file=sys.stderr)
        view.send(ShareMistake(options.share or 0, str(error)))
        raise SystemExit(USER_ERROR) from None
    if options.share is None:
        view.send(results)
    if trainer.interrupted:
        raise SystemExit(INTERRUPTED)


@contextmanager
def _connected_workers(options: Options, workers: int) -> Iterator[WorkerControl | None]:
    """Connect this process to the other workers that train the same share (part) of the jobs. Yield a
    `WorkerControl` in the first worker. Other workers execute its commands and then yield None. If there is
    only one process, yield None."""
    device = torch.device(options.device or "cpu")
    if workers > 1:
        position = read_position()
        assert position is not None, "the launcher has set the environment"
        position = replace(position, replicas=options.replicas, shards=options.shards)
        with connect_workers(position, options.device, device.index or 0) as control:
            yield control
        return
    if device.type == "cuda":
        # Kernels are launched on the current device, whatever device their tensors are on.
        torch.cuda.set_device(device)
    yield None


def _exit_with_launcher() -> None:
    """Wait until the launcher ends, and then end this process. If this process continued, its jobs would
    still be training when the run is resumed, and no launcher would collect their records."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a share is never the first process"
    wait([launcher.sentinel])
    os._exit(LOST)
