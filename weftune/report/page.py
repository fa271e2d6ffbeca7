"""`report.html`: one self-contained page about an output folder.

User-given text reaches the page in two ways only: through Jinja's escaping, and as JSON in data blocks
that no browser executes. The content security policy allows the page's own scripts by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from weftune.errors import OutputError
from weftune.report.charts import draw_charts
from weftune.report.read import Run, read_run
from weftune.report.timelines import Timelines, read_timelines, timeline_charts
from weftune.report.view import PageView, in_order, page_view


def write_report(output: Path, run: Run | None = None) -> Path:
    """Draw `report.html` of an output folder anew, and return its path; `run` is the folder where it was read
    already."""
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
    from plotly.offline import get_plotlyjs

    jobs = in_order(run)
    charts = draw_charts(jobs, run.windows, run.left)
    view = page_view(run, jobs, charts, timelines)
    of_sweeps = (chart for sweep in view.sweeps for chart in sweep.charts)
    drawn = (*charts, *of_sweeps, *(timeline_charts(timelines) if timelines else ()))
    figures = {chart.name: chart.figure for chart in drawn if chart.figure is not None}
    return _fill_template(
        view,
        style=_part("page.css"),
        figures=_data_block(figures),
        scripts=(get_plotlyjs(), _part("page.js")) if figures else (_part("page.js"),),
    )


def _fill_template(view: PageView, style: str, figures: str, scripts: Sequence[str]) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_part("page.html.jinja")).render(
        view=view,
        policy=_policy(scripts),
        style=Markup(style),
        figures=Markup(figures),
        scripts=[Markup(script) for script in scripts],
    )


def _part(name: str) -> str:
    """One of the files beside this one, without the newline at its end."""
    return files("weftune.report").joinpath(name).read_text(encoding="utf-8").strip()


def _data_block(value: object) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str]) -> str:
    """Nothing may be fetched, and only the page's own scripts run.

    Styles are free because plotly adds some of its own while it draws, others in every version; with
    nothing to fetch from, a style can carry nothing out.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(_digest(script) for script in scripts)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
