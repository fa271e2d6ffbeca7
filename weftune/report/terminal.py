"""The terminal output of training: a live table, or plain lines if there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from threading import RLock
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weftune.jobs.store.status import State
from weftune.jobs.sweeps.record import (
    SweepRecord,
    expected_steps_left,
    leading_trials,
    rung_rows,
    rung_sentence,
    state_counts,
)
from weftune.report.read import JobRecord
from weftune.report.words import (
    count_noun,
    duration_text,
    loss_text,
    printable_line,
    rate_text,
    trial_state_text,
)

STATE_STYLES = {
    "queued": "dim",
    "running": "cyan",
    "paused": "yellow",
    "interrupted": "yellow",
    "succeeded": "green",
    "failed": "bold red",
    "cancelled": "yellow",
}
TRIAL_STYLES = {"waiting": "dim", "resting": "yellow", "dropped": "dim", "finished": "green"}
"""Styles in which the terminal shows the states that only trials of a sweep have."""

_REMEMBERED_SECONDS = 60.0
"""Seconds over which training speeds are averaged: long enough to span several windows (a few global batches
of every job each), short enough to follow changes."""
_MIN_INTERVAL_SECONDS = 0.25
_REDRAW_SECONDS = 0.1
_DRAW_SHARE = 0.05
"""Maximum fraction of the run's time that is spent on drawing the live view, since a frame with many rows
takes long to draw."""
_MANY = 64
"""Maximum number of jobs up to which, without a terminal, a line is printed about each job's progress. With
more jobs, such lines would slow down training, so that each line is about all jobs together."""
_TOGETHER_SECONDS = 10.0
"""Seconds between two printed lines about all jobs together."""
_STOPPED = ("failed", "paused", "cancelled")
_REASONS = 4
_FRAME_LINES = _REASONS + 4
"""Number of lines that the live view has in addition to the rows of jobs."""
_LEADERS = 3
_SWEEP_LINES = 3
"""Number of terminal lines that the live view reserves for each sweep."""


class Pace:
    """The training speed of a job or of the whole run, measured over the last minute."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, int, int]] = deque()
        """Time in seconds, total steps and total tokens at the end of each recent burst of progress reports
        (the reports about one step of every job arrive together)."""
        self._burst = float("-inf")
        """Start time, in seconds, of the latest burst of progress reports."""

    def add(self, current_time: float, step: int, tokens: int) -> None:
        # Jobs report in bursts, which say nothing about speed: only the end of each is kept.
        if current_time - self._burst < _MIN_INTERVAL_SECONDS:
            self._moments.pop()
        else:
            self._burst = current_time
        self._moments.append((current_time, step, tokens))
        while len(self._moments) > 2 and self._moments[1][0] < current_time - _REMEMBERED_SECONDS:
            self._moments.popleft()

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate_per_second(2)

    def remaining_seconds(self, steps: int) -> float | None:
        rate = self._rate_per_second(1)
        return steps / rate if rate else None

    def _rate_per_second(self, index: int) -> float | None:
        if len(self._moments) < 2:
            return None
        first, last = self._moments[0], self._moments[-1]
        return (last[index] - first[index]) / (last[0] - first[0]) if last[0] > first[0] else None


class LiveView:
    """A live view of the jobs of a run; the trainer calls `update` whenever a job has made progress."""

    def __init__(
        self, console: Console, jobs: Sequence[JobRecord], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._rows = {row.name: row for row in jobs}
        self._sweeps: dict[str, SweepRecord] = {}
        self._trials: dict[str, str] = {}
        """Maps each trial to its state in its sweep, such as waiting or dropped."""
        self._started = clock()
        self._next_draw = self._started + _REDRAW_SECONDS
        self._next_line = self._started + _TOGETHER_SECONDS
        self._paces = {row.name: Pace() for row in jobs}
        self._overall = Pace()
        self._steps = sum(row.step for row in jobs)
        self._tokens = sum(row.trained_tokens for row in jobs)
        """Running totals of the steps and tokens of all jobs. The totals are updated with each report instead
        of summed anew, since there may be thousands of jobs."""
        self._lock = RLock()
        """Lock of the rows of jobs, which the trainer changes while rich's thread draws them."""
        self._live = (
            Live(console=console, get_renderable=self._view_content, refresh_per_second=1)
            if _supports_redraw(console)
            else None
        )

    def __enter__(self) -> LiveView:
        for row in self._rows.values():
            self._paces[row.name].add(self._started, row.step, row.trained_tokens)
        self._overall.add(self._clock(), self._steps, self._tokens)
        if self._live is not None:
            self._live.start()
            self._draw_frame()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._draw_frame()
            self._live.stop()

    def update(self, row: JobRecord) -> None:
        """Show the new progress of a job. A job that is not in the table yet is added."""
        with self._lock:
            # Progress from before the job joined does not count as speed.
            before = self._rows.get(row.name) or JobRecord(
                name=row.name, step=row.step, trained_tokens=row.trained_tokens
            )
            pace = self._paces.setdefault(row.name, Pace())
            self._rows[row.name] = row
            self._steps += row.step - before.step
            self._tokens += row.trained_tokens - before.trained_tokens
            if row.step != before.step or row.trained_tokens != before.trained_tokens:
                pace.add(self._clock(), row.step, row.trained_tokens)
                self._overall.add(self._clock(), self._steps, self._tokens)
        if self._live is None:
            self._print_change(before, row, pace)
        elif self._clock() >= self._next_draw:
            self._draw_frame()

    def sweep(self, record: SweepRecord) -> None:
        """Show the new state of a sweep: the states of its trials, the steps at which they are compared, and
        its winners."""
        with self._lock:
            before = self._sweeps.get(record.name)
            self._sweeps[record.name] = record
            self._trials |= {trial.name: trial.state for trial in record.trials}
        if self._live is None:
            if before is None or (before.decisions, before.best) != (record.decisions, record.best):
                self.note("  ".join(line.strip() for line in _sweep_lines(record)))
        elif self._clock() >= self._next_draw:
            self._draw_frame()

    def _print_change(self, previous_row: JobRecord, row: JobRecord, pace: Pace) -> None:
        """Print a line about an important change of a job if there is no terminal. With many jobs, print
        totals at intervals instead."""
        if len(self._rows) <= _MANY and row.name not in self._trials:
            if _is_notable_change(previous_row, row):
                self.note(_progress_line(row, pace))
            return
        if row.state != previous_row.state and row.state in _STOPPED and self._trials.get(row.name) != "left":
            # The line about its rung reports a trial that was dropped from its sweep.
            self.note(_progress_line(row, pace))
        if self._clock() >= self._next_line:
            self.note(self._overall_line([self._use_trial_state(one) for one in self._rows.values()]).plain)
            self._next_line = self._clock() + _TOGETHER_SECONDS

    def note(self, text: str) -> None:
        """Print a sentence for the user above the table."""
        self._console.print(Text(printable_line(text)), soft_wrap=True, highlight=False)

    def _draw_frame(self) -> None:
        assert self._live is not None
        began = self._clock()
        self._live.refresh()
        drawn = self._clock()
        self._next_draw = drawn + max(_REDRAW_SECONDS, (drawn - began) / _DRAW_SHARE)

    def _view_content(self) -> Group:
        """Return the current content of the live view: the table of jobs with the lines around it."""
        with self._lock:
            rows = [self._use_trial_state(row) for row in self._rows.values()]
            leading = {
                trial.name for record in self._sweeps.values() for trial in leading_trials(record, _LEADERS)
            }
            room = self._console.height - _FRAME_LINES - _SWEEP_LINES * len(self._sweeps)
            shown = _select_rows(rows, room, self._trials.keys(), leading)
            table = [_live_table(shown, self._paces)] if shown or not self._sweeps else []
            hidden = len(rows) - len(shown)
            noun = "trial" if self._sweeps and len(self._trials) == len(rows) else "job"
            more = [Text(f"… and {count_noun(hidden, noun)} more", style="dim")] if hidden else []
            lines = [
                Text(printable_line(line), style="" if at else "bold", no_wrap=True, overflow="ellipsis")
                for record in self._sweeps.values()
                for at, line in enumerate(_sweep_lines(self._mark_running_trials(record)))
            ]
            failed = [row for row in rows if row.state == "failed" and row.name in self._trials]
            others = [row for row in shown if row.state not in TRIAL_STYLES and row not in failed]
            return Group(*lines, *table, *more, *_reason_lines([*others, *failed]), self._overall_line(rows))

    def _mark_running_trials(self, record: SweepRecord) -> SweepRecord:
        """Return the record of a sweep in which trials that were admitted after the record was written are
        marked as running."""
        trials = tuple(
            replace(trial, state="running")
            if trial.state == "waiting"
            and trial.name in self._rows
            and self._rows[trial.name].state == "running"
            else trial
            for trial in record.trials
        )
        return replace(record, trials=trials)

    def _use_trial_state(self, row: JobRecord) -> JobRecord:
        """Return the row of a trial with the trial's state in its sweep, if this is more specific than the
        state of the job."""
        state = trial_state_text(self._trials.get(row.name, ""))
        if state in TRIAL_STYLES and row.state in ("queued", "cancelled", "succeeded"):
            return replace(row, state=cast("State", state))
        return row

    def _overall_line(self, rows: Sequence[JobRecord]) -> Text:
        found = Counter(str(row.state) for row in rows)
        parts = [
            Text(f"{found[state]} {printable_line(state)}", style=_state_style(state))
            for state in dict.fromkeys((*STATE_STYLES, *TRIAL_STYLES, *found))
            if found[state]
        ]
        plain = [row for row in rows if row.name not in self._trials]
        steps = {name: self._rows[name].step for name in self._trials if name in self._rows}
        pending_steps = sum(row.steps - row.step for row in plain if row.state in ("queued", "running"))
        pending_steps += sum(expected_steps_left(record, steps) for record in self._sweeps.values())
        parts += [
            Text(f"{rate_text(self._overall.tokens_per_second)} tokens/s"),
            Text(f"{duration_text(self._clock() - self._started)} elapsed"),
        ]
        if pending_steps:
            parts.append(Text(f"{duration_text(self._overall.remaining_seconds(pending_steps))} left"))
        return Text(" · ").join(parts)


def _supports_redraw(console: Console) -> bool:
    """Return whether a live view can be shown, as in a terminal, or in a notebook with the widgets that rich
    needs."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def _select_rows(
    rows: Sequence[JobRecord],
    max_rows: int,
    trials: Collection[str] = (),
    leading_trials: Collection[str] = (),
) -> list[JobRecord]:
    """Return the rows that fit on the screen: running jobs before queued and ended jobs, otherwise in the
    order of the jobs file. If not all rows fit, only the leading and running trials of a sweep are shown;
    lines above the table summarise the other trials."""
    if len(rows) <= max(max_rows, 3):
        return list(rows)
    importance = {"running": 0, "failed": 1, "paused": 1, "queued": 2}
    telling = [
        row
        for row in rows
        if row.name not in trials or row.name in leading_trials or row.state in ("running", "paused")
    ]
    order = sorted(telling, key=lambda row: (row.name not in leading_trials, importance.get(row.state, 3)))
    chosen = order[: max(max_rows, 3)]
    names = {row.name for row in chosen}
    return [row for row in rows if row.name in names]


def _live_table(rows: Sequence[JobRecord], paces: dict[str, Pace]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("job", overflow="ellipsis", no_wrap=True, max_width=28)
    table.add_column("state", no_wrap=True)
    table.add_column("", min_width=8)
    for heading in ("step", "loss", "validation", "tokens/s", "left"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        pace, running, style = paces[row.name], row.state == "running", _state_style(row.state)
        table.add_row(
            Text(printable_line(row.name)),
            Text(row.state, style=style),
            ProgressBar(total=max(row.steps, 1), completed=row.step, width=18, complete_style=style),
            f"{row.step}/{row.steps}",
            loss_text(row.loss),
            loss_text(row.eval_loss),
            rate_text(pace.tokens_per_second if running else None),
            duration_text(pace.remaining_seconds(row.steps - row.step) if running else None),
        )
    return table


def _state_style(state: str) -> str:
    return STATE_STYLES.get(state) or TRIAL_STYLES.get(state, "")


def _sweep_lines(record: SweepRecord) -> list[str]:
    """Return lines of text about a sweep: the states of its trials, the steps at which they are compared, and
    its leading trials."""
    seats = " · ".join(f"{count} {trial_state_text(state)}" for state, count in state_counts(record).items())
    rungs = " · ".join(rung_sentence(row) for row in rung_rows(record)[-3:])
    first = leading_trials(record, _LEADERS)
    leading = "  ".join(
        f"{place}. {trial.name} {loss_text(trial.score)}" for place, trial in enumerate(first, start=1)
    )
    lines = [f"{record.name}: {count_noun(record.count, 'trial')}, {seats}"]
    return lines + [f"  {line}" for line in (rungs, leading) if line]


def _reason_lines(rows: Sequence[JobRecord]) -> list[Text]:
    """Return a line with the reason for each job that failed, stopped or waits. Jobs that need the user's
    action come first."""
    stopped = ("failed", "paused")
    told = sorted((row for row in rows if row.reason), key=lambda row: row.state not in stopped)[:_REASONS]
    return [
        Text(printable_line(f"{row.name}: {row.reason}"), style="dim", no_wrap=True, overflow="ellipsis")
        for row in told
    ]


def _is_notable_change(previous_row: JobRecord, row: JobRecord) -> bool:
    """Return whether the state or the validation loss of a job changed, or another tenth of its steps is
    done."""
    tenths = 10 * row.step // max(row.steps, 1), 10 * previous_row.step // max(row.steps, 1)
    return row.state != previous_row.state or row.eval_loss != previous_row.eval_loss or tenths[0] > tenths[1]


def _progress_line(row: JobRecord, pace: Pace) -> str:
    parts = [row.name, row.state, f"step {row.step}/{row.steps}"]
    if row.loss is not None:
        parts.append(f"loss {loss_text(row.loss)}")
    if row.eval_loss is not None:
        parts.append(f"validation {loss_text(row.eval_loss)}")
    if row.state == "running" and pace.tokens_per_second:
        parts.append(f"{rate_text(pace.tokens_per_second)} tokens/s")
        parts.append(f"{duration_text(pace.remaining_seconds(row.steps - row.step))} left")
    if row.reason:
        parts.append(row.reason)
    return "  ".join(parts)


class _SafeOutput:
    """A wrapper of an output stream that discards all further output after a write has failed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            self._discard_output(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._discard_output(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _discard_output(self, error: Exception) -> None:
        """Redirect all later output to the null device, including what the interpreter flushes at exit."""
        if isinstance(error, UnicodeError):
            raise error
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        trouble = error.strerror if isinstance(error, OSError) else str(error)
        with suppress(OSError, ValueError):
            print(f"weftune: nothing more can be printed ({trouble}); training continues.", file=sys.stderr)


def safe_output() -> IO[str]:
    """Return a wrapper of the standard output whose errors do not end a run. The first error is reported, and
    later output is discarded."""
    return cast("IO[str]", _SafeOutput(sys.stdout))
