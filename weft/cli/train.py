"""`weft train jobs.yaml`: train every job of the file together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SOME_FAILED, INTERRUPTED = 1, 130


def train(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")],
    output: Annotated[Path | None, typer.Option(help="Where results go; else the file's `output`.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; else the best there is.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="End every job after so many steps.")] = None,
    memory: Annotated[str | None, typer.Option(help="What the run may take, such as 8GiB.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the output holds.")] = False,
    restart: Annotated[
        list[str] | None, typer.Option(metavar="JOB", help="With --resume: train this job anew.")
    ] = None,
) -> None:
    """Train every job of a jobs file together; each becomes a PEFT adapter in the output folder."""
    from rich.console import Console

    from weft.base.load import shape_at_hand
    from weft.errors import UserError
    from weft.jobs.read import read_run
    from weft.jobs.states import State
    from weft.report.ending import final_table
    from weft.report.read import read_run as read_records
    from weft.report.terminal import LiveView
    from weft.report.words import plural
    from weft.trainer import Options, trainer_for

    if restart and not resume:
        raise UserError("--restart goes with --resume: it names the job of an earlier run to train anew")
    run = read_run(jobs, shape_at_hand)
    console = Console()
    console.print(f"Weft: {plural(len(run.jobs), 'job')} on {run.base.model}", highlight=False)
    most = bytes_of(memory) if memory else None
    options = Options(device=device, resume=resume, restart=tuple(restart or ()), memory=most)
    with LiveView(console, []) as view:
        trainer = trainer_for(run, output=output, max_steps=max_steps, options=options, view=view)
        results = trainer.run()
    folder = trainer.output
    console.print(final_table(read_records(folder), console.width))
    console.print(f"Report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if trainer.interrupted:
        console.print("Interrupted. Go on with --resume.")
        raise typer.Exit(INTERRUPTED)
    if any(result.state is not State.SUCCEEDED for result in results.values()):
        raise typer.Exit(SOME_FAILED)


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str) -> int:
    """`8GiB` in bytes."""
    from weft.errors import UserError

    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"--memory {text}: write a number and a unit, such as 8GiB") from None
