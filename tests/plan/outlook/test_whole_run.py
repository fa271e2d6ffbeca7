"""How long a run takes, by rounds that get cheaper as jobs end."""

from __future__ import annotations

import pytest

from weftune.cli.plan_text import format_span
from weftune.plan.outlook.whole_run import JobTotal, WholeRun, job_ends, rounds_at_rate, tokens_per_step


def total(steps: int, tokens: float) -> JobTotal:
    return JobTotal(steps=steps, tokens=tokens, state_bytes=1)


def test_jobs_end_after_their_own_rounds_and_those_of_others_beside_them():
    totals = {"a": total(2, 100), "b": total(5, 50)}
    ends = job_ends(totals, ["a", "b"], [], rounds_at_rate(totals, 10.0))
    assert ends == pytest.approx({"a": 2 * 15, "b": 2 * 15 + 3 * 5})
    assert WholeRun(ends, 1, 2).seconds == pytest.approx(45)


def test_whoever_waits_comes_aboard_when_another_ends():
    totals = {"a": total(2, 10), "b": total(4, 10), "c": total(3, 10), "d": total(1, 10)}
    ends = job_ends(totals, ["a", "b"], ["c", "d"], lambda names: float(len(names)))
    assert ends == {"a": 4.0, "b": 8.0, "c": 10.0, "d": 10.0}


def test_evaluations_count_as_part_of_a_step():
    assert tokens_per_step([[3, 5], [4]], held_out=0, evaluations=0, steps=10) == 6
    assert tokens_per_step([[3, 5], [4]], held_out=100, evaluations=5, steps=10) == pytest.approx(6 + 20)
    assert tokens_per_step([[3, 5], [4]], 0, 0, steps=10, scored_tokens=500) == pytest.approx(6 + 20)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "less than 1 s"),
        (36.4, "36 s"),
        (600, "10 min"),
        (7300, "2 h 2 min"),
        (200_000, "2 days 7 h"),
    ],
)
def test_a_span_is_told_in_the_units_that_matter(seconds: float, text: str):
    assert format_span(seconds) == text
