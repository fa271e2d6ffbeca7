"""The planner of windows: Programs (executable plans) for a few global batches of every job. A window is
planned while the previous one runs, and replanned if conditions have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from weftune.plan.cost.fitted import FittedModels
from weftune.plan.program.handover import Unfinished, unfinished_work
from weftune.plan.program.program import Program, Recompute
from weftune.plan.window.pace import WindowPace, count_fitting_rounds, shorten_windows
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing, plan_window
from weftune.trainer.engine import Engine
from weftune.trainer.job import PreparedJob
from weftune.trainer.planner import PlannerProcess

TURN_SECONDS = 0.1
"""Maximum predicted seconds of a forward or backward pass while a decoder waits to run between passes."""
SAME_LIMIT = 0.25
"""Relative change of the estimated limit of tokens per microbatch up to which the previous limit is kept.
Windows that were planned ahead thus stay valid, and captured passes keep their sizes."""

Cursors = Mapping[str, int]
"""Maps each job to the last optimizer step that it has begun before the next window (a few global batches of
every job) starts. That step may be unfinished."""
Unscored = Mapping[str, NDArray[np.int64]]
"""Maps each job that waits for its reference log-probabilities to the indices of the samples that it
scores."""


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A planned window: a Program for a few global batches of every job, and the part of each job in it."""

    program: Program
    job_windows: Sequence[JobWindow]
    rounds: int


@dataclass(frozen=True, slots=True)
class WindowAhead:
    """The next window (a few global batches of every job), which is planned while the current one runs, and
    the conditions for which it is planned."""

    cursors: Cursors
    capacity: int
    recompute: Recompute
    pace: WindowPace
    """Predictor of the window's seconds, which limits how many rounds (one global batch of every job each)
    the window has."""
    unfinished: Unfinished
    """Global batches that the current window will leave unfinished in the pipeline if it runs as planned."""
    future: Future[PlannedWindow]

    def is_valid_for(
        self,
        cursors: Cursors,
        capacity: int,
        recompute: Recompute,
        pace: WindowPace,
        unfinished: Unfinished,
    ) -> bool:
        """Return whether planning under the given conditions would give this window again. The pace
        (predicted seconds) determines only how many rounds, one global batch of every job each, the window
        has."""
        alike = (capacity, recompute, unfinished) == (self.capacity, self.recompute, self.unfinished)
        if not alike or not cursors.items() <= self.cursors.items():
            return False
        if pace == self.pace:
            return True
        planned = self.future.result()
        return count_fitting_rounds(planned.job_windows, pace) == planned.rounds


class Windows:
    """A planner of windows (a few global batches of every job each). It plans the next window in a background
    thread, and for a pipeline in another process."""

    def __init__(self, engine: Engine, fitted_models: FittedModels, jobs: Mapping[str, PreparedJob]) -> None:
        self.max_tokens = engine.choice.capacity
        """Maximum number of tokens in a microbatch, unless a sample is longer."""
        self.is_decoding: Callable[[], bool] = lambda: False
        """Function that returns whether a decoder waits to run between passes, which must then be short.
        Deterministic runs ignore the function, since their microbatches depend on nothing outside the
        jobs."""
        self._decoding_limit: int | None = None
        """Maximum number of tokens in a microbatch while sequences are decoded. None while nothing is
        decoded."""
        self._engine, self._executor, self._choice = engine, engine.executor, engine.choice
        self._fitted_models = fitted_models
        self._jobs = jobs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._process = PlannerProcess()
        self._window_ahead: WindowAhead | None = None

    def close(self) -> None:
        self._thread.shutdown()
        self._process.close()

    def next_window(self, starting_jobs: frozenset[str], unscored_samples: Unscored) -> Program:
        """Return the window (a few global batches of every job) that was planned ahead, without jobs that
        have left, if it still fits the attached jobs; otherwise plan a new one. Jobs in `starting_jobs` are
        evaluated first; jobs in `unscored_samples` score samples and do not train. If the capacity or the
        recomputed activations have changed, the returned window only finishes unfinished batches."""
        cursors, pace, ahead = self._job_cursors(), self._window_pace(), self._window_ahead
        capacity, recompute = self._capacity()
        unfinished = self._executor.unfinished
        if unfinished.batches and (capacity, recompute) != (unfinished.capacity, unfinished.recompute):
            return self.drain_window()
        is_valid = ahead is not None and ahead.is_valid_for(cursors, capacity, recompute, pace, unfinished)
        if ahead is None or starting_jobs or unscored_samples or not is_valid:
            pacing = self._pacing(cursors, capacity, recompute)
            limits = capacity, recompute, pace, unfinished, pacing
            return self._plan_window(cursors, starting_jobs, *limits, unscored_samples).program
        program, gone = ahead.future.result().program, ahead.cursors.keys() - cursors.keys()
        return program.without(*gone) if gone else program

    def drain_window(self) -> Program:
        """Return a window that only finishes the global batches that the last window left unfinished in the
        pipeline."""
        unfinished, cursors = self._executor.unfinished, self._job_cursors()
        windows = [self._jobs[name].job_window(step, 0, False) for name, step in cursors.items()]
        capacity, recompute = unfinished.capacity, unfinished.recompute
        pacing = self._pacing(cursors, capacity, recompute)
        return plan_window(windows, self._choice.layout, capacity, False, recompute, pacing, unfinished)

    def base_evaluation(self, names: Collection[str]) -> Program:
        """Return a window (the plan that is run next) that only evaluates the base, without adapters, on
        these jobs' held-out samples."""
        cursors, (capacity, recompute) = self._job_cursors(), self._capacity()
        windows = [self._jobs[name].base_window(cursors[name]) for name in names]
        return plan_window(windows, self._choice.layout, capacity, False, recompute, self._engine.pacing())

    def plan_ahead(self, program: Program) -> None:
        """Begin to plan, in the background, the global batches that follow those of the Program `program`."""
        cursors, pace, unfinished = self._job_cursors(), self._window_pace(), unfinished_work(program)
        for batch in program.batches:
            cursors[batch.job] = max(cursors[batch.job], batch.step)
        remaining = {
            name: step
            for name, step in cursors.items()
            if step < self._jobs[name].last_step or name in unfinished.steps
        }
        limits = program.capacity, program.recompute, pace, unfinished
        pacing = self._pacing(remaining, program.capacity, program.recompute)
        # Only a pipeline's plans take long: their orders and groups are searched for.
        plan = None if pacing is None else self._process.plan_window
        planned = self._thread.submit(self._plan_window, remaining, frozenset(), *limits, pacing, plan=plan)
        self._window_ahead = WindowAhead(remaining, *limits, planned)

    def _job_cursors(self) -> dict[str, int]:
        """Map each attached job to its last step that is complete or has begun."""
        begun = self._executor.unfinished.steps
        return {
            name: max(training.progress.step, begun.get(name, 0))
            for name, training in self._executor.attached.items()
        }

    def _plan_window(
        self,
        cursors: Cursors,
        starting_jobs: frozenset[str],
        capacity: int,
        recompute: Recompute,
        pace: WindowPace,
        unfinished: Unfinished,
        pacing: Pacing | None,
        unscored_samples: Unscored = MappingProxyType({}),
        plan: Callable[..., Program] | None = None,
    ) -> PlannedWindow:
        rounds, layout = self._choice.window_rounds, self._choice.layout
        windows = [
            self._jobs[name].score_window(step, unscored_samples[name])
            if name in unscored_samples
            else self._jobs[name].job_window(step, rounds, name in starting_jobs)
            for name, step in cursors.items()
        ]
        cut = shorten_windows(windows, pace)
        # Passes in tiles are not captured, so their microbatches need not be padded.
        ladder = self._executor.captures is not None and not recompute.tile_rows
        limits = self._choice.mechanisms.packing_limits
        program = (plan or plan_window)(cut, layout, capacity, ladder, recompute, pacing, unfinished, limits)
        return PlannedWindow(program, windows, count_fitting_rounds(windows, pace))

    def _pacing(self, names: Iterable[str], capacity: int, recompute: Recompute) -> Pacing | None:
        """Return the measured speeds and limits by which the next global batches of these jobs are planned in
        a pipeline, or None for other layouts."""
        pacing, memory = self._engine.pacing(), self._fitted_models.memory
        shapes = [self._jobs[name].shape for name in names]
        if pacing is None or not shapes:
            return pacing
        return replace(pacing, spare_microbatches=memory.choose_spare(shapes, capacity, recompute))

    def _capacity(self) -> tuple[int, Recompute]:
        """Return the maximum number of tokens per microbatch, and the activations that are recomputed to
        reach it."""
        shapes = [self._jobs[name].shape for name in self._executor.attached]
        memory, max_tokens = self._fitted_models.memory, self._max_tokens()
        recompute = memory.choose_recompute(shapes, max_tokens)
        return memory.choose_capacity(shapes, max_tokens, recompute), recompute

    def _max_tokens(self) -> int:
        """Return the maximum number of tokens in a microbatch. While sequences are decoded between passes,
        neither a forward nor a backward is predicted to take longer than `TURN_SECONDS`, once passes have
        been measured."""
        is_limited = self.is_decoding() and not self._engine.deterministic
        estimate = self._fitted_models.tokens_within(TURN_SECONDS) if is_limited else None
        limit = self._decoding_limit
        if estimate is None or limit is None or abs(estimate - limit) > SAME_LIMIT * limit:
            limit = self._decoding_limit = estimate
        return self.max_tokens if limit is None else min(self.max_tokens, limit)

    def _window_pace(self) -> WindowPace:
        if self._engine.deterministic:
            # Windows have all their rounds: which job joins at which step depends on no prediction.
            return WindowPace()
        recorded = self._fitted_models.row_seconds
        return self._choice.first_pace if recorded is None else WindowPace(recorded)
