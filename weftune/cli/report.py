"""`weftune report DIR`: redraw the report of an output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    output: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `weftune train` has written to.")
    ],
) -> None:
    """Redraw report.html of an output folder and print its path."""
    from weftune.report.page import write_report

    typer.echo(write_report(output))
