from __future__ import annotations

import pytest

from weftune.report.words import (
    bytes_text,
    change_text,
    duration_text,
    loss_text,
    minutes_text,
    printable_line,
    short_paths,
    split_breakable,
)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3725, "1:02:05"), (59.6, "1:00")])
def test_a_duration_reads_like_a_clock(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(25, "0.42"), (252, "4.2"), (2520, "42"), (-252, "-4.2")])
def test_minutes_have_the_digits_that_matter(seconds: float, text: str) -> None:
    assert minutes_text(seconds) == text


def test_a_missing_number_is_a_dash() -> None:
    assert loss_text(None) == bytes_text(None) == duration_text(None) == change_text(None, 1.0) == "–"


def test_a_huge_loss_stays_short() -> None:
    assert loss_text(123456789.0) == "1.23e+08"
    assert (loss_text(-1e-9), loss_text(-0.00006)) == ("0.0000", "-0.0001")


def test_a_change_is_signed_and_in_percent() -> None:
    assert change_text(2.0, 1.5) == "−25.0 %"
    assert change_text(2.0, 2.2) == "+10.0 %"


def test_control_characters_become_spaces() -> None:
    assert printable_line("a\x1b[31m\nb\u202e") == "a [31m b "


def test_paths_are_as_short_as_tells_them_apart() -> None:
    assert short_paths(["/data/a.jsonl", "/data/b.jsonl"]) == {
        "/data/a.jsonl": "a.jsonl",
        "/data/b.jsonl": "b.jsonl",
    }
    assert list(short_paths(["/x/a.jsonl", "/y/a.jsonl"]).values()) == ["x/a.jsonl", "y/a.jsonl"]
    assert short_paths([]) == {}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("owner/some_rows.jsonl", ("owner/", "some_", "rows.jsonl")),
        ("q_proj, k_proj", ("q_proj, k_proj",)),
        ("folder/", ("folder/",)),
        ("", ("",)),
    ],
)
def test_a_line_may_break_between_the_words_of_a_path(text: str, pieces: tuple[str, ...]) -> None:
    assert split_breakable(text) == pieces
