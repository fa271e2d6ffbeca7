"""Predictions beside measurements, window by window, and their errors.

Only windows whose jobs or lengths differ from the window before are counted: the others repeat it. Windows
with the first pass of a kind, which may compile kernels or capture a graph, are counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from weftune.report.read import WindowLine
from weftune.report.words import NOTHING, bytes_text, plural

COLUMNS = (
    "window",
    "jobs",
    "passes",
    "predicted",
    "measured",
    "off",
    "predicted peak",
    "peak",
    "off",
    "",
)

FEWEST, WORST = 4, 0.25
"""Least number of windows and largest mean error for a headline about predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean relative errors of the predictions."""

    windows: int
    seconds: float | None
    peak: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    changed: Errors
    unsettled: Errors
    """Errors of the changed windows in which something was compiled or captured."""
    first: WindowLine | None
    """The first window, predicted before this run had measured anything."""


def tally(windows: Sequence[WindowLine]) -> Promises:
    changed = [window for window in windows if window.changed]
    return Promises(
        changed=_errors([window for window in changed if not window.unsettled]),
        unsettled=_errors([window for window in changed if window.unsettled]),
        first=windows[0] if windows else None,
    )


def seconds_off(window: WindowLine) -> float | None:
    """Return the relative error of the predicted time; negative if the window took longer than predicted."""
    return _off(window.predicted_seconds, window.seconds)


def peak_off(window: WindowLine) -> float | None:
    return _off(window.predicted_peak_bytes, window.peak_bytes)


def rows(windows: Sequence[WindowLine]) -> list[tuple[str, ...]]:
    """Return one row per window, with the columns `COLUMNS`."""
    return [
        (
            str(number),
            str(window.jobs),
            str(window.microbatches),
            _seconds_text(window.predicted_seconds),
            _seconds_text(window.seconds),
            off_text(seconds_off(window)),
            bytes_text(window.predicted_peak_bytes),
            bytes_text(window.peak_bytes),
            off_text(peak_off(window)),
            _remark(window),
        )
        for number, window in enumerate(windows, start=1)
    ]


def headline(windows: Sequence[WindowLine]) -> str | None:
    """Return one line about the errors; None unless enough windows were predicted well enough.

    On a busy machine the time of a window depends on other work, which says nothing about predictions.
    """
    found = tally(windows).changed
    if found.windows < FEWEST or found.seconds is None or found.seconds > WORST:
        return None
    memory = "" if found.peak is None else f", peak memory by {found.peak:.1%}"
    counted = plural(found.windows, "window")
    return f"Predicted times were off by {found.seconds:.1%}{memory} on average, over {counted}."


def sentences(windows: Sequence[WindowLine]) -> list[str]:
    """Return sentences for the table: the errors of predictions, and the source of the first one."""
    found = tally(windows)
    told = []
    if found.changed.seconds is not None:
        peak = found.changed.peak
        memory = "" if peak is None else f" and peak memory by {peak:.1%}"
        told.append(
            f"Predicted time was off by {found.changed.seconds:.1%}{memory} on average, over "
            f"{plural(found.changed.windows, 'window')} whose jobs or lengths changed. "
            "Other work on the machine makes windows slower than predicted."
        )
    if found.unsettled.windows and found.unsettled.seconds is not None:
        told.append(
            f"Counted apart: {plural(found.unsettled.windows, 'window')} with a first pass of its kind, or "
            f"with one that was compiled or captured, {found.unsettled.seconds:.1%}."
        )
    first = found.first
    if first is not None and (off := seconds_off(first)) is not None:
        told.append(
            f"The first window, {first.source}: {_seconds_text(first.predicted_seconds)} predicted, "
            f"{_seconds_text(first.seconds)} measured ({off_text(off)})."
        )
    return told


def off_text(share: float | None) -> str:
    return NOTHING if share is None else f"{share:+.1%}".replace("-", "−")


def _seconds_text(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.3g} s"


def _errors(windows: Sequence[WindowLine]) -> Errors:
    seconds = [abs(off) for window in windows if (off := seconds_off(window)) is not None]
    peaks = [abs(off) for window in windows if (off := peak_off(window)) is not None]
    return Errors(
        windows=len(seconds),
        seconds=fmean(seconds) if seconds else None,
        peak=fmean(peaks) if peaks else None,
    )


def _off(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1.0


def _remark(window: WindowLine) -> str:
    if window.unsettled:
        return f"first, compiled or captured: {plural(window.unsettled, 'time')}"
    return "" if window.changed else "as the one before"
