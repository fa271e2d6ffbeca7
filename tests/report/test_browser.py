"""The page in a real browser, where there is one."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.studies.search import outlook
from tests.plan.outlooks import ground, outlines
from tests.report.example import SWEEP, write_example
from tests.report.hostile import hostile_run
from tests.report.sweep_example import write_sweep
from weftune.report.gantt import gantt_page
from weftune.report.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


@dataclass(frozen=True, slots=True)
class Seen:
    """A page after its scripts have run."""

    document: str
    console: tuple[str, ...]

    @property
    def title(self) -> str:
        found = re.search(r"<title>(.*?)</title>", self.document, re.DOTALL)
        return html.unescape(found[1]) if found else ""

    @property
    def charts(self) -> int:
        return len(re.findall(r'<div class="plot"', self.document))


def load(page: Path, profile: Path, width: int = 1280) -> Seen:
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    output = ["--dump-dom", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    flags += ["--disable-quic", "--no-first-run", "--disable-component-update", "--disable-sync"]
    done = subprocess.run(
        [BROWSER, *flags, *output, f"--window-size={width},900", f"--user-data-dir={profile}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return Seen(done.stdout, tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line))


def with_script(page: Path, script: str) -> Path:
    """A copy of the page with one more script at its end."""
    copy = page.with_name("copy.html")
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


def without_policy(page: Path) -> Path:
    text = page.read_text(encoding="utf-8")
    page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text, count=1), encoding="utf-8")
    return page


def test_a_page_full_of_hostile_text_runs_none_of_it_and_draws_every_chart(tmp_path: Path) -> None:
    seen = load(write_report(hostile_run(tmp_path)), tmp_path / "profile")
    assert seen.console == ()
    assert seen.title == "<svg onload=document.title='owned'> · Weftune"
    assert seen.charts == 6
    assert not re.search(r'<[^<>]* (xlink:)?href="javascript', seen.document)


@pytest.mark.slow
def test_the_policy_stops_a_script_that_is_not_the_pages_own(tmp_path: Path) -> None:
    page = with_script(write_report(write_example(tmp_path / "run")), "document.title = 'owned'")
    seen = load(page, tmp_path / "first")
    assert seen.title == "run · Weftune"
    assert any("Content Security Policy" in line for line in seen.console)
    assert load(without_policy(page), tmp_path / "second").title == "owned"


@pytest.mark.slow
def test_the_legend_hides_and_shows_the_curves_of_a_job(tmp_path: Path) -> None:
    script = """
        const shown = () => [...document.querySelectorAll('#curves figure:first-of-type path.curve')]
            .filter((path) => getComputedStyle(path).display !== 'none').length;
        const button = document.querySelector('[data-job]');
        const counts = [shown()];
        button.click(); counts.push(shown());
        button.click(); counts.push(shown());
        document.title = counts.join(' ');
    """
    page = without_policy(with_script(write_report(write_example(tmp_path / "run")), script))
    before, hidden, after = map(int, load(page, tmp_path / "profile").title.split())
    assert (before - hidden, after) == (2, before)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 1024, 800, 500])
def test_nothing_is_cut_off_at_the_right(tmp_path: Path, width: int) -> None:
    script = """
        const wide = [...document.querySelectorAll('body, .tile, .verdict, figure, td.key')]
            .filter((part) => part.scrollWidth > part.clientWidth + 1 && !part.closest('#windows'));
        document.title = `${innerWidth} ${wide.map((part) => part.className || part.tagName).join(' ')}`;
    """
    folder = tmp_path / "a-folder-with-a-long-name"
    long = tuple(replace(job, path=str(folder / f"{job.name}_from_a_long_file_name.jsonl")) for job in SWEEP)
    page = without_policy(with_script(write_report(write_example(tmp_path / "run", long)), script))
    assert load(page, tmp_path / "profile", width).title == f"{width} "


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500])
def test_a_sweep_fits_its_screen(tmp_path: Path, width: int) -> None:
    script = """
        const shown = [...document.querySelectorAll('.parallel')].filter((one) => one.clientHeight);
        const fits = document.documentElement.scrollWidth <= innerWidth;
        document.title = `${fits} ${shown.map((one) => one.className)}`;
    """
    page = without_policy(with_script(write_report(write_sweep(tmp_path / "run")), script))
    form = "upright" if width > 640 else "lying"
    assert load(page, tmp_path / "profile", width).title == f"true plot parallel {form}"


@pytest.mark.slow
def test_a_click_on_a_heading_sorts_the_table_both_ways_with_empty_cells_last(tmp_path: Path) -> None:
    script = """
        const names = () => [...document.querySelectorAll('.jobs tbody th')].map((one) => one.dataset.value);
        const buttons = [...document.querySelectorAll('.jobs .sort')];
        const button = buttons.find((one) => one.textContent === 'training loss');
        button.click(); const up = names().join(' ');
        button.click(); document.title = `${up} | ${names().join(' ')}`;
    """
    page = without_policy(with_script(write_report(write_example(tmp_path / "run")), script))
    up, down = load(page, tmp_path / "profile").title.split(" | ")
    assert up.split()[-1] == down.split()[-1] == "late", "it has no loss"
    assert up.split()[:-1] == down.split()[-2::-1]


@pytest.mark.slow
def test_a_timeline_is_drawn_and_zooming_shows_more_of_it(tmp_path: Path) -> None:
    run = outlook(ground("2xH100"), outlines(2)).run
    file = tmp_path / "plan.html"
    file.write_text(gantt_page(run.timeline, run.program, "2xH100"), encoding="utf-8")
    script = """
        const canvas = document.querySelector('canvas');
        const picture = () => canvas.toDataURL();
        const [out, closer] = document.querySelectorAll('.zoom button');
        const before = picture(); closer.click(); const near = picture(); out.click();
        const keys = document.querySelectorAll('.keys li').length;
        document.title = [before !== near, before === picture(), keys > 3];
    """
    seen = load(without_policy(with_script(file, script)), tmp_path / "profile")
    assert seen.title == "true,true,true"
