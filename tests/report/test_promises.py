"""Predicted stands beside measured, and only windows that changed and had settled are counted."""

import pytest

from weftune.report.promises import COLUMNS, headline, off_text, peak_off, rows, seconds_off, sentences, tally
from weftune.report.read import WindowLine


def window(predicted: float | None, seconds: float, **keys) -> WindowLine:
    settings = {"peak_bytes": 100.0, "predicted_peak_bytes": 110.0, "jobs": 2} | keys
    return WindowLine(
        tokens=10, microbatches=3, shared=1, seconds=seconds, predicted_seconds=predicted, **settings
    )


RUN = (
    window(4.0, 5.0, unsettled=1, source="from the profile of this cpu"),
    window(1.1, 1.0, source="x, refitted"),
    window(9.0, 1.0, changed=False),
    window(0.7, 1.0, predicted_peak_bytes=None),
    window(3.0, 1.0, unsettled=2),
    window(None, 1.0),
)


def test_only_windows_that_changed_and_compiled_nothing_are_counted() -> None:
    found = tally(RUN)
    assert found.changed.windows == 2
    assert found.changed.seconds == pytest.approx((0.1 + 0.3) / 2)
    assert found.changed.peak == pytest.approx(0.1)
    assert found.unsettled.windows == 2
    assert found.unsettled.seconds == pytest.approx((0.2 + 2.0) / 2)


def test_every_window_has_a_row_and_says_what_is_special_about_it() -> None:
    table = rows(RUN)
    assert [len(row) for row in table] == [len(COLUMNS)] * len(RUN)
    assert table[0][5] == "−20.0%"
    assert "captured" in table[0][-1]
    assert table[1][-1] == ""
    assert table[2][-1] == "as the one before"
    assert table[5][3] == "–"


def test_the_first_window_is_told_by_what_it_was_predicted_from() -> None:
    told = sentences(RUN)
    assert told[0].startswith(
        "Predicted time was off by 20.0% and peak memory by 10.0% on average, over 2 windows"
    )
    assert "Counted apart: 2 windows" in told[1]
    assert told[2] == (
        "The first window, from the profile of this cpu: 4 s predicted, 5 s measured (−20.0%)."
    )


def test_a_run_without_windows_or_predictions_says_nothing() -> None:
    assert sentences(()) == []
    assert sentences([window(None, 1.0)]) == []
    assert tally(()).first is None


def test_below_zero_is_too_little() -> None:
    assert seconds_off(window(0.5, 1.0)) == pytest.approx(-0.5)
    assert peak_off(window(1.0, 1.0, peak_bytes=None)) is None
    assert off_text(None) == "–"


def test_a_headline_needs_four_windows_that_were_predicted_well() -> None:
    good = window(1.1, 1.0)
    assert headline([good] * 3) is None
    assert headline([good] * 4) == (
        "Predicted times were off by 10.0%, peak memory by 10.0% on average, over 4 windows."
    )
    assert headline([window(0.61, 1.0)] * 9) is None
