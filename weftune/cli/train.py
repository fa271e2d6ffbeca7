"""`weftune train jobs.yaml`: train every job of the file together."""

from __future__ import annotations

import os
import runpy
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli.options import bytes_of
from weftune.core.clock import Phase, current, importing, phase, process_clock, running

if TYPE_CHECKING:
    from rich.console import Console

    from weftune.jobs.spec.spec import RunSpec
    from weftune.plan.layout.stage_count import StageCount
    from weftune.run.workers.groups import WorkerPlace
    from weftune.run.workers.messages import Staff
    from weftune.trainer.trainer import Result

SOME_FAILED, INTERRUPTED = 1, 130
AUTO = 0
"""The number of stages that stands for the planner's choice."""


def train(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")],
    output: Annotated[Path | None, typer.Option(help="Where results go; else the file's `output`.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; else the best there is.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="End every job after so many steps.")] = None,
    memory: Annotated[str | None, typer.Option(help="What the run may take, such as 8GiB.")] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="What the run may take of each GPU; a larger base is streamed from host memory."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the output holds.")] = False,
    restart: Annotated[
        list[str] | None, typer.Option(metavar="JOB", help="With --resume: train this job anew.")
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="With --resume: go on with this job although it failed."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --retry: what that job goes on with."),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Cut the base into so many stages, a process for each."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="So many copies of the base, or of its stages, share every batch.")
    ] = 1,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N|all", help="The whole base on each of so many GPUs, and a share of the jobs."
        ),
    ] = None,
) -> None:
    """Train every job of a jobs file together; each becomes a PEFT adapter in the output folder."""
    asked = TrainAsked(
        jobs, output, device, max_steps, memory, resume, tuple(restart or ()), replicas, gpu_memory,
        tuple(retry or ()), tuple(changes or ()), pipeline, gpus,
    )  # fmt: skip
    with running(process_clock()):
        _train_as(asked)


def _train_as(asked: TrainAsked) -> None:
    """Train in this process or in those that the options request; refuse options that exclude each other."""
    from weftune.errors import UserError

    asked.refuse()
    pipeline, gpus = asked.pipeline, asked.gpus
    stages = 1 if pipeline is None else stages_of(pipeline)
    if asked.gpu_memory is not None:
        refuse_beside_gpu_memory(asked.gpu_memory, pipeline, gpus, asked.replicas)
    place = _place()
    if gpus is not None:
        refuse_beside_gpus(gpus, pipeline, asked.replicas, place)
        gpus_of(gpus)
    if place is None:
        _check_early(asked)
    if gpus is not None:
        from weftune.run.measure.devices import devices_asked

        _train_on(asked, devices_asked(gpus_of(gpus), asked.device))
        return
    if place is None:
        _train_here(asked, stages)
        return
    ring = asked.gpu_memory is not None and place.workers > 1
    place = replace(with_replicas(place, asked.replicas), ring=ring)
    if pipeline is not None and stages not in (AUTO, place.stages):
        raise UserError(f"--pipeline {pipeline}: torchrun has started {place.workers} workers; leave it out")
    from weftune.run.workers.groups import attempt

    if attempt() > 0:
        # torchrun has restarted all workers with the original command line.
        asked = asked.again()
    _join(asked, place)


@dataclass(frozen=True, slots=True)
class TrainAsked:
    """Options of the command line."""

    jobs: Path
    output: Path | None
    device: str | None
    max_steps: int | None
    memory: str | None
    resume: bool
    restart: tuple[str, ...]
    replicas: int = 1
    gpu_memory: str | None = None
    retry: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    pipeline: str | None = None
    gpus: str | None = None

    @property
    def resume_command(self) -> str:
        """The shell command that resumes this run."""
        return shlex.join(["weftune", *self.resumed().words()])

    def resumed(self) -> TrainAsked:
        return replace(self, resume=True, restart=(), retry=(), changes=())

    def refuse(self) -> None:
        """Raise UserError if an option lacks the one it goes with, or its value cannot be read."""
        from weftune.cli.early import refuse_device
        from weftune.errors import UserError

        if self.restart and not self.resume:
            raise UserError("--restart goes with --resume: it names the job of an earlier run to train anew")
        if self.retry and not self.resume:
            raise UserError("--retry goes with --resume: it names the job of an earlier run to go on with")
        if self.changes and not self.retry:
            raise UserError("--set goes with --retry JOB, which goes on with that; else edit the jobs file")
        refuse_device(self.device)
        for text, option in ((self.memory, "--memory"), (self.gpu_memory, "--gpu-memory")):
            if text is not None:
                bytes_of(text, option)

    def again(self) -> TrainAsked:
        """Return the options for a restart after a failure: it resumes what the first attempt has written."""
        from weftune.jobs.spec.read import read_run

        is_there = (self.output or read_run(self.jobs).output).exists()
        return replace(self.resumed(), resume=is_there)

    def words(self) -> list[str]:
        """Return the options as a command line, which starts the workers of a pipeline."""
        options = {
            "--output": self.output,
            "--device": self.device,
            "--max-steps": self.max_steps,
            "--memory": self.memory,
            "--gpu-memory": self.gpu_memory,
            "--pipeline": self.pipeline,
            "--gpus": self.gpus,
        }
        words = ["train", str(self.jobs)]
        words += [word for key, value in options.items() if value is not None for word in (key, str(value))]
        words += ["--replicas", str(self.replicas)] if self.replicas > 1 else []
        words += ["--resume"] if self.resume else []
        repeated = {"--restart": self.restart, "--retry": self.retry, "--set": self.changes}
        return [*words, *(word for key, values in repeated.items() for one in values for word in (key, one))]


def _place() -> WorkerPlace | None:
    """Return this worker's place, or None if this is the only process.

    The environment alone decides that, before torch is imported.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        return None
    from weftune.run.workers.groups import place_here

    return place_here()


def _check_early(asked: TrainAsked) -> None:
    """Report all mistakes that can be found without torch, before anything is printed."""
    from weftune.cli.early import one_of_each, read_early, refuse_rows
    from weftune.errors import SpecError
    from weftune.jobs.store.store import refuse_output
    from weftune.jobs.sweeps.read import refuse_shares
    from weftune.jobs.sweeps.record import proposed_trials
    from weftune.report.loggers import check_trackers

    run = read_early(asked.jobs)
    output = Path(asked.output or run.output)
    proposed = proposed_trials(output, [sweep.name for sweep in run.sweeps])
    names = [*(job.name for job in run.jobs), *proposed]
    if unknown := [name for name in asked.restart if name not in names]:
        raise SpecError(f"--restart {unknown[0]}: there is no such job; known: {', '.join(names)}")
    if asked.gpus not in (None, "1", "all"):
        refuse_shares(run.sweeps)
    check_trackers(run.report_to)
    refuse_output(output, asked.resume, asked.resume_command)
    with phase(Phase.TOKENISING):
        refuse_rows(one_of_each(run), named=True)


def _train_here(asked: TrainAsked, stages: int) -> None:
    """Train on this machine, in the processes that were requested or that the planner chooses."""
    shares = 1
    if stages == AUTO:
        choice = _chosen(asked)
        stages, shares = choice.stages, choice.shares
    if shares > 1:
        from weftune.run.measure.devices import devices_asked

        _train_on(asked, devices_asked(shares, asked.device))
    elif stages * asked.replicas > 1:
        raise typer.Exit(_launch(asked, stages))
    else:
        _train(asked, None)


def _chosen(asked: TrainAsked) -> StageCount:
    """Return the planner's choice of stages or shares for this machine, and print the reason."""
    from rich.console import Console

    from weftune.base.load import device_named, inspect
    from weftune.jobs.spec.read import read_run
    from weftune.plan.cost.profile import find_profile
    from weftune.plan.layout.choose import choose_workers
    from weftune.report.terminal import safe_output
    from weftune.run.measure.devices import devices_here
    from weftune.run.measure.memory import steady_budget_bytes
    from weftune.run.profile import key_here

    device = device_named(asked.device)
    run = read_run(asked.jobs)
    budget = bytes_of(asked.memory) if asked.memory else None
    if budget is None and run.deterministic:
        budget = steady_budget_bytes(device)
    shape = inspect(run.base, device)
    machine = devices_here(device, budget).shared_by(asked.replicas)
    machine = replace(machine, profile=find_profile(key_here(shape, device)))
    # With replicas, every job trains on all of them, so there are no shares. Trials are not divided into
    # shares either, since they are compared while they train.
    jobs = len(run.jobs) if asked.replicas == 1 and not run.sweeps else 1
    choice = choose_workers(shape, machine, jobs)
    Console(file=safe_output()).print(f"Weftune: {choice.why}", highlight=False, soft_wrap=True)
    return choice


def _launch(asked: TrainAsked, stages: int) -> int:
    """Start a process for every stage of every replica and wait for them."""
    from weftune.base.load import inspect
    from weftune.jobs.spec.read import read_run
    from weftune.launch.workers import launch
    from weftune.plan.layout.cut import cut_layers

    run = read_run(asked.jobs)
    shape = inspect(run.base)
    if stages > 1:
        cut_layers(shape, stages)
    workers = stages * asked.replicas
    # The command line's module is given by name: a newly started process imports it for itself.
    main = partial(runpy.run_module, "weftune", run_name="__main__")
    return launch(main, asked.words(), asked.resumed().words(), workers, asked.output or Path(run.output))


def _join(asked: TrainAsked, place: WorkerPlace) -> None:
    """Run as one worker of a pipeline: the first one trains, the others follow its instructions."""
    from weftune.launch.workers import joined

    with joined(place, asked.device) as staff:
        if staff is not None:
            _train(asked, staff)


def _train(asked: TrainAsked, staff: Staff | None) -> None:
    with importing():
        from rich.console import Console

        from weftune.base.load import shape_at_hand
        from weftune.jobs.spec.read import read_run
        from weftune.jobs.spec.retry import read_changes
        from weftune.report.terminal import LiveView, safe_output
        from weftune.trainer.train import trainer_for
        from weftune.trainer.trainer import Options

    run = read_run(asked.jobs, shape_at_hand)
    console = Console(file=safe_output())
    workers = f", in {_named(staff.wires.place)}" if staff else ""
    console.print(f"Weftune: {_counted(run)} on {run.base.model}{workers}", highlight=False)
    most = bytes_of(asked.memory) if asked.memory else None
    options = Options(
        device=asked.device,
        resume=asked.resume,
        restart=asked.restart,
        retry=asked.retry,
        changes=read_changes(asked.changes),
        memory=most,
        gpu_memory=bytes_of(asked.gpu_memory, "--gpu-memory") if asked.gpu_memory else None,
        staff=staff,
        command=asked.resume_command,
    )
    with LiveView(console, []) as view:
        trainer = trainer_for(run, output=asked.output, max_steps=asked.max_steps, options=options, view=view)
        results = trainer.run()
    _finish(console, asked, trainer.output, results, trainer.interrupted)


def _train_on(asked: TrainAsked, devices: tuple[str, ...]) -> None:
    """Train a share of the jobs on each of these devices; one device is an ordinary run."""
    with importing():
        from rich.console import Console

        from weftune.base.load import shape_at_hand
        from weftune.jobs.spec.read import read_run
        from weftune.jobs.spec.retry import read_changes
        from weftune.launch.split import train_shares
        from weftune.report.terminal import LiveView, safe_output
        from weftune.trainer.trainer import Options

    if len(devices) == 1:
        _train(asked, None)
        return
    run = read_run(asked.jobs, shape_at_hand)
    console = Console(file=safe_output())
    shared_by = f"shared by {len(devices)} devices"
    console.print(f"Weftune: {_counted(run)} on {run.base.model}, {shared_by}", highlight=False)
    most = bytes_of(asked.memory) if asked.memory else None
    options = Options(
        resume=asked.resume,
        restart=asked.restart,
        retry=asked.retry,
        changes=read_changes(asked.changes),
        memory=most,
        command=asked.resume_command,
    )
    with LiveView(console, []) as view:
        shared = train_shares(
            run, devices, output=asked.output, max_steps=asked.max_steps, options=options, view=view
        )
    _finish(console, asked, shared.output, shared.results, shared.interrupted, shared.mistaken)


def _counted(run: RunSpec) -> str:
    """Return text such as `4 jobs` or `1 job and 24 trials`; trials yet to be proposed by `tpe` count."""
    from weftune.jobs.sweeps.halving import trial_count
    from weftune.report.words import plural

    jobs = len(run.jobs) - sum(len(sweep.trials) for sweep in run.sweeps)
    trials = sum(trial_count(sweep.spec) for sweep in run.sweeps)
    counts = ((jobs, "job"), (trials, "trial"))
    return " and ".join(plural(count, noun) for count, noun in counts if count)


def _finish(
    console: Console,
    asked: TrainAsked,
    folder: Path,
    results: Mapping[str, Result],
    interrupted: bool,
    mistaken: bool = False,
) -> None:
    """Print the table of all jobs and how the wall time was spent, and set the exit code."""
    from weftune.cli.options import MISTAKE
    from weftune.jobs.store.status import State
    from weftune.jobs.sweeps.record import records_in
    from weftune.report.effort import wall_sentence
    from weftune.report.ending import print_ending
    from weftune.report.read import read_run as read_records

    with phase(Phase.REPORT):
        print_ending(console, read_records(folder))
    clock = current()
    assert clock is not None, "the command started one"
    console.print(wall_sentence(clock.read()), highlight=False, soft_wrap=True)
    if mistaken:
        raise typer.Exit(MISTAKE)
    if interrupted:
        resumed = f"Interrupted. Go on with {asked.resume_command}"
        console.print(resumed, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
    # A sweep is expected to drop trials, and some may fail: it has failed only if it has no best trial.
    sweeps = records_in(folder)
    trials = {trial.name for sweep in sweeps for trial in sweep.trials}
    others = [result for name, result in results.items() if name not in trials]
    if any(result.state is not State.SUCCEEDED for result in others) or not all(one.best for one in sweeps):
        raise typer.Exit(SOME_FAILED)


def _named(place: WorkerPlace) -> str:
    """Return `2 stages`, `2 replicas` or `2 replicas of 2 stages`; `2 workers` if stages may take turns."""
    stages = f"{place.stages} {'workers' if place.ring else 'stages'}"
    replicas = f"{place.replicas} replicas"
    if place.replicas == 1:
        return stages
    return replicas if place.stages == 1 else f"{replicas} of {stages}"


def with_replicas(place: WorkerPlace, replicas: int) -> WorkerPlace:
    from weftune.errors import UserError

    if place.workers % replicas:
        raise UserError(
            f"--replicas {replicas}: {place.workers} workers cannot be divided into {replicas} equal "
            f"pipelines; start a multiple of {replicas}"
        )
    return replace(place, replicas=replicas)


def gpus_of(text: str) -> int | None:
    """Return the number that follows --gpus; None means all."""
    from weftune.errors import UserError

    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--gpus {text}: write all, or how many: 1 or more")
    return int(text)


def refuse_beside_gpus(gpus: str, pipeline: str | None, replicas: int, place: WorkerPlace | None) -> None:
    from weftune.errors import UserError

    if place is not None:
        raise UserError(
            f"--gpus {gpus}: torchrun has started {place.workers} workers, stages of one pipeline, and "
            "--gpus starts processes by itself; start weftune without torchrun, or leave --gpus out"
        )
    if replicas > 1:
        raise UserError(
            f"--gpus {gpus} gives every GPU jobs of its own, --replicas {replicas} a part of every batch; "
            "choose one: with several jobs, --gpus is the faster"
        )
    if pipeline == "auto":
        raise UserError(f"--pipeline auto looks at every GPU by itself; leave it or --gpus {gpus} out")
    if pipeline is not None:
        raise UserError(
            f"--gpus {gpus} puts the whole base on each GPU, --pipeline {pipeline} a stage; choose one: "
            "where the base fits one GPU, --gpus is the faster"
        )


def refuse_beside_gpu_memory(memory: str, pipeline: str | None, gpus: str | None, replicas: int) -> None:
    from weftune.errors import UserError

    if gpus is not None or replicas > 1:
        raise UserError(
            f"--gpu-memory {memory} streams a base that is larger than the GPU; --gpus and --replicas want "
            "all of it on each: leave it out, or stream over several GPUs with --pipeline"
        )
    if pipeline == "auto":
        raise UserError(
            f"--gpu-memory {memory}: --pipeline auto counts the GPUs that hold the base without streaming; "
            "write how many to stream it over, such as --pipeline 2"
        )


def stages_of(text: str) -> int:
    """Return the number that follows --pipeline, or `AUTO`."""
    from weftune.errors import UserError

    if text == "auto":
        return AUTO
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"--pipeline {text}: write auto, or how many stages: 2 or more")
    return int(text)
