"""Time and memory of a run: predictions beside measurements for each window (a few global batches of every
job), and the wall time by phase.

Errors of predictions are averaged only over windows whose jobs or lengths differ from the window before.
Windows that compile kernels or capture a CUDA graph are averaged separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from weftune.core.clock import Phase, WallTime
from weftune.report.read import WindowLine
from weftune.report.words import NO_VALUE, bytes_text, count_noun, duration_text

COLUMNS = (
    "window", "jobs", "passes", "predicted", "measured", "off", "predicted peak", "peak", "off", "",
)  # fmt: skip
MIN_WINDOWS, MAX_ERROR = 4, 0.25
"""Minimum number of windows (a few global batches of every job each), and maximum mean relative error of
their predictions, for which the report's headline mentions the predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean relative errors of the predicted seconds and of the predicted memory peaks of a run's windows (a
    few global batches of every job each)."""

    windows: int
    seconds: float | None
    peak: float | None


def prediction_errors(windows: Sequence[WindowLine], *, includes_compilation: bool) -> Errors:
    """Return the mean relative errors of predicted times and peaks, over the windows (a few global batches of
    every job each) whose jobs or sample lengths had changed. If `includes_compilation`, only windows that
    compiled kernels or captured graphs are counted, and otherwise only all others."""
    counted = [
        window
        for window in windows
        if window.changed and bool(window.compiled_passes) == includes_compilation
    ]
    seconds = [abs(off) for window in counted if (off := seconds_error(window)) is not None]
    peaks = [abs(off) for window in counted if (off := peak_error(window)) is not None]
    return Errors(
        windows=len(seconds),
        seconds=fmean(seconds) if seconds else None,
        peak=fmean(peaks) if peaks else None,
    )


def seconds_error(window: WindowLine) -> float | None:
    """Return the relative error of the predicted seconds of a window (a few global batches of every job). The
    error is negative if the window took longer than predicted."""
    return _relative_error(window.predicted_seconds, window.seconds)


def peak_error(window: WindowLine) -> float | None:
    return _relative_error(window.predicted_peak_bytes, window.peak_bytes)


def window_rows(windows: Sequence[WindowLine]) -> list[tuple[str, ...]]:
    """Return one table row per window (a few global batches of every job), with the columns `COLUMNS`."""
    return [
        (
            str(number),
            str(window.jobs),
            str(window.microbatches),
            _seconds_text(window.predicted_seconds),
            _seconds_text(window.seconds),
            error_text(seconds_error(window)),
            bytes_text(window.predicted_peak_bytes),
            bytes_text(window.peak_bytes),
            error_text(peak_error(window)),
            _window_note(window),
        )
        for number, window in enumerate(windows, start=1)
    ]


def headline(windows: Sequence[WindowLine]) -> str | None:
    """Return one line about the errors of the predicted times and memory. Return None if too few windows were
    predicted, or if the predictions were inaccurate, which also happens on a busy machine."""
    found = prediction_errors(windows, includes_compilation=False)
    if found.windows < MIN_WINDOWS or found.seconds is None or found.seconds > MAX_ERROR:
        return None
    memory = "" if found.peak is None else f", peak memory by {found.peak:.1%}"
    counted = count_noun(found.windows, "window")
    return f"Predicted times were off by {found.seconds:.1%}{memory} on average, over {counted}."


def error_sentences(windows: Sequence[WindowLine]) -> list[str]:
    """Return sentences for the table of windows: about the errors of the predictions, and about the source of
    the first prediction."""
    changed, unsettled = (
        prediction_errors(windows, includes_compilation=False),
        prediction_errors(windows, includes_compilation=True),
    )
    told = []
    if changed.seconds is not None:
        memory = "" if changed.peak is None else f" and peak memory by {changed.peak:.1%}"
        told.append(
            f"Predicted time was off by {changed.seconds:.1%}{memory} on average, over "
            f"{count_noun(changed.windows, 'window')} whose jobs or lengths changed. "
            "Other work on the machine makes windows slower than predicted."
        )
    if unsettled.windows and unsettled.seconds is not None:
        told.append(
            f"Counted apart: {count_noun(unsettled.windows, 'window')} with a first pass of its kind, or "
            f"with one that was compiled or captured, {unsettled.seconds:.1%}."
        )
    if windows and (off := seconds_error(first := windows[0])) is not None:
        told.append(
            f"The first window, {first.source}: {_seconds_text(first.predicted_seconds)} predicted, "
            f"{_seconds_text(first.seconds)} measured ({error_text(off)})."
        )
    return told


def error_text(fraction: float | None) -> str:
    return NO_VALUE if fraction is None else f"{fraction:+.1%}".replace("-", "−")


def _seconds_text(seconds: float | None) -> str:
    return NO_VALUE if seconds is None else f"{seconds:.3g} s"


def _relative_error(predicted_value: float | None, measured_value: float | None) -> float | None:
    return None if predicted_value is None or not measured_value else predicted_value / measured_value - 1.0


def _window_note(window: WindowLine) -> str:
    if window.compiled_passes:
        return f"first, compiled or captured: {count_noun(window.compiled_passes, 'time')}"
    return "" if window.changed else "as the one before"


LABELS = {Phase.CHECKING: "checking the base", Phase.TRYING: "trying kernels"}
COLOURS = (
    "#8a94a6", "#0e9db5", "#9456d6", "#d9a441", "#e8710a", "#a3673f",
    "#d9528f", "#3b7ddd", "#1e9e6a", "#8a8f1a", "#5b6f9d", "#c3c9d3",
)  # fmt: skip
"""Colours of the phases of a run, such as imports and training, in the order of the phases."""
MIN_SECONDS = 0.05
"""Minimum duration, in seconds, of a phase of the run that is shown."""


def phase_label(phase: Phase) -> str:
    return LABELS.get(phase, str(phase))


def wall_time_sentence(wall_time: WallTime) -> str:
    parts = [
        f"{phase_label(phase)} {wall_time.phases[phase]:.1f}"
        for phase in Phase
        if wall_time.phases[phase] >= MIN_SECONDS
    ]
    return f"Wall time {wall_time.seconds:.1f} s" + (f": {', '.join(parts)}" if parts else "")


@dataclass(frozen=True, slots=True)
class WallBar:
    """The wall time of one run as a stacked bar."""

    sentence: str
    parts: tuple[tuple[str, str, float, str], ...]
    """Label, seconds, percentage and colour of each phase of the run."""


def wall_time_bar(wall_time: WallTime) -> WallBar:
    """Return the bar of a run's wall time, with the phases in order. The last phase may be missing, since the
    page is written before the run ends."""
    drawn_early = "" if wall_time.phases[Phase.REPORT] else ", until this page was drawn"
    told = [phase for phase in Phase if wall_time.phases[phase] >= MIN_SECONDS]
    whole = max(wall_time.seconds, sum(wall_time.phases[phase] for phase in told), 1e-9)
    parts = tuple(
        (
            phase_label(phase),
            f"{wall_time.phases[phase]:.1f} s",
            100 * wall_time.phases[phase] / whole,
            COLOURS[at],
        )
        for at, phase in enumerate(Phase)
        if phase in told
    )
    return WallBar(
        f"Wall time {duration_text(wall_time.seconds)} ({wall_time.seconds:.1f} s){drawn_early}", parts
    )
