"""`report.html`: one self-contained page about an output folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from weftune.errors import OutputError
from weftune.report.charts import draw_charts
from weftune.report.read import Run, read_run
from weftune.report.template import render
from weftune.report.timelines import Timelines, read_timelines
from weftune.report.view import in_order, page_view


def write_report(output: Path, run: Run | None = None) -> Path:
    """Write `report.html` of an output folder and return its path. `run` is the folder's content if it was
    already read."""
    run = run or read_run(output)
    target = output / "report.html"
    draft = output / "report.html.tmp"
    page = render_page(run, read_timelines(output))
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise OutputError(f"{target} cannot be written: {error.strerror}") from error
    return target


def render_page(run: Run, timelines: Timelines | None = None) -> str:
    jobs = in_order(run)
    view = page_view(run, jobs, draw_charts(jobs, run.windows, run.left), timelines)
    drawn = {chart.name: chart.data for chart in view.pipeline.charts} if view.pipeline else {}
    return render("page.html.jinja", view, drawn)
