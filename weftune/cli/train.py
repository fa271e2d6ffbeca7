"""`weftune train jobs.yaml`: train every job of the file together."""

from __future__ import annotations

import os
import runpy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli import early
from weftune.core.clock import Phase, count_imports, current_clock, phase, process_clock, use_clock
from weftune.errors import SpecError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from weftune.jobs.spec.spec import RunSpec
    from weftune.run.workers.groups import WorkerPosition
    from weftune.trainer.options import Options
    from weftune.trainer.trainer import Result, Trainer

SOME_FAILED, INTERRUPTED = 1, 130


def train(
    jobs: early.JobsFile,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results. Default: the file's `output`.")
    ] = None,
    device: early.DeviceOption = None,
    max_steps: early.MaxStepsOption = None,
    memory: early.MemoryOption = None,
    gpu_memory: early.GpuMemoryOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the output folder.")] = False,
    restart: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="With --resume: train this job again from the beginning."),
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="With --resume: resume this job although it failed."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --retry: new setting of that job."),
    ] = None,
    pipeline: early.PipelineOption = None,
    replicas: early.ReplicasOption = 1,
    shards: early.ShardsOption = "1",
    gpus: early.GpusOption = None,
    capacity: early.CapacityOption = None,
) -> None:
    """Train every job of a jobs file together; each becomes a PEFT adapter in the output folder."""
    named = {
        "--output": output,
        "--device": device,
        "--max-steps": max_steps,
        "--memory": memory,
    }
    processes = {
        "--pipeline": pipeline,
        "--gpus": gpus,
        "--replicas": replicas if replicas > 1 else None,
        "--shards": None if shards == "1" else shards,
        "--capacity": capacity,
        "--gpu-memory": gpu_memory,
    }
    again = ["train", str(jobs), *_flag_arguments(named)]
    repeated = {"--restart": restart, "--retry": retry, "--set": changes}
    more = ["--resume"] * resume
    more += [word for key, values in repeated.items() for one in values or () for word in (key, one)]
    with use_clock(process_clock()):
        from weftune.jobs.spec.retry import read_changes

        _refuse_without_resume(resume, restart, retry, changes)
        command = shlex.join(["weftune", *again, *_flag_arguments(processes), "--resume"])
        options = replace(
            early.read_options(
                device=device,
                memory=memory,
                gpu_memory=gpu_memory,
                pipeline=pipeline,
                replicas=replicas,
                shards=shards,
                gpus=gpus,
                capacity=capacity,
            ),
            resume=resume,
            restart=tuple(restart or ()),
            retry=tuple(retry or ()),
            changes=read_changes(changes or (), command, retry or ()),
            command=command,
        )
        # The environment alone decides whether this is one of several workers, before torch is imported.
        if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
            _run_worker(jobs, output, options, max_steps)
        else:
            _train_locally(_read_run(jobs, output, options), options, max_steps, again, more)


def _flag_arguments(values: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments of all options that have a value."""
    return [word for key, value in values.items() if value is not None for word in (key, str(value))]


def _refuse_without_resume(
    resume: bool, restart: list[str] | None, retry: list[str] | None, changes: list[str] | None
) -> None:
    if restart and not resume:
        raise UserError("--restart goes with --resume: it names the job of an earlier run to restart")
    if retry and not resume:
        raise UserError("--retry goes with --resume: it names the job of an earlier run to resume")
    if changes and not retry:
        raise UserError("--set goes with --retry JOB, which resumes with it; else edit the jobs file")


def _read_run(jobs: Path, output: Path | None, options: Options) -> RunSpec:
    """Read a jobs file, and raise one error that lists everything invalid that can be found without importing
    torch."""
    from weftune.jobs.store.inbox import added_runs
    from weftune.jobs.store.store import refuse_output
    from weftune.jobs.sweeps.record import proposed_trials
    from weftune.report.loggers import check_trackers

    run = early.read_jobs_file(jobs)
    run = replace(run, output=Path(output or run.output))
    known = [job.name for job in run.jobs]
    runs = [run, *(added_runs(run.output, known) if options.resume else ())]
    names = [job.name for one in runs for job in one.jobs]
    names += proposed_trials(run.output, [sweep.name for one in runs for sweep in one.sweeps])
    if unknown := [name for name in options.restart if name not in names]:
        raise SpecError(f"--restart {unknown[0]}: there is no such job; known: {', '.join(names)}")
    check_trackers(run.report_to)
    refuse_output(run.output, options.resume, options.command)
    with phase(Phase.TOKENISING):
        early.check_row_files(early.one_trial_per_sweep(run), includes_job_names=True)
    return run


def _train_locally(
    run: RunSpec,
    options: Options,
    max_steps: int | None,
    arguments: Sequence[str],
    extra_arguments: Sequence[str],
) -> None:
    """Train on this machine, in the requested number of processes or the number that the planner chooses.
    `arguments` is the command line of a worker without the options that set numbers of processes.
    `extra_arguments` are added to this command line at the first start only."""
    from weftune.launch.choice import planner_chooses_division

    if planner_chooses_division(options):
        options = _choose_processes(run, options, max_steps)
    devices: Sequence[str] = ()
    if options.starts_processes:
        from weftune.launch.requests import requested_shares

        devices = requested_shares(run, options)
    if len(devices) > 1 or options.workers_per_share == 1:
        _train_in_process(run, options, max_steps, devices)
    else:
        raise typer.Exit(_launch_processes(run, options, arguments, extra_arguments))


def _choose_processes(run: RunSpec, options: Options, max_steps: int | None) -> Options:
    """Return the options with the numbers of processes that the planner chooses for this machine, and print
    them with the reason."""
    from rich.console import Console

    from weftune.launch.choice import choose_processes
    from weftune.report.terminal import safe_output

    chosen, sentence = choose_processes(run, options, max_steps)
    Console(file=safe_output()).print(f"Weftune: {sentence}", highlight=False, markup=False, soft_wrap=True)
    return chosen


def _launch_processes(
    run: RunSpec, options: Options, arguments: Sequence[str], extra_arguments: Sequence[str]
) -> int:
    """Start a process for every shard of every stage of every replica and wait for them."""
    from weftune.launch.workers import launch

    processes = {
        "--pipeline": options.pipeline,
        "--replicas": options.replicas if options.replicas > 1 else None,
        "--shards": options.shards if options.shards > 1 else None,
        "--capacity": options.capacity,
        "--gpu-memory": None if options.gpu_memory is None else f"{options.gpu_memory}B",
    }
    words = [*arguments, *_flag_arguments(processes)]
    # The command line's module is given by name: a newly started process imports it for itself.
    main = partial(runpy.run_module, "weftune", run_name="__main__")
    return launch(
        main, [*words, *extra_arguments], [*words, "--resume"], options.workers_per_share, run.output
    )


def _run_worker(jobs: Path, output: Path | None, options: Options, max_steps: int | None) -> None:
    """Run this process as one worker of a pipeline. The first worker runs the training loop, and the others
    follow its instructions."""
    from weftune.jobs.spec.checks import refuse_kinds_on_shards
    from weftune.jobs.spec.read import read_run
    from weftune.launch.workers import connect_workers
    from weftune.run.workers.groups import read_position, restart_count
    from weftune.trainer.options import AUTO

    worker = read_position()
    assert worker is not None, "the environment names a worker"
    if options.gpus is not None:
        raise UserError(
            f"--gpus {options.gpus or 'all'}: torchrun has started {worker.workers} workers, stages of one "
            "pipeline, and --gpus starts processes by itself; start weftune without torchrun, or omit --gpus"
        )
    if options.shards == AUTO:
        raise UserError(
            f"--shards auto: torchrun has started {worker.workers} workers; write how many shards there are"
        )
    worker = assign_replica_position(worker, options.replicas, options.shards)
    worker = replace(worker, is_ring=options.gpu_memory is not None and worker.stages > 1)
    if options.pipeline and options.pipeline != worker.stages:
        raise UserError(
            f"--pipeline {options.pipeline}: torchrun has started {worker.workers} workers; leave it out"
        )
    with connect_workers(worker, options.device) as control:
        if control is None:
            return
        run = read_run(jobs)
        refuse_kinds_on_shards(run.jobs, options.shards)
        run = replace(run, output=Path(output or run.output))
        if restart_count() > 0:
            # torchrun has restarted all workers with the original command line.
            options = replace(options, resume=run.output.exists(), restart=(), retry=(), changes={})
        _train_in_process(run, replace(options, staff=control), max_steps)


def _train_in_process(
    run: RunSpec, options: Options, max_steps: int | None, devices: Sequence[str] = ()
) -> None:
    """Train in this process, which is the first worker if there are several. With several `devices`, divide
    the jobs instead among groups of processes, the first process of each on one of these devices."""
    with count_imports():
        from rich.console import Console

        from weftune.report.terminal import LiveView, safe_output
        from weftune.trainer.train import make_trainer

    workers = ""
    if options.staff is not None:
        workers = f", in {_workers_text(options.staff.connections.position)}"
    else:
        shares = len(devices)
        workers = _shares_text(shares, options) if shares > 1 else ""
        options = options if shares > 1 else replace(options, pipeline=None, gpus=None)
    console = Console(file=safe_output())
    console.print(f"Weftune: {_job_count_text(run)} on {run.base.model}{workers}", highlight=False)
    codes: set[int] = set()
    with LiveView(console, []) as view:
        trainer = make_trainer(run, max_steps=max_steps, options=options, view=view)
        if len(devices) > 1:
            from weftune.launch.split import train_shares

            results, codes = train_shares(run, trainer, devices)
        else:
            results = trainer.run()
    _print_results(console, trainer, results, codes)


def _job_count_text(run: RunSpec) -> str:
    """Return a phrase such as `4 jobs` or `1 job and 24 trials`, counting trials that `tpe` proposes
    later."""
    from weftune.jobs.sweeps.halving import trial_count
    from weftune.report.words import count_noun

    jobs = len(run.jobs) - sum(len(sweep.trials) for sweep in run.sweeps)
    trials = sum(trial_count(sweep.spec) for sweep in run.sweeps)
    counts = ((jobs, "job"), (trials, "trial"))
    return " and ".join(count_noun(count, noun) for count, noun in counts if count)


def _shares_text(shares: int, options: Options) -> str:
    """Return a phrase that says how the jobs are divided, such as `, shared by 2 devices` or, if every share
    of the jobs has several workers, `, in 2 shares of 2 stages`."""
    workers = options.workers_per_share
    if workers == 1:
        return f", shared by {shares} devices"
    from weftune.run.workers.groups import WorkerPosition

    team = WorkerPosition(0, workers, replicas=options.replicas, shards=options.shards)
    return f", in {shares} shares of {_workers_text(team)}"


def _workers_text(worker: WorkerPosition) -> str:
    """Return a phrase such as `2 stages`, `2 replicas of 2 stages` or, with shards, `2 replicas of 2 stages
    of 4 shards`. Workers with several stages each are called `2 workers`."""
    stages = f"{worker.stages} {'workers' if worker.is_ring else 'stages'}"
    named = {
        f"{worker.replicas} replicas": worker.replicas,
        stages: worker.stages,
        f"{worker.shards} shards": worker.shards,
    }
    return " of ".join(text for text, count in named.items() if count > 1) or stages


def _print_results(
    console: Console, trainer: Trainer, results: Mapping[str, Result], codes: set[int]
) -> None:
    """Print the table of all jobs and the wall time, and set the exit code. `codes` are the exit codes of the
    processes that trained shares of the jobs."""
    from weftune.jobs.store.status import State
    from weftune.jobs.sweeps.record import records_in
    from weftune.report.effort import wall_time_sentence
    from weftune.report.ending import print_ending
    from weftune.report.read import read_run as read_records

    with phase(Phase.REPORT):
        print_ending(console, read_records(trainer.output))
    clock = current_clock()
    assert clock is not None, "the command started one"
    console.print(wall_time_sentence(clock.read()), highlight=False, soft_wrap=True)
    if early.USER_ERROR_CODE in codes:
        raise typer.Exit(early.USER_ERROR_CODE)
    if trainer.interrupted:
        resumed = f"Interrupted. Resume with {trainer.options.command}"
        console.print(resumed, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
    # A sweep is expected to drop trials, and some may fail: it has failed only if it has no best trial.
    sweeps = records_in(trainer.output)
    trials = {trial.name for sweep in sweeps for trial in sweep.trials}
    others = [result for name, result in results.items() if name not in trials]
    if any(result.state is not State.SUCCEEDED for result in others) or not all(one.best for one in sweeps):
        raise typer.Exit(SOME_FAILED)


def assign_replica_position(worker: WorkerPosition, replicas: int, shards: int = 1) -> WorkerPosition:
    if worker.workers % (replicas * shards):
        options = f"--replicas {replicas}" + (f" --shards {shards}" if shards > 1 else "")
        raise UserError(
            f"{options}: {worker.workers} workers cannot be divided into {replicas} equal "
            f"pipelines; start a multiple of {replicas * shards}"
        )
    return replace(worker, replicas=replicas, shards=shards)
