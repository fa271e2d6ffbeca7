"""The functions of the Python API, `train("jobs.yaml")` and `sweep(base, job)`, and the result of a sweep."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from weftune.errors import Mistake, SpecError, UserError
from weftune.jobs.spec.layer import plain_values
from weftune.jobs.spec.read import parse_run, read_run
from weftune.jobs.spec.spec import RunSpec
from weftune.jobs.store.status import train_command
from weftune.jobs.sweeps.halving import sort_value
from weftune.jobs.sweeps.record import read_record
from weftune.launch.choice import choose_processes, planner_chooses_division
from weftune.launch.requests import requested_shares
from weftune.launch.split import train_in_processes
from weftune.launch.supervise import exit_unguarded_script
from weftune.report.ending import print_ending
from weftune.report.read import read_run as read_records
from weftune.report.terminal import LiveView
from weftune.trainer.journal import View
from weftune.trainer.loop import Callback
from weftune.trainer.options import ALL, AUTO, Options
from weftune.trainer.train import make_trainer
from weftune.trainer.trainer import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The result of a sweep: its trials, the best first, and the winner."""

    name: str
    path: Path
    """Folder of the sweep, which contains the folder `best` with the winner's adapter."""
    rows: list[dict[str, Any]]
    """One dict per trial, the best trial first, with the trial's name, tried values, state, score, last step
    and the reason why it ended."""
    best: Result | None
    """Result of the winner; None if no trial has finished."""
    results: dict[str, Result]
    """Maps the name of each trial to its result."""

    @property
    def table(self) -> Any:
        """The rows of the result, one per trial, as a pandas DataFrame, or as a list if pandas is not
        installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            return self.rows
        return pandas.DataFrame(self.rows)


def train(
    jobs: str | Path | Mapping[str, Any] | RunSpec,
    *,
    output: str | Path | None = None,
    max_steps: int | None = None,
    resume: bool = False,
    deterministic: bool = False,
    gpus: int | Literal["all"] | None = None,
    pipeline: int | Literal["auto"] | None = None,
    replicas: int | None = None,
    shards: int | Literal["auto"] | None = None,
    progress: bool = True,
    options: Options | None = None,
    view: View | None = None,
    callback: Callback | None = None,
) -> dict[str, Result]:
    """Train every job of a jobs file, or of a dict with the content of such a file.

    Return a dict from each job's name to its result. Paths in a dict of jobs are relative to the working
    folder, and `data` may be the rows themselves. `resume` continues the run in an existing output folder.
    With `deterministic`, here or in the file, two runs on the same device give bitwise equal results. `gpus`,
    `pipeline`, `replicas` and `shards` mean the same as the options of `weftune train`: training then runs in
    new processes, which import the calling script, so the call must be under `if __name__ == "__main__":`.
    Without these arguments, the planner decides how several GPUs are used, unless there is a `callback`.
    Terminals and notebooks show the progress and, at the end, the table of `weftune train`, unless `progress`
    is False or a `view` is given, which receives the progress instead.
    """
    exit_unguarded_script()
    if isinstance(jobs, Mapping):
        run = parse_run(plain_values(jobs), Path.cwd())
    else:
        run = jobs if isinstance(jobs, RunSpec) else read_run(jobs)
    processes = {"gpus": gpus, "pipeline": pipeline, "replicas": replicas, "shards": shards}
    options = _options_with_processes(options or Options(), processes)
    options = replace(options, resume=True) if resume else options
    options = replace(options, deterministic=True) if deterministic or run.deterministic else options
    if isinstance(jobs, str | Path) and not options.command:
        options = replace(options, command=train_command(jobs, output, max_steps, processes))
    console = Console()
    if _can_choose_processes(run, options, callback):
        options, sentence = choose_processes(run, options, max_steps)
        if progress and view is None:
            console.print(f"Weftune: {sentence}", highlight=False, markup=False, soft_wrap=True)
    devices = requested_shares(run, options)
    if len(devices) == 1 and options.workers_per_share == 1:
        # One share in one process is an ordinary run.
        options = replace(options, gpus=None, pipeline=None)
    if options.starts_processes and callback is not None:
        raise UserError(
            "callback: it would be called in the processes that train, not in this one; leave it out, or "
            "train in one process, without gpus, pipeline, replicas and shards"
        )
    if options.starts_processes and isinstance(jobs, Mapping):
        _refuse_unpicklable(run)

    def run_trainer(trainer_view: View | None) -> dict[str, Result]:
        trainer = make_trainer(run, output=output, max_steps=max_steps, options=options, view=trainer_view)
        if options.starts_processes:
            return train_in_processes(run, trainer, devices)
        return trainer.run(callback)

    if view is not None or not progress:
        return run_trainer(view)
    with LiveView(console, []) as live:
        results = run_trainer(live)
    print_ending(console, read_records(Path(output or run.output)))
    return results


def _can_choose_processes(run: RunSpec, options: Options, callback: Callback | None) -> bool:
    """Return whether the planner chooses how many processes train. This is the case if a number is requested
    as `auto`, or if no number is requested, the jobs can be pickled for other processes, and there is no
    callback."""
    if not planner_chooses_division(options):
        return False
    return AUTO in (options.pipeline, options.shards) or (callback is None and _is_picklable(run))


def _is_picklable(run: RunSpec) -> bool:
    try:
        _refuse_unpicklable(run)
    except SpecError:
        return False
    return True


def _refuse_unpicklable(run: RunSpec) -> None:
    """Raise SpecError if the jobs cannot be pickled and sent to other processes."""
    try:
        pickle.dumps(run)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SpecError(
            f"the jobs cannot be sent to the processes that train them: {error}; write their data to files, "
            "or train in one process"
        ) from None


def _options_with_processes(options: Options, numbers: Mapping[str, Any]) -> Options:
    """Return the options with the numbers of processes in `numbers` that are not None. Raise SpecError if a
    number is invalid."""
    given = {key: number for key, number in numbers.items() if number is not None}
    for key, number in given.items():
        if key == "gpus" and number == "all":
            given[key] = ALL
        elif key in ("pipeline", "shards") and number == "auto":
            given[key] = AUTO
        elif not isinstance(number, int) or isinstance(number, bool) or number < 1:
            word = {"gpus": ', or "all"', "replicas": ""}.get(key, ', or "auto"')
            raise SpecError(Mistake(key, f"must be a whole number from 1{word}, got {number!r}"))
    return replace(options, **given)


def sweep(
    base: str | Mapping[str, Any],
    job: Mapping[str, Any],
    *,
    output: str | Path = "output",
    max_steps: int | None = None,
    resume: bool = False,
    deterministic: bool = False,
    gpus: int | Literal["all"] | None = None,
    pipeline: int | Literal["auto"] | None = None,
    replicas: int | None = None,
    shards: int | Literal["auto"] | None = None,
    progress: bool = True,
    options: Options | None = None,
    view: View | None = None,
    callback: Callback | None = None,
) -> SweepResult:
    """Train the trials of one job that has the key `sweep`, as in a jobs file, and return their results.

    `base` has the value of the key `base` in a jobs file. The other arguments have the same meaning as those
    of `train`.
    """
    if "sweep" not in job:
        raise SpecError(Mistake("sweep", "the job needs this key: what is tried, such as {over: {…}}"))
    results = train(
        {"base": base, "jobs": [job]},
        output=output,
        max_steps=max_steps,
        resume=resume,
        deterministic=deterministic,
        gpus=gpus,
        pipeline=pipeline,
        replicas=replicas,
        shards=shards,
        progress=progress,
        options=options,
        view=view,
        callback=callback,
    )
    return sweep_result(Path(output) / str(job["name"]), results)


def sweep_result(folder: Path, results: Mapping[str, Result]) -> SweepResult:
    """Return the result of the sweep whose folder is given; `results` maps the run's jobs to their
    results."""
    record = read_record(folder)
    assert record is not None, "a run with this sweep has written it"
    # Finished trials by their rank, followed by those with the most steps.
    ranks = {name: rank for rank, name in enumerate(record.best)}
    ordered = sorted(
        record.trials,
        key=lambda trial: (
            ranks.get(trial.name, len(ranks)),
            trial.state != "finished",
            bool(trial.warning),
            -len(trial.at_rungs),
            sort_value(trial.score, record.mode),
        ),
    )
    rows = [
        {
            "trial": trial.name,
            **trial.values,
            "state": trial.state,
            record.metric: trial.score,
            "step": int(results[trial.name].metrics["step"]) if trial.name in results else 0,
            "reason": trial.reason,
        }
        for trial in ordered
    ]
    best = results[record.best[0]] if record.best else None
    return SweepResult(name=record.name, path=folder, rows=rows, best=best, results=dict(results))
