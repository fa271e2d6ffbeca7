"""The command `weftune`: one file per subcommand; user errors are printed as sentences, with exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from weftune.cli.bench import bench
from weftune.cli.doctor import doctor
from weftune.cli.early import USER_ERROR_CODE
from weftune.cli.eval import eval
from weftune.cli.export import export
from weftune.cli.generate import generate
from weftune.cli.jobs import app as jobs
from weftune.cli.keys import keys
from weftune.cli.plan import plan
from weftune.cli.preview import preview
from weftune.cli.report import report
from weftune.cli.serve import serve
from weftune.cli.train import train
from weftune.errors import UserError

COMMANDS = (train, preview, plan, generate, eval, export, report, serve, doctor, bench)

app = typer.Typer(
    name="weftune",
    help="Fine-tune many adapters at once on one frozen base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in COMMANDS:
    app.command()(verb)
app.add_typer(keys)
app.add_typer(jobs, name="jobs")


def _show_version(version_requested: bool) -> None:
    if version_requested:
        from importlib.metadata import version

        typer.echo(f"weftune {version('weftune')}")
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
        if os.environ.get("WEFTUNE_DEBUG", "0") not in ("", "0"):
            raise
        for mistake in error.mistakes:
            typer.echo(str(mistake), err=True)
        sys.exit(USER_ERROR_CODE)
