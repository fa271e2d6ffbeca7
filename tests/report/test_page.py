from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

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
    def figures(self) -> list[str]:
        """The titles of the charts."""
        return re.findall(r"<figure[^>]*>\s*<h3>(.*?)</h3>", self.source)

    def figure(self, title: str) -> str:
        found = re.search(rf"<h3>{title}</h3>(.*?)</figure>", self.source, re.DOTALL)
        assert found is not None
        return found[1]


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
    ):
        assert words in sweep.text


def test_the_table_is_sorted_by_result_with_a_column_for_every_setting_that_differs(sweep: Page) -> None:
    heading, *rows = [" ".join(row.split()) for row in sweep.rows[:7]]
    numbers = "validation loss against the base token accuracy training loss"
    settings = "adapter.rank eval.every eval.fraction learning_rate keep"
    assert sorted(heading.split()) == sorted(f"job state {numbers} {settings}".split())
    assert rows[0].startswith("r64- best best folder · job.yaml succeeded 60 steps")
    assert "1.2256 best 1.2256 at step 42, last 1.2847 −50.0 % base 2.4500 55.0 % +0.0 points" in rows[0]
    names = ["r64-best", "r16", "r8-slow", "no-validation", "late", "hot"]
    for name, row in zip(names, rows, strict=True):
        assert row.replace(" ", "").startswith(name)
    assert sum(" best folder" in row for row in rows) == 1


def test_an_empty_value_is_hidden(sweep: Page) -> None:
    row = next(row for row in sweep.rows if "no-" in row and "validation" in row and "folder" in row)
    assert "none" not in row.split()
    assert '<td data-label="eval.fraction" class="key"></td>' in sweep.source


def test_every_table_sorts(sweep: Page) -> None:
    headings = re.findall(r"<thead>.*?</thead>", sweep.source, re.DOTALL)
    assert headings
    for heading in headings:
        assert heading.count("<th ") == heading.count('class="sort"') == heading.count('aria-sort="none"')
    losses = re.findall(r'data-label="validation loss" class="number" data-value="([^"]+)"', sweep.source)
    assert round(float(losses[0]), 4) == 1.2256


def test_every_section_can_be_jumped_to(sweep: Page) -> None:
    nav = re.search(r"<nav.*?</nav>", sweep.source, re.DOTALL)
    assert nav is not None
    anchors = re.findall(r'href="#([^"]+)"', nav[0])
    assert anchors == ["jobs", "curves", "effort", "unfinished", "use"]
    for anchor in anchors:
        assert f'<section id="{anchor}">' in sweep.source


def test_folders_and_job_files_are_linked(sweep: Page) -> None:
    links = [value for key, value in sweep.attributes if key == "href"]
    assert "./r16/" in links
    assert "./r16/job.yaml" in links
    assert (sweep.path.parent / "r16" / "job.yaml").exists()
    assert "./late/" not in links, "it has no folder"


def test_the_verdict_stands_before_the_numbers_and_internals_further_down(sweep: Page) -> None:
    order = [sweep.text.index(words) for words in ("is the best of", "jobs succeeded", "of the microbatches")]
    assert order == sorted(order)
    assert "96 held-out rows, 9,000 tokens" in sweep.text


def test_model_and_quantisation_stand_in_the_header(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="a", quantize="nf4")])))
    facts = re.search(r'<ul class="facts">(.*?)</ul>', page.source, re.DOTALL)
    assert facts is not None
    told = re.findall(r"<li>(.*?)</li>", facts[1])
    assert told[:3] == [
        "HuggingFaceTB/SmolLM2-135M-Instruct (demo)",
        "weights in nf4",
        "computed in float32",
    ]
    assert "quantization_config=nf4" in page.text


def test_the_base_is_a_dashed_line_and_a_change_for_the_worse_is_red(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="a", base_loss=1.0), Job(name="b")])))
    assert page.figure("Validation loss").count('<path class="level"') == 2
    assert 'class="level-name' in page.figure("Token accuracy")
    assert re.search(r'<span class="worse">\+\d', page.source)
    style = (Path(__file__).parents[2] / "weftune" / "report" / "page.css").read_text()
    assert re.search(r"\.plot path\.level \{[^}]*stroke-dasharray", style)
    assert ".worse { color: var(--bad); }" in style


def test_a_warning_is_a_red_note(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="a", warning="The adapter has collapsed.")])))
    assert '<p class="note bad"><b>a</b> The adapter has collapsed.</p>' in page.source


def test_a_failed_run_has_no_empty_cards_and_nothing_to_use(tmp_path: Path) -> None:
    failed = Job(name="hot", done=1, state="failed", reason="its loss at step 2 is nan")
    page = Page(write_report(write_example(tmp_path, [failed], windows=0)))
    assert "No adapter was trained: the job failed." in page.text
    assert page.figures == []
    assert "Use the adapters" not in page.text
    assert "PeftModel" not in page.text
    assert "How to resume" in page.text
    assert not re.search(r'<p class="value">\s*–', page.source)


def test_a_job_with_one_evaluation_shows_the_base_without_a_change(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="half", done=5, state="interrupted")])))
    row = " ".join(page.rows[1].split())
    assert "base 2.4500 not evaluated since" in row
    assert "%" not in row
    assert "→" not in row


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


def test_every_chart_is_drawn(sweep: Page) -> None:
    assert sweep.figures == [
        "Training loss",
        "Validation loss",
        "Token accuracy",
        "Throughput",
        "Time of each window",
        "Peak memory of each window",
    ]


def test_the_curves_hold_what_was_measured(sweep: Page) -> None:
    figure = sweep.figure("Training loss")
    low, high = map(float, re.search(r'data-y="(\S+) (\S+) linear"', figure).groups())
    path = re.search(r'd="([^"]*)" data-name="r16" [^>]*data-silent', figure)[1]
    drawn = [high - float(y) / 1000 * (high - low) for y in re.findall(r"[ML]\S+? (\S+?)(?=[ML]|$)", path)]
    lines = [json.loads(line) for line in (sweep.path.parent / "metrics.jsonl").read_text().splitlines()]
    written = [line["loss"] for line in lines if line["job"] == "r16" and "loss" in line]
    assert drawn == pytest.approx(written, abs=1e-4)


def test_an_exploded_loss_does_not_flatten_the_others(sweep: Page) -> None:
    low, high = map(float, re.search(r'data-y="(\S+) (\S+)', sweep.figure("Training loss")).groups())
    assert 0.5 < low < high < 3


def test_nothing_is_fetched_and_links_stay_below_the_page(sweep: Page) -> None:
    assert not [value for key, value in sweep.attributes if key in ("src", "srcset", "action")]
    assert all(value.startswith(("#", "./")) for key, value in sweep.attributes if key == "href")


@pytest.mark.slow
def test_a_page_weighs_little_whatever_the_run(tmp_path: Path, sweep: Page) -> None:
    assert len(sweep.source) < 200_000
    jobs = [Job(name=f"job{number:02}", steps=1500, done=1500, rank=number + 1) for number in range(45)]
    page = Page(write_report(write_example(tmp_path, jobs, windows=600)))
    assert len(page.source.encode()) < 1_500_000


def test_the_policy_lets_only_the_scripts_of_the_page_run(sweep: Page) -> None:
    allowed = re.search(r"script-src ([^;]*)", sweep.policy)
    assert allowed is not None
    executed = [script.text for script in sweep.scripts if script.type != "application/json"]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in executed]
    assert allowed[1].split() == [f"'sha256-{digest}'" for digest in digests]
    assert sweep.policy.startswith("default-src 'none'")


def test_a_chart_without_data_is_words(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="only", evaluate=False)], windows=0)))
    assert page.figures == ["Training loss"]
    assert "No job has held-out rows" in page.text
    assert "Time and memory" not in page.text


def test_two_windows_are_a_table_and_no_curve(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="only")], windows=2)))
    assert page.figures == ["Training loss", "Validation loss", "Token accuracy"]
    assert "Predicted and measured, window by window" in page.text


def test_few_short_settings_have_a_column_each(tmp_path: Path) -> None:
    page = Page(write_report(write_example(tmp_path, [Job(name="a", rank=8), Job(name="b", rank=64)])))
    heading, first, second = [" ".join(row.split()) for row in page.rows[:3]]
    assert heading.endswith("token accuracy training loss adapter.rank")
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
    assert "PeftModel" not in page.text


def test_a_run_that_has_only_begun_has_a_page_without_charts(tmp_path: Path) -> None:
    waiting = [
        Job(name="a", state="queued", started=False, done=0),
        Job(name="b", state="queued", started=False, done=0),
    ]
    page = Page(write_report(write_example(tmp_path, waiting, windows=0)))
    assert page.figures == []
    assert "No adapter has been evaluated yet." in page.text
    assert sum(len(script.text) for script in page.scripts) < 100_000


def test_script_in_names_notes_and_values_stays_text(tmp_path: Path) -> None:
    page = Page(write_report(hostile_run(tmp_path)))
    assert len(page.scripts) == 2
    assert not page.tags & {"img", "iframe", "s"}
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    for text in HOSTILE:
        assert " ".join(text.split()) in " ".join(page.text.split())


def test_a_hostile_name_cannot_lead_a_link_away(tmp_path: Path) -> None:
    page = Page(write_report(hostile_run(tmp_path)))
    links = [value for key, value in page.attributes if key == "href"]
    assert links
    assert all(value.startswith(("#", "./")) for value in links)
    assert not any(":" in value for value in links)


def test_a_page_is_never_seen_half_written(tmp_path: Path) -> None:
    output = write_example(tmp_path, SWEEP[:1])
    first = write_report(output).stat().st_ino
    assert write_report(output).stat().st_ino != first
    assert not list(output.glob("*.tmp"))


def test_of_many_jobs_the_first_have_curves_and_commands_and_all_have_a_row(tmp_path: Path) -> None:
    jobs = [Job(name=f"job{number:03}", steps=2, done=2, evaluate=False) for number in range(250)]
    jobs.append(Job(name="hot", steps=2, done=1, state="failed", reason="the loss was not finite"))
    text = write_report(write_example(tmp_path / "out", jobs)).read_text(encoding="utf-8")
    assert text.count('<th scope="row"') == 251
    assert text.count('<button type="button" data-job=') == 40
    assert text.count('<details id="job-') == 201, "and the one that says how to go on"
    losses = text.partition("<h3>Training loss</h3>")[2].partition("</figure>")[0]
    assert len(re.findall(r'<path class="curve"[^>]*data-silent', losses)) == 40
    assert "The first 40 of 251 jobs have curves below." in text
