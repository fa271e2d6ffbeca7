"""`weftune serve`: a fine-tuning service with OpenAI's API, which trains all jobs on one base."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli.early import (
    DeviceOption,
    GpuMemoryOption,
    MemoryOption,
    check_device,
    parse_bytes,
    refuse_missing_base,
    store_folder,
)
from weftune.errors import MissingPackage, UserError

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.service.settings import Envelope, Quotas, ServiceSettings

PACKAGES = ("fastapi", "uvicorn", "python_multipart", "sqlalchemy", "alembic", "prometheus_client")
EXPECT = re.compile(r"(\d{1,5})xrank(\d{1,5})(?:x(\d{1,7}))?")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
READY_SECONDS = 600.0
"""Seconds for which the start of the service is monitored. Large bases take minutes to load."""


def serve(
    base: Annotated[
        str, typer.Option(metavar="BASE", help="A Hub id, a folder, a GGUF file, demo, or {model: …, …}.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines, behind a TLS proxy.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the service; default: ~/.local/share/weftune."),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="postgresql://… instead of SQLite files in the store."),
    ] = None,
    expect: Annotated[
        str,
        typer.Option(
            metavar="JOBSxrankRANK[xTOKENS]",
            help="Expected jobs, for which the layout is chosen: their number, rank and longest sample.",
        ),
    ] = "16xrank16x1024",
    quota: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Limit per tenant, such as running_jobs=4; repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A Python metric that jobs may use as eval.metric by the function's name; repeatable.",
        ),
    ] = None,
    announce: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of a running vLLM that loads every finished adapter."),
    ] = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    gpu_memory: GpuMemoryOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration without starting the service.")
    ] = False,
) -> None:
    """Serve fine-tuning over HTTP with OpenAI's API: jobs come and go while training runs."""
    refuse_missing_packages()
    check_device(device)
    envelope = read_envelope(expect)
    from weftune.service.settings import ServiceSettings, claim_store, refuse_other_base

    settings = ServiceSettings(
        base=read_base(base),
        store=store_folder(store).absolute(),
        host=host,
        port=port,
        database=database,
        device=device,
        memory=None if memory is None else parse_bytes(memory),
        gpu_memory=None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory"),
        envelope=envelope,
        quotas=read_quotas(quota or []),
        announce=None if announce is None else parse_announce_url(announce),
        metrics=read_metrics(metric or []),
    )
    refuse_missing_base(settings.base)
    refuse_other_base(settings)
    refuse_taken_port(host, port)
    claim_store(settings)
    from weftune.service.store.database import upgrade_store

    upgrade_store(settings)
    if check:
        typer.echo(
            f"{settings.base_name} can be served at {service_url(settings)}; the store is {settings.store}."
        )
        return
    show_start(settings)
    from weftune.service.processes import supervise

    raise typer.Exit(supervise(settings))


def refuse_missing_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackage(f"weftune serve needs {', '.join(missing)}: pip install 'weftune[serve]'")


def read_base(text: str) -> BaseSpec:
    """Return the specification of the base model that `text` describes: by its name, or by its keys as in a
    jobs file."""
    from weftune.jobs.spec.read import parse_base

    values = text
    if text.lstrip().startswith("{"):
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(
                f"--base {text}: is not a YAML mapping; write {{model: …, quantize: nf4}}"
            ) from None
    return parse_base(values if isinstance(values, dict) else {"model": values})


def read_envelope(text: str) -> Envelope:
    from weftune.service.settings import Envelope

    found = EXPECT.fullmatch(text.replace(" ", ""))
    if found is None or not all(int(number) for number in found.groups("1")):
        raise UserError(
            f"--expect {text}: write how many jobs of which rank, such as 64xrank16, or 64xrank16x2048 for "
            "samples of up to 2048 tokens"
        )
    jobs, rank, tokens = found.groups()
    envelope = Envelope(jobs=int(jobs), rank=int(rank))
    return envelope if tokens is None else Envelope(jobs=int(jobs), rank=int(rank), sample_tokens=int(tokens))


def read_quotas(texts: Sequence[str]) -> Quotas:
    """Return the quotas. Each string `KEY=VALUE` changes one quota; the value `none` disables it."""
    from weftune.jobs.spec.keys import nearest_word
    from weftune.service.settings import Quotas

    known = [item.name for item in fields(Quotas)]
    quotas: dict[str, int | None] = {}
    for text in texts:
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in known:
            near = nearest_word(key, known)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
            raise UserError(f"--quota {text}: {key} is not known; {hint}")
        if value == "none" and key in ("file_bytes", "file_rows"):
            raise UserError(f"--quota {text}: {key} needs a number, since uploads fill the disk otherwise")
        number = None if value == "none" else parse_bytes(value, f"--quota {key}")
        if number is not None and number < 1:
            raise UserError(f"--quota {text}: write a number of at least 1, or none")
        quotas[key] = number
    return replace(Quotas(), **quotas)  # type: ignore[arg-type]


def parse_announce_url(url: str) -> str:
    parsed = urllib.parse.urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise UserError(f"--announce {url}: is no address of a vLLM; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def read_metrics(texts: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the name of each Python metric to its `FILE.py:NAME`. Each metric is imported
    once, to check that this works."""
    from weftune.data.spec import EXACT_MATCH
    from weftune.generate.metric import load_metric
    from weftune.jobs.spec.build import locate_metric

    metrics: dict[str, str] = {}
    for text in texts:
        try:
            located = locate_metric(Path.cwd(), text)
        except ValueError as error:
            raise UserError(f"--metric: {error}") from None
        file, _, name = located.rpartition(":")
        if located == EXACT_MATCH:
            raise UserError(f"--metric {text}: jobs may use it without this option; leave it out")
        if name in metrics:
            raise UserError(
                f"--metric {text}: there is a metric {name} already; give the function another name"
            )
        load_metric(Path(file), name)
        metrics[name] = located
    return metrics


def refuse_taken_port(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except socket.gaierror:
        raise UserError(f"--host {host}: is no address of this machine") from None
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "another program listens there; choose another --port, or stop it",
            errno.EACCES: "ports below 1024 need special rights; choose another --port",
        }
        reason = reasons.get(error.errno or 0, f"{error.strerror}; choose another --host or --port")
        raise UserError(f"cannot listen on {host}:{port}: {reason}") from None


def service_url(settings: ServiceSettings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def show_start(settings: ServiceSettings) -> None:
    """Print what is started, how to get a key if there is none, and later that the service is ready."""
    from weftune.service.keys import KeyFile

    typer.echo(f"Weftune serves {settings.base_name} at {service_url(settings)}/v1; Ctrl-C stops it.")
    typer.echo(f"Files, jobs and adapters are kept in {settings.store}.")
    if not KeyFile(settings.keys).keys():
        typer.echo(
            f"There is no API key yet; create one with: weftune keys create TENANT --store {settings.store}"
        )
    if settings.host not in LOOPBACK:
        typer.echo("Other machines can reach it: put a proxy with TLS before it (docs/operations.md).")
    threading.Thread(target=_report_readiness, args=(settings,), daemon=True).start()


def _report_readiness(settings: ServiceSettings) -> None:
    """Print a line as soon as the service is ready for jobs."""
    begun = time.monotonic()
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    address = f"http://{host}:{settings.port}/readyz"
    while time.monotonic() - begun < READY_SECONDS:
        try:
            with urllib.request.urlopen(address, timeout=2):
                typer.echo(f"Ready after {time.monotonic() - begun:.0f} s.")
                return
        except OSError:
            time.sleep(0.5)
