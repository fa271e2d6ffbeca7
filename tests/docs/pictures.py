"""The pictures of docs/sweeps.md, drawn from a real run: `python -m tests.docs.pictures`.

It trains examples/sweep/jobs.yaml as `weftune train` does, keeps the frame that the terminal shows half-way
between the two rungs, and draws the sweep's part of the report. Chromium and Pillow are needed.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from rich.console import Console

from tests.docs.pages import ROOT
from tests.report.test_browser import BROWSER, load, with_script, without_policy
from weftune.jobs.spec.read import read_run
from weftune.jobs.sweeps.record import SweepRecord
from weftune.report.ending import final_table
from weftune.report.read import read_run as read_records
from weftune.report.terminal import JobRow, LiveView
from weftune.trainer.train import trainer_for
from weftune.trainer.trainer import Options

EXAMPLE = ROOT / "examples" / "sweep" / "jobs.yaml"
PICTURES = ROOT / "docs" / "pictures"
PAGE_PIXELS, TERMINAL_PIXELS = 1040, 900
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


class Watched(LiveView):
    """Keeps the frame that stands half-way from the first rung to the second."""

    frame = ""

    def update(self, row: JobRow) -> None:
        super().update(row)
        record = next(iter(self._sweeps.values()), None)
        if not self.frame and record is not None and len(record.decisions) == 1 and _is_half_way(record, row):
            console = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO(), force_terminal=True)
            console.print(self._frame())
            self.frame = console.export_svg(title="weftune train examples/sweep/jobs.yaml")


def _is_half_way(record: SweepRecord, row: JobRow) -> bool:
    return 2 * row.step >= record.rungs[0] + record.rungs[1]


def main() -> int:
    if BROWSER is None:
        print("There is no Chromium on this machine.")
        return 1
    run, console = read_run(EXAMPLE), Console()
    with Watched(console, []) as view:
        trainer_for(run, options=Options(), view=view).run()
    console.print(final_table(read_records(run.output), console.width))
    with TemporaryDirectory() as folder:
        draw_page(run.output / "report.html", PICTURES / "sweep.png", Path(folder))
        draw_terminal(view.frame, PICTURES / "sweep-terminal.png", Path(folder))
    return 0


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


def shoot(page: Path, picture: Path, size: tuple[int, int], folder: Path) -> None:
    """A screenshot in few colours: a picture of a hundred kilobytes and less."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    where = [f"--user-data-dir={folder / 'profile'}", f"--window-size={size[0]},{size[1]}"]
    shot = folder / "shot.png"
    command = [BROWSER, *flags, *where, f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    image = Image.open(shot).convert("RGB")
    image.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
