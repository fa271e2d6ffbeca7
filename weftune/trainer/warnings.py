"""Warnings about a run: an adapter that training has ruined, or a CPU that is much slower than planned."""

from __future__ import annotations

import math
import time

import psutil
import torch

from weftune.jobs.store.status import JobStatus
from weftune.report.words import loss_text
from weftune.run.training.state import StepOutcome

UNIFORM_TOLERANCE = 1e-3
"""Relative distance of a loss from ln(vocabulary size) within which the model counts as predicting all tokens
with equal probability."""
VANISHED_GRADIENT = 1e-6
"""Gradient norm up to which an adapter counts as no longer learning."""
LOSS_TOLERANCE = 1e-6
"""Relative difference below which two validation losses count as equal."""
SLOW_RATIO = 2.0
"""Ratio of measured to planned seconds of training above which a run counts as slow."""
MIN_COMPARED_SECONDS = 10.0
"""Minimum total seconds of training that are compared with the plan, since a pause of the system distorts
shorter times."""

# -- adapters ------------------------------------------------------------------------------------------


def collapse_warning(outcome: StepOutcome, vocabulary: int) -> str:
    """Return a warning if, at an optimizer step, predictions are uniform over the vocabulary and the gradient
    has vanished. Return "" otherwise."""
    uniform = math.log(vocabulary)
    if outcome.grad_norm > VANISHED_GRADIENT or abs(outcome.loss - uniform) > UNIFORM_TOLERANCE * uniform:
        return ""
    return (
        f"the adapter has collapsed: all {vocabulary:,} tokens are equally likely (loss "
        f"{loss_text(outcome.loss)}) and the gradient is zero; train it again with a lower learning_rate"
    )


def base_warning(job: JobStatus) -> str:
    """Return the warning for a finished job whose adapter is no better than the base alone. Return an empty
    string if the adapter is better."""
    if job.score is not None and job.base_score is not None and job.score < job.base_score:
        return (
            f"the metric of its answers, {job.score:.4g}, is below that of the base without the adapter "
            f"({job.base_score:.4g}); train it longer, or with another learning_rate"
        )
    kept, base = job.eval_loss, job.base_loss
    if kept is None or base is None:
        return ""
    if kept > base * (1 + LOSS_TOLERANCE):
        return (
            f"the validation loss {loss_text(kept)} is above that of the base without the adapter "
            f"({loss_text(base)}); train it longer, or with another learning_rate"
        )
    if kept >= base * (1 - LOSS_TOLERANCE) and job.best_step == 0:
        return f"no step improved on the base's validation loss ({loss_text(base)})"
    return ""


# -- the CPU -------------------------------------------------------------------------------------------


class CpuLoad:
    """The load of this machine's cores since the object was created."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _process_seconds()

    def other_cores(self) -> float:
        """Return the average number of cores that other processes have kept busy since this object was
        created."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        return max(0.0, (_busy_seconds() - self._busy - _process_seconds() + self._own) / seconds)


class SlowRun:
    """A monitor that compares the measured time of windows (a few global batches of every job) with their
    planned time, and warns once if the run is slow."""

    def __init__(self, has_profile: bool) -> None:
        """Create the monitor. `has_profile` says whether the plan is based on a profile of this machine or on
        a data sheet."""
        self._has_profile = has_profile
        self._load: CpuLoad | None = CpuLoad()
        self._planned = self._seconds = 0.0

    def add(self, planned_seconds: float | None, seconds: float) -> str:
        """Add the planned and measured seconds of a window (a few global batches of every job). Return the
        warning if the run is slow, otherwise ""."""
        if self._load is None or planned_seconds is None:
            return ""
        self._planned += planned_seconds
        self._seconds += seconds
        if self._seconds < MIN_COMPARED_SECONDS:
            return ""
        others, cores = self._load.other_cores(), psutil.cpu_count() or 1
        threads = torch.get_num_threads()
        sentence = slow_run_warning(self._planned, self._seconds, others, cores, threads, self._has_profile)
        self._load, self._planned, self._seconds = None if sentence else CpuLoad(), 0.0, 0.0
        return sentence


def slow_run_warning(
    planned_seconds: float, seconds: float, other_cores: float, cores: int, threads: int, has_profile: bool
) -> str:
    """Return the warning that the run is slow, and why; "" if it is not.

    `other_cores` is the number of `cores` that other processes keep busy; this run uses `threads` of them.
    If the cores are free, only a plan based on a profile of the machine shows that something is wrong: few
    runs reach the speed of a data sheet.
    """
    if seconds < SLOW_RATIO * planned_seconds:
        return ""
    what = f"warning: training takes {seconds / planned_seconds:.1f} times as long as planned"
    if other_cores + threads > 1.1 * cores:
        return (
            f"{what}: other processes keep {other_cores:.1f} of the {cores} cores busy, and this run needs "
            f"{threads}; end them, or wait until they have ended"
        )
    if not has_profile:
        return ""
    return (
        f"{what}, although other processes keep only {other_cores:.1f} of the {cores} cores busy; measure "
        "again what this machine reaches: weftune doctor --profile"
    )


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _process_seconds() -> float:
    """Return the CPU seconds that this process and its children have used."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system
    return total
