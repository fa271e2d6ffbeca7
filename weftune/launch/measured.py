"""Measurements of a plan and of its ablations (the same plan without one optimisation) on this machine. Each
measurement trains a few windows (a few global batches of every job), as `weftune train` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from weftune.errors import UserError
from weftune.jobs.spec.spec import RunSpec
from weftune.jobs.store.status import State
from weftune.launch.api import train
from weftune.plan.outlook.forecast import Ablation
from weftune.report.read import read_run as read_records
from weftune.trainer.options import Options

WINDOWS = 3
"""Number of windows (a few global batches of every job each) that are trained per measurement. The first
window is not counted, since its plan uses guessed speeds and its passes begin slowly."""


@dataclass(frozen=True, slots=True)
class MeasuredAblations:
    """Measured times of a plan and of its ablations (the same plan without one optimisation)."""

    step_seconds: tuple[float, float]
    """Seconds per round (one global batch of every job) of the plan itself, measured before all ablations and
    after them. Their difference shows by how much measurements vary."""
    ablations: tuple[Ablation, ...]
    """Ablations of the plan, in which one optimisation each is disabled. An ablation has a measured time if a
    run has an option that disables the optimisation."""


def measure_plan(
    run: RunSpec,
    options: Options,
    ablations: Sequence[Ablation],
    rounds: int,
    round_tokens: float,
    show: Callable[[str], None],
) -> MeasuredAblations:
    """Train the jobs of `run` with `options` and with the options of each ablation (one optimisation
    disabled), in folders that are deleted afterwards, and return the measured times. `rounds` is the number
    of rounds (one global batch of every job each) that are planned together, and `round_tokens` the mean
    number of tokens of a round. `show` is called with a sentence before each measurement."""
    run = without_evaluations(run)

    def measure(name: str, options: Options) -> float:
        show(f"Measuring {name}.")
        return round_tokens * _token_seconds(run, options, WINDOWS * rounds)

    before = measure("the plan", options)
    measured = [
        replace(
            row,
            measured_step_seconds=measure(
                f"{row.mechanism}: {row.alternative}", replace(options, **row.options)
            ),
        )
        if row.options
        else row
        for row in ablations
    ]
    return MeasuredAblations((before, measure("the plan again", options)), tuple(measured))


def select_jobs(run: RunSpec, names: Collection[str]) -> RunSpec:
    """Return the run with only these jobs. Trials of sweeps become ordinary jobs."""
    return replace(run, jobs=tuple(job for job in run.jobs if job.name in names), sweeps=(), report_to=())


def without_evaluations(run: RunSpec) -> RunSpec:
    """Return the run without its evaluations. A pipeline runs empty after each evaluation, which would hide
    the benefit of mechanisms that avoid draining."""
    return replace(run, jobs=tuple(replace(job, eval=None, early_stop=None, keep="last") for job in run.jobs))


def _token_seconds(run: RunSpec, options: Options, max_steps: int) -> float:
    """Train the jobs of `run` and return the seconds per token. The first window, the global batches that are
    planned together at the start, is not counted."""
    with TemporaryDirectory(prefix="weftune-") as folder:
        output = Path(folder) / "output"
        results = train(run, output=output, max_steps=max_steps, options=options, progress=False)
        windows = [window for window in read_records(output).windows if window.tokens]
    for name, result in results.items():
        if result.state is not State.SUCCEEDED:
            raise UserError(f"--measure: job {name} has not ended its steps: {result.reason}")
    if len(windows) < 2:
        raise UserError(
            "--measure: the jobs end within their first window, which is not counted; give them more steps"
        )
    return sum(one.seconds for one in windows[1:]) / sum(one.tokens for one in windows[1:])
