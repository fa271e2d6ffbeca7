"""What a run learns of time and memory while it goes on, and what it promises for the next window.

Promises are made by models that are refitted after every window. Plans are made by the models of a version,
which changes at few windows and is recorded: a resumed run plans with the version that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryFit, MemoryModel
from weftune.plan.cost.memory_fit import Peak, fit_memory, safer, window_need
from weftune.plan.cost.refit import Times, WindowTime, refit
from weftune.plan.cost.time import CostModel, JobShapes, PassTime, StateTime
from weftune.plan.program.program import Program

_FIT = {"state": float, "activations": float, "slack": float, "head": float, "error": int}

EVALUATION_PART = 1 / 3
"""What a row that is evaluated takes of one that is trained: a forward, and no backward of twice that."""
RECENT = 20
"""Windows whose pace is remembered."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a window is expected to take, before it runs."""

    seconds: float | None
    """None where nothing like it has been measured."""
    peak_bytes: int
    error_bytes: int
    """By how much earlier peaks lay above the fit."""
    source: str
    version: int
    changed: bool
    """Whether its jobs or the lengths of its samples differ from the window before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a window took."""

    seconds: float
    peak_bytes: int
    own_peak: bool
    """Whether the peak is this window's, or the highest so far."""
    passes: Sequence[PassTime]
    steps: Sequence[StateTime]
    saves: Sequence[StateTime]

    def rest(self) -> WindowTime:
        """What none of its measured actions took."""
        states = (*self.steps, *self.saves)
        taken = sum(one.seconds for one in self.passes) + sum(one.seconds for one in states)
        return WindowTime(len(self.passes) + sum(one.jobs for one in states), self.seconds - taken)

    def row_seconds(self) -> float | None:
        """For each row that was trained; None where no pass was made."""
        rows = sum(one.tokens * (1.0 if one.training else EVALUATION_PART) for one in self.passes)
        return self.seconds / rows if rows else None


@dataclass(slots=True)
class Learned:
    known: CostModel
    """Before the run."""
    memory: MemoryModel
    """That plans are made by; at the start also what is known before the run."""
    first_seconds: float = 0.0
    """What the first pass of a process takes beyond the time model."""
    version: int = 0
    """How often that was replaced."""
    windows: int = 0
    cost: CostModel = field(init=False)
    """Refitted after every window, as is `fitted`."""
    fitted: MemoryModel = field(init=False)
    start: MemoryFit = field(init=False)
    row_seconds: float | None = None
    """That the length of windows is planned by; None before the first version."""
    times: Times = field(default_factory=Times)
    row_times: list[float] = field(default_factory=list)
    """Seconds a row in the last windows."""
    peaks: list[Peak] = field(default_factory=list)
    _before: object = None

    def __post_init__(self) -> None:
        self.cost, self.fitted, self.start = self.known, self.memory, self.memory.fit

    def recorded(self) -> dict[str, Any]:
        """What a resumed run plans by."""
        return {
            "version": self.version,
            "windows": self.windows,
            "memory": asdict(self.memory.fit),
            "row_seconds": self.row_seconds,
        }

    def resume(self, record: Mapping[str, Any]) -> None:
        """Go on from what was recorded; ValueError for anything else."""
        try:
            # Runs that were begun before the head was counted alone have recorded nothing of it.
            memory = {"head": 0.0, **record["memory"]}
            fit = MemoryFit(**{name: type_(memory[name]) for name, type_ in _FIT.items()})
            self.version, self.windows = int(record["version"]), int(record["windows"])
            # Runs that were begun before windows had a length in seconds have not recorded any.
            seconds = record.get("row_seconds")
            self.row_seconds = None if seconds is None else float(seconds)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no record of a run's models: {error}") from None
        self.memory = replace(self.memory, fit=fit)
        self.fitted = self.memory

    def promise(
        self, program: Program, shapes: JobShapes, price: Callable[[Program], float | None] | None = None
    ) -> Promise:
        """`price` stands for the time model, where several devices share a window."""
        content = _content(program)
        changed, self._before = content != self._before, content
        need = window_need(self.fitted, list(shapes.values()), program)
        seconds = price(program) if price else self.cost.program_seconds(program, shapes)
        if seconds is not None and not self.windows:
            seconds += self.first_seconds
        return Promise(
            seconds=seconds,
            peak_bytes=need.total(self.fitted.fit),
            error_bytes=self.fitted.fit.error,
            source="each stage's own passes" if price else self.cost.source,
            version=self.version,
            changed=changed,
        )

    def learn(self, program: Program, shapes: JobShapes, outcome: Outcome) -> None:
        """Refit the models that promise with an executed window."""
        times = self.times
        if times.passes:
            # The first window also sets up what the others find ready.
            times.windows.append(outcome.rest())
        times.passes += outcome.passes
        times.steps += outcome.steps
        times.saves += outcome.saves
        times.forget()
        self.cost = refit(self.known, times)
        if outcome.own_peak or not self.peaks or outcome.peak_bytes > self.peaks[-1].measured:
            need = window_need(self.memory, list(shapes.values()), program)
            self.peaks.append(Peak(need, outcome.peak_bytes))
        self.fitted = replace(self.memory, fit=fit_memory(self.peaks, self.start))
        if (seconds := outcome.row_seconds()) is not None:
            self.row_times = [*self.row_times, seconds][-RECENT:]
        self.windows += 1

    def why_not(self, jobs: Sequence[JobShape]) -> str | None:
        """Why these jobs do not fit together, or None.

        Whether a job can run at all, alone, is judged by what was known before: noise of the run ends no job.
        """
        alone = replace(self.memory, fit=self.start)
        return (alone if len(jobs) == 1 else self.memory).why_not(jobs)

    def adopt(self) -> bool:
        """After the first window and whenever their number has doubled, plan by what was learned."""
        if self.windows & (self.windows - 1):
            return False
        # The slack stays: what the process gathers beside the jobs must not turn away one that would run.
        fit = replace(self.fitted.fit, slack=self.start.slack)
        # Replays of captured passes take memory that no counter shows, so fused layers never count for less.
        self.memory = replace(self.memory, fit=safer(fit, self.start) if self.memory.fused else fit)
        if self.row_times:
            self.row_seconds = median(self.row_times)
        self.version += 1
        return True


def _content(program: Program) -> object:
    """Who is in a window, and the lengths of the samples in each of its passes."""
    return [
        [
            (segment.job, sorted(placed.length for placed in segment.samples))
            for segment in microbatch.segments
        ]
        for _, microbatch in program.compute()
    ]
