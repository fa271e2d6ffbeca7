"""Self-contained HTML pages, rendered from templates.

Strings from users reach a page in two ways only: escaped by markupsafe (in the template and in charts), and
as JSON in data blocks that no browser executes. The content security policy allows the page's own script by
its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from weftune.report.svg import Figure, figure_html, line_sample_html
from weftune.report.words import split_breakable


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its label, shown in large type at the top of a page."""

    label: str
    value: str
    detail: str = ""


def render_template(template: str, timelines: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Render an HTML page from one of the report's templates. The page's script draws `timelines`."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_read_template_file),
    )
    script = _read_template_file("page.js")
    return environment.get_template(template).render(
        **values,
        policy=_security_policy(script),
        style=Markup(_read_template_file("page.css")),
        timelines=Markup(_data_block(timelines)),
        script=Markup(script),
        figure=figure_html,
        breakable=split_breakable,
        line_sample=line_sample_html,
    )


def chart_page(title: str, figure: Figure) -> str:
    """Return an HTML page with one chart and no script."""
    from markupsafe import Markup

    text = Markup(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>{0}</title><style>{1}</style>'
        "<main><figure><h3>{0}</h3>{2}</figure></main></html>"
    )
    return text.format(title, Markup(_read_template_file("page.css")), figure_html(figure))


def _read_template_file(name: str) -> str:
    """Return the content of a file that belongs to the report's templates, without the newline at its end."""
    return files("weftune.report").joinpath(name).read_text(encoding="utf-8").strip()


def _data_block(value: object) -> str:
    """Return a value as JSON for use inside a script element. Characters are escaped so that the JSON cannot
    end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _security_policy(script: str) -> str:
    """Return a content security policy by which nothing may be fetched and only the page's own script runs.
    Inline styles, which place the labels of charts, are allowed, since they cannot send data while nothing
    may be fetched."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
