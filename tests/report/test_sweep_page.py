"""A sweep on the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.example import Job
from tests.report.hostile import HOSTILE
from tests.report.sweep_example import sweep_record, write_sweep
from tests.report.test_page import Page
from weftune.report.page import write_report


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(write_report(write_sweep(tmp_path_factory.mktemp("sweep") / "output")))


def words(page: Page) -> str:
    return " ".join(page.text.split())


def test_the_best_trials_stand_on_top_with_what_sets_them_apart(page: Page) -> None:
    heading, *rows = [" ".join(row.split()) for row in page.rows[:25]]
    assert heading == "place trial rank dropout learning_rate validation loss steps state"
    assert rows[0] == "1 sql-r64-lr4.09e-4 best 64 0.013 4.09e-4 1.2667 200 of 200 finished"
    assert rows[1].startswith("2 sql-r64-lr3.42e-4 kept")
    assert rows[3].endswith("1.5618 at step 60 60 of 200 dropped 4th of 8, the best 3 continue")


def test_trials_beyond_the_first_are_folded_away_with_the_reasons_why_they_left_or_failed(page: Page) -> None:
    assert "The other 14 trials" in page.text
    assert any(
        "4 of 200 failed the loss was not finite at step 4" in " ".join(row.split()) for row in page.rows
    )


def test_a_few_trials_all_stand_in_the_open(tmp_path: Path) -> None:
    page = Page(write_report(write_sweep(tmp_path, sweep_record(6))))
    assert "The other" not in page.text


def test_the_rungs_the_saving_the_winners_and_a_snippet_are_there(page: Page) -> None:
    text = words(page)
    assert "the best 33 % continue at steps 20, 60 of 200 · losses there are those of the mean of a" in text
    assert "20 24 8 went on the last to continue had 2.0698, the first dropped 2.0914, 1 failed" in text
    assert "25 % 9,632 of the 38,400 that all trials would take" in text
    # 884 seconds for a quarter of the samples.
    assert "time saved about 44:01 all trials to their end: about 58:45 of training" in text
    best = page.path.parent.resolve() / "sql" / "best" / "sql-r64-lr4.09e-4"
    assert f"PeftModel.from_pretrained(model, '{best}')" in page.text
    assert f'weftune generate {best} "your prompt"' in page.text
    assert "output/sql/best/sql-r16-lr3.17e-4" in page.text


def test_trials_that_left_are_no_alarm_and_stand_nowhere_else(page: Page) -> None:
    text = words(page)
    assert "20 dropped, 1 failed" in text
    assert "cancelled" not in text
    assert "--restart" not in text, "nor does it help the one that failed: the sweep has decided without it"
    assert not [value for key, value in page.attributes if key == "class" and value.startswith("note")]
    assert "Jobs" not in text.replace("Jobs of", "")


def test_other_jobs_have_their_own_table_and_no_trial_stands_in_it(tmp_path: Path) -> None:
    others = [Job(name="plain", rank=8), Job(name="wide", rank=64)]
    page = Page(write_report(write_sweep(tmp_path, others=others)))
    at = next(number for number, row in enumerate(page.rows) if row.split()[:2] == ["job", "state"])
    assert [row.split()[0] for row in page.rows[at + 1 :]] == ["plain", "wide"]


def test_a_sweep_has_parallel_coordinates_and_a_chart_for_every_key(page: Page) -> None:
    assert page.figures[:4] == ["Values and results", "adapter.rank", "adapter.dropout", "learning_rate"]
    ways = page.figure("Values and results")
    assert 'class="plot parallel upright"' in ways
    assert 'class="plot parallel lying"' in ways, "for a phone"


def test_the_base_is_a_dashed_line_in_the_charts_of_a_sweep(page: Page) -> None:
    assert page.figure("learning_rate").count('<path class="level"') == 1


def test_winners_are_linked_and_the_sweep_can_be_jumped_to(page: Page) -> None:
    links = [value for key, value in page.attributes if key == "href"]
    assert "./sql/best/sql-r64-lr4.09e-4/" in links
    assert "#sweep-0" in links


def test_curves_of_trials_that_left_share_one_pen_and_one_button(page: Page) -> None:
    left = re.findall(r'<path class="curve"[^>]*data-group="left"[^>]*>', page.figure("Training loss"))
    assert len(left) == 20
    assert all('stroke="#9aa3b2"' in path for path in left)
    assert ("data-job", "left") in page.attributes
    assert sum(key == "data-job" for key, _ in page.attributes) == 5


@pytest.mark.parametrize("count", [6, 64])
def test_a_page_of_many_trials_stays_light(tmp_path: Path, count: int) -> None:
    assert write_report(write_sweep(tmp_path, sweep_record(count))).stat().st_size < 400_000


@pytest.mark.parametrize("until", [0, 20, 60])
def test_a_sweep_on_its_way_shows_who_leads_and_no_winner(tmp_path: Path, until: int) -> None:
    page = Page(write_report(write_sweep(tmp_path, sweep_record(until=until))))
    assert "The winners" not in page.text
    assert ("best validation loss so far" in page.text) is True
    assert ("nothing has been evaluated yet" in page.text) is (until == 0)
    assert ("Values and results" in page.figures) is (until > 0)


def test_a_damaged_record_is_told_and_its_trials_are_jobs_like_others(tmp_path: Path) -> None:
    output = write_sweep(tmp_path, sweep_record(6))
    (output / "sql" / "sweep.json").write_text("{", encoding="utf-8")
    page = Page(write_report(output))
    assert "sql/sweep.json cannot be used" in page.text
    assert "Sweep sql" not in words(page)
    assert "sql-r64-lr7.72e-5" in page.text


def test_script_in_a_sweeps_values_and_reasons_stays_text(tmp_path: Path) -> None:
    record = sweep_record(6)
    trials = [
        replace(trial, values={**trial.values, "data": text}, reason=text)
        for trial, text in zip(record.trials, (HOSTILE * 6)[:6], strict=True)
    ]
    page = Page(write_report(write_sweep(tmp_path, replace(record, trials=tuple(trials)))))
    assert len(page.scripts) == 2
    assert not page.tags & {"img", "iframe", "s"}
    assert not [key for key, _ in page.attributes if key.startswith("on")]
