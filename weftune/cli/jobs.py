"""`weftune jobs`: list, submit, pause, resume and cancel jobs of a running `weftune train` or a service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli import service_jobs
from weftune.cli.service_jobs import KeyOption, UrlOption, open_client
from weftune.errors import OutputError, SpecError, UserError

if TYPE_CHECKING:
    from weftune.jobs.store.inbox import FileRequest, RequestAnswer

POLL_SECONDS = 0.1
"""Seconds between two checks whether the run has answered."""
PATIENT_SECONDS = 3.0
"""Seconds without an answer after which the command prints what it waits for."""
RESTART_SECONDS = 5.0
"""Seconds without any process in the output folder after which the run is considered ended. The wait is
needed because a run of several processes restarts when it loses one of them."""

app = typer.Typer(help="List, add, pause, resume and cancel jobs while they train.", no_args_is_help=True)

RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="OUTPUT", help="The output folder of a running weftune train.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The name of a job, or its id in a service.")]


@app.command("list")
def list_jobs(run: RunOption = None, url: UrlOption = None, key: KeyOption = None) -> None:
    """List the jobs of a run or of a service with their states."""
    if run is None:
        service_jobs.list_jobs(open_client(url, key))
        return
    from rich.console import Console

    from weftune.report.ending import job_state_table
    from weftune.report.read import read_run
    from weftune.report.terminal import safe_output

    Console(file=safe_output()).print(job_state_table(read_run(run).jobs), crop=False)


@app.command()
def add(
    jobs: Annotated[
        Path, typer.Argument(metavar="JOBS.YAML", help="Jobs file with the same base as the run.")
    ],
    run: Annotated[
        Path, typer.Option("--run", metavar="OUTPUT", help="The output folder of a running weftune train.")
    ],
) -> None:
    """Add the jobs of a jobs file to a running run."""
    from weftune.jobs.spec.read import read_added_run
    from weftune.jobs.store.inbox import FileRequest, read_run_status
    from weftune.jobs.store.shares import share_folders

    _refuse_inactive_run(run)
    if share_folders(run):
        raise UserError(
            f"jobs cannot join {run}: a run with --gpus divides its jobs among the GPUs at its start; train "
            "them with another weftune train"
        )
    try:
        text = jobs.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError(f"cannot read {jobs}: {reason}") from None
    path = jobs.resolve()
    # Mistakes in the file are reported at once, with their lines.
    read_added_run(text, path, list(read_run_status(run).jobs))
    _send_request(run, run, FileRequest(verb="add", file=str(path), text=text))


@app.command()
def pause(job: JobArgument, run: RunOption = None, url: UrlOption = None, key: KeyOption = None) -> None:
    """Save a job and take it out of the run until it is resumed."""
    if run is None:
        service_jobs.change_job(open_client(url, key), job, "pause")
    else:
        _request_for_job(run, job, "pause")


@app.command()
def resume(job: JobArgument, run: RunOption = None, url: UrlOption = None, key: KeyOption = None) -> None:
    """Resume a paused job."""
    if run is None:
        service_jobs.change_job(open_client(url, key), job, "resume")
    else:
        _request_for_job(run, job, "resume")


@app.command()
def cancel(job: JobArgument, run: RunOption = None, url: UrlOption = None, key: KeyOption = None) -> None:
    """Cancel a job; the others continue."""
    if run is None:
        service_jobs.change_job(open_client(url, key), job, "cancel")
    else:
        _request_for_job(run, job, "cancel")


@app.command()
def priority(
    job: JobArgument,
    value: Annotated[
        int, typer.Argument(metavar="N", help="New priority. Jobs of higher priority are admitted first.")
    ],
    run: RunOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Change the priority of a job."""
    if run is None:
        service_jobs.change_priority(open_client(url, key), job, value)
    else:
        _request_for_job(run, job, "priority", value)


@app.command()
def submit(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="A jobs file, as weftune train takes.")],
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Upload the rows of a jobs file to a service and submit its jobs; their ids are printed."""
    service_jobs.submit_jobs(open_client(url, key), jobs)


@app.command()
def show(job: JobArgument, url: UrlOption = None, key: KeyOption = None) -> None:
    """Show a job of a service."""
    service_jobs.show_job(open_client(url, key), job)


@app.command()
def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new events.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Print the events of a job of a service."""
    service_jobs.print_logs(open_client(url, key), job, follow)


@app.command()
def download(
    job: JobArgument,
    folder: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Folder to create.")] = None,
    url: UrlOption = None,
    key: KeyOption = None,
) -> None:
    """Download the adapter of a finished job of a service."""
    service_jobs.download_adapter(open_client(url, key), job, folder)


def _request_for_job(run: Path, job: str, verb: str, value: int = 0) -> None:
    from weftune.jobs.spec.keys import nearest_word
    from weftune.jobs.store.inbox import FileRequest, find_inbox_folder, is_active, read_run_status

    _refuse_inactive_run(run)
    folder = find_inbox_folder(run, job)
    status = read_run_status(folder)
    # Before its first window, a run may not have written the status yet.
    if status.jobs and job not in status.jobs:
        near = nearest_word(job, read_run_status(run).jobs)
        hint = f"did you mean {near}?" if near else f"see weftune jobs list --run {run}"
        raise SpecError(f"there is no job {job} in {run}; {hint}")
    if folder != run and not is_active(folder):
        raise UserError(
            f"the process that trained {job} has ended, while others of {run} still train; when they have "
            f"ended, resume with {status.command}"
        )
    _send_request(run, folder, FileRequest(verb=verb, job=job, priority=value))  # type: ignore[arg-type]


def _refuse_inactive_run(run: Path) -> None:
    from weftune.jobs.store.inbox import is_active, read_run_status
    from weftune.jobs.store.status import STATUS

    if is_active(run):
        return
    if not (run / STATUS).exists():
        raise OutputError(f"{run} holds no run: name the output folder of a running weftune train")
    command = read_run_status(run).command
    again = f"; resume it with {command}" if command else ""
    raise OutputError(f"no weftune train is running in {run}{again}")


def _send_request(run: Path, folder: Path, request: FileRequest) -> None:
    """Write a request to the inbox in `folder`, which a running `weftune train` reads, wait for the run's
    answer, and print the answer."""
    from weftune.jobs.store.inbox import write_request

    path = write_request(folder, request)
    try:
        answer = _wait_for_answer(folder, path)
    except KeyboardInterrupt:
        typer.echo("The request remains; the run reads it at the end of its window.", err=True)
        raise typer.Exit(130) from None
    if answer is None:
        raise OutputError(f"the run in {run} ended before it read the request")
    if not answer.accepted:
        raise UserError(answer.sentence)
    typer.echo(f"{answer.sentence}.")


def _wait_for_answer(folder: Path, path: Path) -> RequestAnswer | None:
    """Wait for the answer to a request and return it. If the run ends without an answer, withdraw the request
    and return None."""
    from weftune.jobs.store.inbox import is_active, pop_answer

    began = last_active = time.monotonic()
    is_told = False
    while (answer := pop_answer(path)) is None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if is_active(folder):
            last_active = now
        elif now - last_active > RESTART_SECONDS:
            path.unlink(missing_ok=True)
            return pop_answer(path)
        if not is_told and now - began > PATIENT_SECONDS:
            is_told = True
            typer.echo("Waiting for the end of the running window.", err=True)
    return answer
