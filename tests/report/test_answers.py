"""Answers to held-out prompts on the page of a run: side by side, escaped, and never wider than the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow_but
from tests.report.example import Job, write_example
from tests.report.test_browser import BROWSER, load, with_script, without_policy
from weftune.core.evaluation import AnsweredRow
from weftune.core.files import FORMAT
from weftune.report.evaluation import ANSWERS, BARE_BASE, SampleAnswers, answers_record, read_answers
from weftune.report.page import answered_prompts, render_page, write_report
from weftune.report.read import JobRecord, read_run

HOSTILE = "<img src=x onerror=document.title='owned'> & </script><b>"
CHAT = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 1 + 1?"})


def row(
    location: str = "rows.jsonl:1", prompt: Any = CHAT, expected: str | None = " 2", **answers: str
) -> AnsweredRow:
    return AnsweredRow(location, {}, prompt, None, expected, {BARE_BASE: "I do not know.", **answers})


def write_answers(output: Path, job: str, *rows: AnsweredRow, step: int = 60) -> None:
    (output / job / ANSWERS).write_text(json.dumps(answers_record(job, step, rows)))


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    rows = row(a="2"), row("rows.jsonl:2", "1 + 1 =", None, a="3")
    write_answers(tmp_path, "a", *rows, step=7)
    assert json.loads((tmp_path / "a" / ANSWERS).read_text())["format"] == FORMAT
    found = read_answers(tmp_path / "a")
    assert found is not None
    assert (found.step, [one.answers["job"] for one in found.rows]) == (7, ["2", "3"])
    assert [one.prompt for one in found.rows] == [
        tuple({**message, "tool_calls": None} for message in CHAT),
        "1 + 1 =",
    ]
    assert [(one.expected, one.is_match("job")) for one in found.rows] == [(" 2", True), (None, False)]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"step": 1}', '{"step": 1, "rows": [1]}', '{"step": {}, "rows": []}']
)
def test_a_damaged_file_is_no_answers(tmp_path: Path, content: str) -> None:
    (tmp_path / ANSWERS).write_text(content)
    assert read_answers(tmp_path) is None


def test_jobs_that_answered_one_prompt_are_side_by_side_and_others_apart() -> None:
    def job(name: str, *rows: AnsweredRow) -> JobRecord:
        return JobRecord(name=name, answers=SampleAnswers(3, rows))

    jobs = [
        job("base", row(job="2")),
        job("other", row(job="3"), row(expected="4", job="4")),
        JobRecord(name="silent"),
    ]
    first, second = answered_prompts(jobs)
    assert dict(first.titles) == {BARE_BASE: "base", "base": "base, step 3", "other": "other, step 3"}
    assert first.row.answers == {BARE_BASE: "I do not know.", "base": "2", "other": "3"}
    assert dict(second.titles) == {BARE_BASE: "base", "other": "other, step 3"}
    assert len(answered_prompts([job(f"j{number}", row(job="2")) for number in range(30)])[0].titles) == 9


def test_the_page_has_the_section_only_if_a_job_has_answered(tmp_path: Path) -> None:
    write_example(tmp_path, [Job(name="a"), Job(name="b", rank=8)])
    assert "Answers" not in render_page(read_run(tmp_path))
    write_answers(tmp_path, "a", row(a="2"))
    page = render_page(read_run(tmp_path))
    assert page.count('class="answered"') == 1
    assert page.count("✓ match") == 1
    assert '<a href="#answers">Answers</a>' in page


def test_the_metric_of_the_answers_is_a_column_of_the_table(tmp_path: Path) -> None:
    write_example(tmp_path, [Job(name="a")])
    assert "metric of answers" not in render_page(read_run(tmp_path))
    status = json.loads((tmp_path / "status.json").read_text())
    status["jobs"]["a"] |= {"score": 0.75, "base_score": 0.5}
    status.pop("checksum", None)
    (tmp_path / "status.json").write_text(json.dumps(status))
    file = tmp_path / "a" / "job.yaml"
    file.write_text(
        file.read_text().replace("    fraction: 0.1", "    fraction: 0.1\n    metric: exact_match")
    )
    page = render_page(read_run(tmp_path))
    assert "metric of answers" in page
    assert "75.0 %" in page
    assert "base 50.0 %" in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", slow_but([1280, 500], [500]))
def test_hostile_answers_are_shown_as_they_are_and_nothing_is_cut_off(tmp_path: Path, width: int) -> None:
    output = tmp_path / "run"
    write_example(output, [Job(name="a"), Job(name="b", rank=8)])
    said = f"{HOSTILE} {'long' * 60}"
    for name in "ab":
        write_answers(output, name, row(said, said, said, **{name: said}), row(a=said, b=said))
    page = write_report(output)
    seen = load(page, tmp_path / "profile", width)
    assert (seen.console, seen.title) == ((), "run · Weftune")
    script = """
        const wide = [...document.querySelectorAll('body, .answered, .answer, .said')]
            .filter((part) => part.scrollWidth > part.clientWidth + 1);
        document.title = `${innerWidth} ${wide.map((part) => part.className || part.tagName).join(' ')}`;
    """
    shown = load(without_policy(with_script(page, script)), tmp_path / "second", width)
    assert shown.title == f"{width} "
