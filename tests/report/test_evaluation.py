"""The ranking of evaluated adapters, and the page with their answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.cases import slow_but
from tests.report.test_browser import BROWSER, load, with_script, without_policy
from weftune.core.evaluation import AdapterScores, AnsweredRow, Evaluation
from weftune.report.evaluation import MAX_ROWS, evaluation_page

HOSTILE = "<img src=x onerror=document.title='owned'> & </script><b>"


def scored(adapter: str, loss: float, exact_match: float | None, **more: float | None) -> AdapterScores:
    own = {"loss": loss, "perplexity": 2.0, "token_accuracy": 0.5, "exact_match": exact_match, **more}
    return AdapterScores(adapter, 3, 40, own)


def evaluation(*results: AdapterScores, rows: int = 2, text: str = "an answer") -> Evaluation:
    chat = ({"role": "system", "content": text}, {"role": "assistant", "content": None, "tool_calls": [text]})
    answers = {one.adapter: f" {text}" for one in results}
    answered = [
        AnsweredRow(f"rows.jsonl:{number}", {}, chat if number % 2 else text, None, text, answers)
        for number in range(1, rows + 1)
    ]
    return Evaluation("rows.jsonl", "tiny", results, tuple(answered), (text,))


def test_the_best_is_first_and_what_has_no_value_is_last() -> None:
    found = evaluation(
        scored("none", 0.5, None, mine=0.0),
        scored("good", 1.0, 0.75, mine=2.0),
        scored("tied", 0.9, 0.75, mine=-1.0),
        scored("broken", math.nan, 0.25, mine=3.0),
    )
    assert [one.adapter for one in found.rank_results("loss")] == ["none", "tied", "good", "broken"]
    assert [one.adapter for one in found.rank_results("exact_match")] == ["tied", "good", "broken", "none"]
    assert [one.adapter for one in found.rank_results("mine")] == ["broken", "good", "none", "tied"]
    assert (found.best_adapter("loss"), found.best_adapter("exact_match"), found.best_adapter("mine")) == (
        "none",
        "tied",
        "broken",
    )


def test_without_two_values_nothing_is_called_best() -> None:
    assert evaluation(scored("alone", 1.0, 1.0)).best_adapter("loss") is None
    assert evaluation(scored("a", 1.0, 1.0), scored("b", 2.0, None)).best_adapter("exact_match") is None


def test_the_page_shows_the_first_rows_and_says_so() -> None:
    page = evaluation_page(evaluation(scored("a", 1.0, 1.0), rows=MAX_ROWS + 1), "loss")
    assert page.count('class="answered"') == MAX_ROWS
    assert f"The first {MAX_ROWS} of {MAX_ROWS + 1} rows are shown." in page
    without = evaluation_page(evaluation(scored("a", 1.0, None), rows=0), "loss")
    assert "Answers" not in without
    assert "–" in without


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", slow_but([1280, 500], [1280]))
def test_hostile_text_is_shown_as_it_is_and_nothing_is_cut_off(tmp_path: Path, width: int) -> None:
    names = [HOSTILE, "w" * 90, "third", "fourth"]
    found = evaluation(*(scored(name, 1.0, 0.5) for name in names), text=f"{HOSTILE} {'long' * 60}")
    page = tmp_path / "page.html"
    page.write_text(evaluation_page(found, "loss"), encoding="utf-8")
    seen = load(page, tmp_path / "profile", width)
    assert (seen.console, seen.title) == ((), "rows.jsonl · Weftune")
    script = """
        const wide = [...document.querySelectorAll('body, figure, .answer, .said')]
            .filter((part) => part.scrollWidth > part.clientWidth + 1);
        document.title = `${innerWidth} ${wide.map((part) => part.className || part.tagName).join(' ')}`;
    """
    shown = load(without_policy(with_script(page, script)), tmp_path / "second", width)
    assert shown.title == f"{width} "
