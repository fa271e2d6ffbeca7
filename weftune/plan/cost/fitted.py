"""Models of time and memory that a run fits to its own measurements, and the predictions of these models for
the next window.

A window is a few global batches of every job, planned and executed together. Predictions use models that are
refitted after every window. Plans use a versioned model, which is replaced rarely and is saved with the run,
so that a resumed run makes the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryFit, MemoryModel
from weftune.plan.cost.memory_fit import Peak, fit_memory, larger_factors, window_need
from weftune.plan.cost.refit import Times, refit_cost_model
from weftune.plan.cost.time import CostModel, JobShapes, PassTime, PassWork, StateTime, term_counts
from weftune.plan.program.program import Program

_FIT = {"state": float, "activations": float, "slack": float, "head": float, "error": int}

EVALUATION_SHARE = 1 / 3
"""Assumed ratio of the time of an evaluated row (token) to that of a trained row, whose backward is assumed
to take twice as long as its forward."""
RECENT = 20
"""Number of the latest windows (a few global batches of every job each) from which the seconds per row are
computed."""
RECENT_PASSES = 50
"""Number of recent passes whose mean counts (tokens, samples, jobs) predict those of the next passes."""


@dataclass(frozen=True, slots=True)
class WindowPrediction:
    """Predicted time and memory of a window (a few global batches of every job), computed before the window
    runs."""

    seconds: float | None
    """Predicted seconds of the window (a few global batches of every job). None if the time model was never
    fitted to measurements."""
    peak_bytes: int
    error_bytes: int
    """Maximum number of bytes by which earlier measured peaks exceeded the prediction of the fitted memory
    model."""
    source: str
    version: int
    changed: bool
    """Whether the jobs or the sample lengths differ from those of the previous window (a few global batches
    of every job)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measured time and memory of a window (a few global batches of every job)."""

    seconds: float
    peak_bytes: int
    is_window_peak: bool
    """Whether the memory peak was measured in this window alone rather than since the start of the run."""
    passes: Sequence[PassTime]
    steps: Sequence[StateTime]
    saves: Sequence[StateTime]

    def overhead_per_action(self) -> float:
        """Return the seconds per action that were spent outside passes, optimizer steps and saves."""
        states = (*self.steps, *self.saves)
        taken = sum(one.seconds for one in self.passes) + sum(one.seconds for one in states)
        actions = len(self.passes) + sum(one.jobs for one in states)
        return max(0.0, self.seconds - taken) / max(1, actions)

    def row_seconds(self) -> float | None:
        """Return the seconds per trained row (token), or None if the window had no passes."""
        rows = sum(one.tokens * (1.0 if one.training else EVALUATION_SHARE) for one in self.passes)
        return self.seconds / rows if rows else None


SHORTAGE_PARTS = 16
"""Number of equal parts into which the device memory beside the process and the base is divided. After a
device ran out of memory, later plans leave so many of these parts unused that more activations are
recomputed."""


@dataclass(slots=True)
class FittedModels:
    """The time and memory models of a run, with the measurements that they are fitted to."""

    initial_cost: CostModel
    """Time model that was known before the run, which all fits start from."""
    memory: MemoryModel
    """Memory model that plans use; at the start, the model known before the run."""
    first_seconds: float = 0.0
    """Additional seconds of the first pass of a process, for example to compile kernels."""
    version: int = 0
    """Number of times that the memory model used for plans was replaced."""
    windows: int = 0
    cost: CostModel = field(init=False)
    """Time model for predictions, which is refitted after every window (a few global batches of every
    job)."""
    fitted_memory: MemoryModel = field(init=False)
    """Memory model for predictions, which is refitted after every window (a few global batches of every
    job)."""
    initial_fit: MemoryFit = field(init=False)
    row_seconds: float | None = None
    """Seconds per row (token), by which windows (a few global batches of every job) are limited to a few
    seconds. None until `adopt_fitted_models` sets the value.
    """
    times: Times = field(default_factory=Times)
    row_times: list[float] = field(default_factory=list)
    """Seconds per row (token) in each of the last windows, which are a few global batches of every job
    each."""
    peaks: list[Peak] = field(default_factory=list)
    unused_decoder_bytes: Callable[[], int] = int
    """Function that returns the number of bytes that are reserved for text generation but were not used.
    Measured peaks lack these bytes, but plans must count them."""
    least_error: int = 0
    """Minimum number of bytes that are added to every predicted peak. The value is above 0 only after a
    device ran out of memory."""
    _last_window_content: object = None

    def __post_init__(self) -> None:
        self.cost, self.fitted_memory, self.initial_fit = self.initial_cost, self.memory, self.memory.fit

    def state_record(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to make the same plans, as a JSON-compatible dict."""
        return {
            "version": self.version,
            "windows": self.windows,
            "memory": asdict(self.memory.fit),
            "row_seconds": self.row_seconds,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the fitted models from a dict that `state_record` has returned. Raise ValueError if the
        dict is invalid."""
        try:
            # Runs started before the head was counted separately have not recorded it.
            memory = {"head": 0.0, **record["memory"]}
            fit = MemoryFit(**{name: type_(memory[name]) for name, type_ in _FIT.items()})
            self.version, self.windows = int(record["version"]), int(record["windows"])
            # Runs started before windows had a length in seconds have not recorded it.
            seconds = record.get("row_seconds")
            self.row_seconds = None if seconds is None else float(seconds)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no record of a run's models: {error}") from None
        self.memory = replace(self.memory, fit=fit)
        self.fitted_memory = self.memory

    def predict_window(
        self, program: Program, shapes: JobShapes, price: Callable[[Program], float | None] | None = None
    ) -> WindowPrediction:
        """Return the predicted time and memory of a window (a few global batches of every job). `price` is a
        function that returns the predicted seconds of the program; None selects the fitted time model."""
        content = _window_content(program)
        changed, self._last_window_content = content != self._last_window_content, content
        need = window_need(self.fitted_memory, list(shapes.values()), program)
        seconds = price(program) if price else self.cost.program_seconds(program, shapes)
        if seconds is not None and not self.windows:
            seconds += self.first_seconds
        return WindowPrediction(
            seconds=seconds,
            peak_bytes=need.total_bytes(self.fitted_memory.fit) - self.unused_decoder_bytes(),
            error_bytes=self.fitted_memory.fit.error,
            source="each stage's own passes" if price else self.cost.source,
            version=self.version,
            changed=changed,
        )

    def record_outcome(self, program: Program, shapes: JobShapes, outcome: Outcome) -> None:
        """Refit the time and memory models for predictions to the measurements of an executed window."""
        times = self.times
        if times.passes:
            # The first window includes setup that later windows do not repeat.
            times.overheads.append(outcome.overhead_per_action())
        times.passes += outcome.passes
        times.steps += outcome.steps
        times.saves += outcome.saves
        times.drop_old_measurements()
        self.cost = refit_cost_model(self.initial_cost, times)
        if outcome.is_window_peak or not self.peaks or outcome.peak_bytes > self.peaks[-1].measured_bytes:
            need = window_need(self.memory, list(shapes.values()), program)
            need = replace(need, resident_bytes=need.resident_bytes - self.unused_decoder_bytes())
            self.peaks.append(Peak(need, outcome.peak_bytes))
        self.fitted_memory = replace(self.memory, fit=fit_memory(self.peaks, self.initial_fit))
        if (seconds := outcome.row_seconds()) is not None:
            self.row_times = [*self.row_times, seconds][-RECENT:]
        self.windows += 1

    def tokens_within(self, seconds: float) -> int | None:
        """Return the number of tokens of a microbatch whose forward and backward are each predicted to take
        at most `seconds` seconds. The number of jobs, and the numbers of samples and other counts per token,
        are assumed to be those of the latest passes. Return None if no pass has been measured."""
        recent = [one.work for one in self.times.passes if one.training][-RECENT_PASSES:]
        if not recent:
            return None
        counts = zip(*(term_counts(work)[1:] for work in recent), strict=True)
        tokens, squares, samples, supervised, adapted, segments = (sum(column) for column in counts)
        typical = PassWork(
            tokens=tokens,
            squares=squares,
            samples=samples,
            supervised=supervised,
            adapted=adapted,
            segments=-(-segments // len(recent)),
        )
        return self.cost.tokens_within(seconds, typical)

    def misfit_reason(self, jobs: Sequence[JobShape]) -> str | None:
        """Return the reason why the jobs do not fit together, or None if they fit.

        Whether a single job can run alone is decided by the memory model as it was before the run, without
        later measurements, so that measurement noise never ends a job.
        """
        alone = replace(self.memory, fit=self.initial_fit)
        return (alone if len(jobs) == 1 else self.memory).misfit_reason(jobs)

    def recompute_more(self, jobs: Sequence[JobShape], max_tokens: int) -> bool:
        """Make later plans use less memory by recomputing more activations in the backward, after a device
        ran out of memory. Return False if no more activations can be recomputed."""
        before = self.memory.choose_recompute(jobs, max_tokens)
        room = self.memory.budget_bytes - self.memory.predict_need(jobs, 0).resident_bytes
        for part in range(1, SHORTAGE_PARTS):
            self.least_error = max(self.memory.fit.error, part * room // SHORTAGE_PARTS)
            memory = replace(self.memory, fit=replace(self.memory.fit, error=self.least_error))
            if memory.choose_recompute(jobs, max_tokens) != before:
                self.memory = memory
                return True
        return False

    def adopt_fitted_models(self) -> bool:
        """Make later plans use the fitted memory model and the measured seconds per row. To keep plans
        stable, this happens only after 1, 2, 4, 8, ... windows. Return whether plans change."""
        if self.windows & (self.windows - 1):
            return False
        # The slack is not adopted: memory that the process accumulates besides the jobs must not reject a job
        # that would run.
        error = max(self.fitted_memory.fit.error, self.least_error)
        fit = replace(self.fitted_memory.fit, slack=self.initial_fit.slack, error=error)
        # Replays of captured passes use memory that no counter shows, so factors of fused layers never
        # decrease.
        self.memory = replace(
            self.memory, fit=larger_factors(fit, self.initial_fit) if self.memory.uses_fused_ops else fit
        )
        if self.row_times:
            self.row_seconds = median(self.row_times)
        self.version += 1
        return True


def _window_content(program: Program) -> object:
    """Return the jobs and the sorted sample lengths of each pass in a program. Programs with equal content
    take equally long."""
    return [
        [
            (segment.job, sorted(placed.length for placed in segment.samples))
            for segment in microbatch.segments
        ]
        for _, microbatch in program.forward_passes()
    ]
