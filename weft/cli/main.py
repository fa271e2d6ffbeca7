"""The command `weft`: one file a verb, and every user's mistake as sentences with exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from weft.cli.bench import bench
from weft.cli.doctor import doctor
from weft.cli.export import export
from weft.cli.generate import generate
from weft.cli.plan import plan
from weft.cli.preview import preview
from weft.cli.report import report
from weft.cli.train import train
from weft.errors import UserError

MISTAKE = 2
"""The exit code of a user's mistake, as typer's own for a wrong option."""

VERBS = (train, preview, plan, generate, export, report, doctor, bench)

app = typer.Typer(
    name="weft",
    help="Fine-tune many adapters at once on one frozen base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in VERBS:
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"weft {version('weft')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune many adapters at once on one frozen base model."""


def main() -> None:
    try:
        app()
    except UserError as error:
        if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
            raise
        for mistake in error.mistakes:
            typer.echo(str(mistake), err=True)
        sys.exit(MISTAKE)
