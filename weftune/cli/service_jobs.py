"""The subcommands of `weftune jobs` for the jobs of a service."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weftune.core.files import refuse_full_folder
from weftune.errors import UserError

if TYPE_CHECKING:
    from weftune.service.client import ServiceClient

POLL_SECONDS = 1.0
ENDED = ("succeeded", "failed", "cancelled")
URL, KEY = "WEFTUNE_URL", "WEFTUNE_API_KEY"

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help=f"A service; default: the variable {URL}.")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help=f"An API key; default: the variable {KEY}.")
]


def open_client(url: str | None, key: str | None) -> ServiceClient:
    """Return the client of the service whose URL and key the options or the environment give."""
    from weftune.service.client import ServiceClient

    url, key = url or os.environ.get(URL), key or os.environ.get(KEY)
    if not url:
        raise UserError(f"name a service with --url or {URL}, or a running weftune train with --run")
    if not key:
        raise UserError(f"{url} needs an API key: give --key or {KEY}")
    return ServiceClient(url, key)


def submit_jobs(client: ServiceClient, jobs: Path) -> None:
    from weftune.jobs.spec.read import read_run

    for job in client.submit(read_run(jobs)):
        typer.echo(f"{job['id']}  {job['weftune']['suffix']}")


def list_jobs(client: ServiceClient) -> None:
    for job in client.list_items("/v1/fine_tuning/jobs"):
        typer.echo(summary_line(job))


def summary_line(job: dict[str, Any]) -> str:
    details = job["weftune"]
    steps = f"{details['step']}/{details['steps']}" if details["steps"] else "-"
    line = f"{job['id']}  {details['state']:<16}  {steps:>11}  {details['suffix'] or ''}"
    return f"{line}  {details['reason']}".rstrip()


def show_job(client: ServiceClient, name: str) -> None:
    import yaml

    job = client.job(name)
    shown = {
        key: value
        for key, value in job.items()
        if value not in (None, [], {}) and key not in ("object", "method")
    }
    typer.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), nl=False)


def print_logs(client: ServiceClient, name: str, keeps_following: bool) -> None:
    """Print a job's events, and with `keeps_following` new ones until the job has ended."""
    id, shown = client.job(name)["id"], set()
    while True:
        has_ended = client.job(id)["status"] in ENDED
        for event in client.events(id):
            if event["id"] not in shown:
                shown.add(event["id"])
                at = time.strftime("%H:%M:%S", time.localtime(event["created_at"]))
                typer.echo(f"{at}  {event['level']:<5}  {event['message']}")
        if has_ended or not keeps_following:
            return
        time.sleep(POLL_SECONDS)


def change_job(client: ServiceClient, name: str, verb: str) -> None:
    typer.echo(summary_line(client.change_job(client.job(name)["id"], verb)))


def change_priority(client: ServiceClient, name: str, priority: int) -> None:
    id = client.job(name)["id"]
    client.request("POST", f"/api/jobs/{id}/priority", {"priority": priority})
    typer.echo(f"{id}: priority {priority}")


def download_adapter(client: ServiceClient, name: str, folder: Path | None) -> None:
    """Write the adapter of a finished job to a folder, which is new or empty."""
    job = client.job(name)
    target = folder or Path(job["weftune"]["suffix"] or job["id"])
    refuse_full_folder(target)
    archive = client.adapter(job["id"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            # Only the names of files are taken, never their folders.
            content = files.extractfile(member) if member.isfile() else None
            if content is not None:
                target.mkdir(parents=True, exist_ok=True)
                (target / Path(member.name).name).write_bytes(content.read())
    typer.echo(str(target))
