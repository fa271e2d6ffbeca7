"""The pictures of the docs, drawn from real runs: `python -m tests.docs.pictures`.

It trains examples/sweep/jobs.yaml as `weftune train` does, keeps the frame that the terminal shows half-way
between the two rungs, and draws the report. It trains the quickstart and a job that fails, and draws their
reports, and draws the timeline of a plan. Chromium and Pillow are needed.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from rich.console import Console

from benchmarks.studies.search import outlook
from tests.docs.pages import ROOT
from tests.outputs import jobs_folder
from tests.plan.outlooks import ground, outlines
from tests.report.test_browser import BROWSER, load, with_script, without_policy
from weftune import train
from weftune.jobs.spec.read import read_run
from weftune.jobs.sweeps.record import SweepRecord
from weftune.report.ending import final_table
from weftune.report.gantt import gantt_page
from weftune.report.read import JobRecord
from weftune.report.read import read_run as read_records
from weftune.report.terminal import LiveView
from weftune.trainer.options import Options
from weftune.trainer.train import make_trainer

EXAMPLE = ROOT / "examples" / "sweep" / "jobs.yaml"
PICTURES = ROOT / "docs" / "pictures"
PAGE_PIXELS, TERMINAL_PIXELS = 1040, 900
WIDE, NARROW = 1280, 400
QUICKSTART = ROOT / "examples" / "quickstart" / "jobs.yaml"
TERMINAL_COLUMNS = 90
COLOURS = 256

# Without the commands at its end, which name folders of this machine.
ONLY_THE_SWEEP = """
    const sweep = document.querySelector('section.sweep');
    sweep.parentElement.replaceChildren(sweep);
    sweep.style.marginTop = 0;
    while (sweep.lastElementChild.tagName !== 'OL') sweep.lastElementChild.remove();
    document.title = document.documentElement.scrollHeight;
"""


# Paths of this machine stand in the commands only.
WITHOUT_COMMANDS = """
    const commands = '#use, #unfinished, .code, .sweep .label:not(.tile .label)';
    document.querySelectorAll(commands).forEach((one) => one.remove());
    document.querySelectorAll('.facts li').forEach((one) => one.textContent.startsWith('/') && one.remove());
    parent.postMessage(document.documentElement.scrollHeight, '*');
"""
FIRST_PIXELS, MOST_PIXELS = 900, 2600


class Watched(LiveView):
    """Keeps the frame that stands half-way from the first rung to the second."""

    frame = ""

    def update(self, row: JobRecord) -> None:
        super().update(row)
        record = next(iter(self._sweeps.values()), None)
        if not self.frame and record is not None and len(record.decisions) == 1 and _is_half_way(record, row):
            console = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO(), force_terminal=True)
            console.print(self._view_content())
            self.frame = console.export_svg(title="weftune train examples/sweep/jobs.yaml")


def _is_half_way(record: SweepRecord, row: JobRecord) -> bool:
    return 2 * row.step >= record.rungs[0] + record.rungs[1]


def main() -> int:
    if BROWSER is None:
        print("There is no Chromium on this machine.")
        return 1
    run, console = read_run(EXAMPLE), Console()
    with Watched(console, []) as view:
        make_trainer(run, options=Options(), view=view).run()
    console.print(final_table(read_records(run.output), console.width))
    with TemporaryDirectory() as folder:
        draw_page(run.output / "report.html", PICTURES / "sweep.png", Path(folder))
        draw_terminal(view.frame, PICTURES / "sweep-terminal.png", Path(folder))
        draw_both("sweep", run.output / "report.html", Path(folder))
        quickstart = read_run(QUICKSTART)
        train(QUICKSTART, progress=False)
        draw_both("report", quickstart.output / "report.html", Path(folder))
        draw_both("failed", failed_report(Path(folder) / "failed"), Path(folder))
        draw_both("gantt", plan_page(Path(folder) / "gantt.html"), Path(folder))
    shutil.copyfile(PICTURES / "report-1280.png", ROOT / "docs" / "report.png")
    return 0


def failed_report(folder: Path) -> Path:
    """The report of a job whose learning rate is far too high."""
    hot = {"name": "hot", "steps": 20, "learning_rate": 1e300, "eval": {"fraction": 0.2}}
    jobs_folder(folder, [hot])
    train(folder / "jobs.yaml", output=folder / "out", progress=False)
    return folder / "out" / "report.html"


def plan_page(file: Path) -> Path:
    run = outlook(ground("4xA100-80G"), outlines(6)).run
    file.write_text(gantt_page(run.timeline, run.program, "4xA100-80G"), encoding="utf-8")
    return file


def draw_both(name: str, page: Path, folder: Path) -> None:
    """A whole page on a wide screen and on a phone, cut where the commands with their paths begin."""
    for width in (WIDE, NARROW):
        copy = folder / "page.html"
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        inner = without_policy(with_script(copy, WITHOUT_COMMANDS))
        # Chromium's own window is never narrower than 500 pixels: a frame inside it is.
        outer = folder / "frame.html"
        height = FIRST_PIXELS
        for _ in range(2):
            frame = f'<iframe src="{inner.name}" style="border: 0; width: {width}px; height: {height}px">'
            listen = "onmessage = (event) => { document.title = event.data; }"
            text = f'<body style="margin: 0">{frame}</iframe><script>{listen}</script></body>'
            outer.write_text(text, encoding="utf-8")
            height = int(load(outer, folder / "profile", max(width, 500)).title)
        shoot(
            outer,
            PICTURES / f"{name}-{width}.png",
            (max(width, 500), min(height, MOST_PIXELS)),
            folder,
            width,
        )


def draw_page(report: Path, picture: Path, folder: Path) -> None:
    copy = folder / "report.html"
    copy.write_text(report.read_text(encoding="utf-8"), encoding="utf-8")
    page = without_policy(with_script(copy, ONLY_THE_SWEEP))
    height = int(load(page, folder / "profile", PAGE_PIXELS).title)
    shoot(page, picture, (PAGE_PIXELS, height), folder)


def draw_terminal(svg: str, picture: Path, folder: Path) -> None:
    page = folder / "terminal.html"
    page.write_text(f"<body style='margin: 0'>{svg}</body>", encoding="utf-8")
    script = "document.title = Math.ceil(document.querySelector('svg').getBoundingClientRect().height)"
    height = int(load(with_script(page, script), folder / "profile", TERMINAL_PIXELS).title)
    shoot(page, picture, (TERMINAL_PIXELS, height), folder)


def shoot(page: Path, picture: Path, size: tuple[int, int], folder: Path, width: int | None = None) -> None:
    """A screenshot in few colours, its first `width` pixels: a picture of a hundred kilobytes or so."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    flags += ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    where = [f"--user-data-dir={folder / 'profile'}", f"--window-size={size[0]},{size[1]}"]
    shot = folder / "shot.png"
    command = [BROWSER, *flags, *where, f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    image = Image.open(shot).convert("RGB")
    image = image.crop((0, 0, width or image.width, image.height))
    image.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
