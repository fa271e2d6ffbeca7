from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report.example import SWEEP, Job, with_status, write_example, write_lines
from tests.report.hostile import HOSTILE, hostile_run
from weftune.report.page import write_report


@dataclass
class Script:
    type: str
    text: str = ""


@dataclass
class Page(HTMLParser):
    """The parts of a page that the tests look at."""

    path: Path
    scripts: list[Script] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    text: str = ""
    policy: str = ""
    attributes: list[tuple[str, str]] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.inside = ""
        self.in_table = False
        self.source = self.path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.attributes += values.items()
        self.tags.add(tag)
        self.inside = tag
        if tag == "script":
            self.scripts.append(Script(values.get("type", "")))
        if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        self.in_table |= tag == "table"
        if tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
        self.in_table &= tag != "table"

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1].text += data
        elif self.inside != "style":
            self.text += f" {data.strip()}"
            if self.in_table and self.rows:
                self.rows[-1] += f" {data.strip()}"

    @property
    def figures(self) -> dict[str, Any]:
        (block,) = [script for script in self.scripts if script.type == "application/json"]
        return json.loads(block.text)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(write_report(write_example(tmp_path_factory.mktemp("report") / "sweep")))


def test_the_headline_numbers_are_there(sweep: Page) -> None:
    for words in (
        "4 of 6",
        "1 failed, 1 queued",
        "2,713",
        "3.8",
        "predicted, against 6.9",
        "1.82 GiB",
        "92 %",
    ):
        assert words in sweep.text


def test_the_table_is_sorted_by_result_and_shows_only_what_differs(sweep: Page) -> None:
    heading, *rows = [" ".join(row.split()) for row in sweep.rows[:7]]
    assert heading == "job state final loss validation loss settings"
    assert "adapter.rank 64 eval.every 0.1 eval.fraction 0.1 keep best learning_rate 0.0005" in rows[0]
    assert not any("targets" in row for row in rows)
    assert rows[0].startswith("r64-best best succeeded 60 steps")
    assert "2.4500 → 1.2256 −50.0 % best 1.2256 at step 42, last 1.2847" in rows[0]
    assert [row.split()[0] for row in rows] == ["r64-best", "r16", "r8-slow", "no-validation", "late", "hot"]
    assert sum(" best succeeded" in row for row in rows) == 1


def test_every_finished_job_has_a_snippet_and_a_command(sweep: Page) -> None:
    folder = sweep.path.parent.resolve()
    assert sweep.text.count("PeftModel.from_pretrained(model") == 4
    for name in ("r64-best", "r16", "r8-slow", "no-validation"):
        assert f"PeftModel.from_pretrained(model, '{folder / name}')" in sweep.text
        assert f'weftune generate {folder / name} "your prompt"' in sweep.text


def test_failures_and_notes_are_told(sweep: Page) -> None:
    assert "the loss was not finite at step 4" in sweep.text
    assert "waits for 1.2 GiB of memory" in sweep.text
    assert "the capacity was halved" in sweep.text


def test_every_figure_is_one_that_plotly_accepts(sweep: Page) -> None:
    from plotly.graph_objects import Figure

    assert list(sweep.figures) == ["loss", "validation", "throughput", "time", "memory"]
    for figure in sweep.figures.values():
        assert Figure(figure).data


def test_the_curves_hold_what_was_measured(sweep: Page) -> None:
    loss = sweep.figures["loss"]["data"]
    raw = next(trace for trace in loss if trace["name"] == "r16" and "opacity" in trace)
    lines = [json.loads(line) for line in (sweep.path.parent / "metrics.jsonl").read_text().splitlines()]
    written = [line["loss"] for line in lines if line["job"] == "r16" and "loss" in line]
    assert raw["y"] == pytest.approx(written, rel=1e-5)
    assert sweep.figures["time"]["data"][1]["y"][:2] == [None, 6.0]


def test_an_exploded_loss_does_not_flatten_the_others(sweep: Page) -> None:
    low, high = sweep.figures["loss"]["layout"]["yaxis"]["range"]
    assert 0.5 < low < high < 3


def test_nothing_is_fetched_and_plotly_is_there_once(sweep: Page) -> None:
    assert len([script for script in sweep.scripts if len(script.text) > 1_000_000]) == 1
    assert not [value for key, value in sweep.attributes if key in ("src", "srcset", "action")]
    assert all(value.startswith("#") for key, value in sweep.attributes if key == "href")


def test_the_policy_lets_only_the_scripts_of_the_page_run(sweep: Page) -> None:
    allowed = re.search(r"script-src ([^;]*)", sweep.policy)
    assert allowed is not None
    executed = [script.text for script in sweep.scripts if script.type != "application/json"]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in executed]
    assert allowed[1].split() == [f"'sha256-{digest}'" for digest in digests]
    assert sweep.policy.startswith("default-src 'none'")


def test_a_chart_without_data_is_words(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="only", evaluate=False)], windows=0)))
    assert list(page.figures) == ["loss"]
    assert "No job has held-out rows" in page.text
    assert "Time and memory" not in page.text


def test_two_windows_are_a_table_and_no_curve(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="only")], windows=2)))
    assert list(page.figures) == ["loss", "validation"]
    assert "Predicted and measured, window by window" in page.text


def test_few_short_settings_have_a_column_each(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="a", rank=8), Job(name="b", rank=64)])))
    heading, first, second = [" ".join(row.split()) for row in page.rows[:3]]
    assert heading == "job state final loss validation loss adapter.rank"
    assert (first.split()[-1], second.split()[-1]) == ("8", "64")


def test_paths_are_told_by_their_file_names_and_break_only_behind_a_mark(tmp_path: Path) -> None:
    folder = tmp_path / "a-folder-with-a-long-name"
    jobs = [Job(name=name, path=f"{folder}/{name}_held_out.jsonl") for name in ("one", "two")]
    page = Page(write_report(write_example(tmp_path / "run", jobs)))
    assert ">one_<wbr>held_<wbr>out.jsonl<" in page.source
    assert f'title="{folder}/one_held_out.jsonl"' in page.source


def test_a_note_that_two_files_hold_is_told_once(tmp_path: Path) -> None:
    note = "3 rows were cut at 64 tokens"
    output = write_example(tmp_path, [Job(name="only", notes=(note,))])
    record = yaml.safe_load((output / "only" / "job.yaml").read_text())
    record["data"]["notes"] = [note]
    (output / "only" / "job.yaml").write_text(yaml.safe_dump(record))
    assert Page(write_report(output)).text.count(note) == 1


@pytest.mark.parametrize("solo", [150.0, 184.2, 190.0, None])
def test_no_tile_tells_of_time_that_was_not_saved(tmp_path: Path, solo: float | None) -> None:
    page = Page(write_report(with_status(write_example(tmp_path), solo_seconds=solo)))
    assert "minutes saved" not in page.text
    assert ("One after another" in page.text) is (solo is not None)


def test_no_tile_trusts_predictions_that_were_few_or_wrong(tmp_path: Path) -> None:
    few = Page(write_report(write_example(tmp_path / "few", windows=4)))
    wrong = write_example(tmp_path / "wrong")
    lines = [json.loads(line) for line in (wrong / "windows.jsonl").read_text().splitlines()]
    write_lines(wrong / "windows.jsonl", [line | {"seconds": 1.4 * line["seconds"]} for line in lines])
    for page in (few, Page(write_report(wrong))):
        assert "minutes saved" not in page.text


def test_a_failed_job_says_how_to_go_on(sweep: Page) -> None:
    assert "weftune train jobs.yaml --resume --retry hot --set learning_rate=1e+08" in sweep.text
    assert "weftune train jobs.yaml --resume --restart hot" in sweep.text
    assert sweep.text.count("the loss was not finite at step 4") == 1


@pytest.mark.parametrize("state", ["paused", "interrupted"])
def test_a_paused_job_says_how_to_go_on(tmp_path: Path, state: str) -> None:
    halted = Job(name="halted", done=30, state=state, reason="the disk is full")
    page = Page(write_report(write_example(tmp_path, [halted])))
    assert f"halted {state} after 30 of 60 steps: the disk is full" in " ".join(page.text.split())
    assert "weftune train jobs.yaml --resume" in page.text
    assert "--restart" not in page.text


def test_a_state_that_is_not_known_is_shown_as_it_is(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="odd", done=3, state="dreaming")])))
    assert "1 dreaming" in page.text
    assert "There is no finished adapter to load." in page.text


def test_a_run_that_has_only_begun_has_a_page_without_charts(tmp_path: Path) -> None:
    waiting = [
        Job(name="a", state="queued", started=False, done=0),
        Job(name="b", state="queued", started=False, done=0),
    ]
    page = Page(write_report(write_example(tmp_path, waiting, windows=0)))
    assert page.figures == {}
    assert "No job has finished a step yet." in page.text
    assert sum(len(script.text) for script in page.scripts) < 100_000


def test_script_in_names_notes_and_values_stays_text(tmp_path: Path) -> None:
    page = Page(write_report(hostile_run(tmp_path)))
    assert len(page.scripts) == 3
    assert not page.tags & {"img", "iframe", "s"}
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    for text in HOSTILE:
        assert " ".join(text.split()) in " ".join(page.text.split())


def test_script_in_a_figure_cannot_end_its_data_block(tmp_path: Path) -> None:
    page = Page(write_report(hostile_run(tmp_path)))
    (block,) = [script for script in page.scripts if script.type == "application/json"]
    assert not set("<>&") & set(block.text)
    names = {trace["name"] for trace in page.figures["loss"]["data"]}
    assert names
    assert not any("<" in name for name in names)


def test_a_page_is_never_seen_half_written(tmp_path: Path) -> None:
    output = write_example(tmp_path, SWEEP[:1])
    first = write_report(output).stat().st_ino
    assert write_report(output).stat().st_ino != first
    assert not list(output.glob("*.tmp"))


def test_of_many_jobs_the_first_have_curves_and_commands_and_all_have_a_row(tmp_path: Path) -> None:
    jobs = [Job(name=f"job{number:03}", steps=2, done=2, evaluate=False) for number in range(250)]
    jobs.append(Job(name="hot", steps=2, done=1, state="failed", reason="the loss was not finite"))
    text = write_report(write_example(tmp_path / "out", jobs)).read_text(encoding="utf-8")
    assert text.count('<th scope="row">') == 251
    assert text.count('<button type="button" data-job=') == 40
    assert text.count('<details id="job-') == 201, "and the one that says how to go on"
    figures = json.loads(text.partition('id="figures">')[2].partition("</script>")[0])
    assert len(figures["loss"]["data"]) == 80
    assert "The first 40 of 251 jobs have curves below." in text
