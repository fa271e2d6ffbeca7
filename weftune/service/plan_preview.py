"""The plan of a job before it is submitted, beside the jobs that the service has already.

It is made by `weftune plan` itself, in a process that ends with it: planning takes seconds of a core, and the
HTTP process could not answer requests meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from weftune.errors import UserError, WeftuneError
from weftune.service.settings import ServiceSettings

log = logging.getLogger(__name__)

NEW = "this-job"
"""Name of the new job in the plan."""
TIMEOUT_SECONDS = 60.0
NICENESS = 10
"""Niceness of the planning process: how much lower its priority is than that of the HTTP and training
processes."""


class PlanFailed(WeftuneError):
    """An error raised if planning fails for a reason other than the job itself."""


@dataclass(frozen=True, slots=True)
class OtherJob:
    """A job that trains or waits."""

    name: str
    """Name of the job in the plan and in its messages."""
    job: Mapping[str, Any]
    """Keys of jobs.yaml."""
    priority: int
    """Effective priority, which the service's policy has given the job."""
    remaining_steps: int | None
    """Number of steps that the job still has to make. None if it is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The predictions for a new job."""

    why_not: str
    """Why the job cannot run even alone. Empty if it can; otherwise all numbers are 0."""
    waits_for: str = ""
    """Why the job has to wait before it is admitted. Empty if it starts at the next window."""
    steps: int = 0
    seconds: float = 0.0
    """Predicted seconds until the job ends."""
    state_bytes: int = 0
    """Memory of the adapter, its gradients and the state of its optimizer."""
    needs_bytes: int = 0
    """Predicted peak of all jobs together."""
    budget_bytes: int = 0
    source: str = ""
    """Source of the predicted times."""


async def preview(
    settings: ServiceSettings,
    job: Mapping[str, Any],
    priority: int,
    others: Sequence[OtherJob],
    budget_bytes: int | None,
) -> Preview:
    """Plan a job with an effective priority behind `others`, which come first among jobs of equal priority.

    `budget_bytes` is the host memory that training on a CPU may take, of which it has taken a part already;
    None if it is not known. Raise UserError for a mistake in the job, and PlanFailed if the plan takes too
    long.
    """
    jobs = [_planned_job(one) for one in others] + [{**job, "name": NEW, "priority": priority}]
    base = {key: value for key, value in settings.base.record().items() if value is not None}
    with TemporaryDirectory(prefix="weftune-plan-") as folder:
        file, answer = Path(folder, "jobs.yaml"), Path(folder, "plan.json")
        file.write_text(yaml.safe_dump({"base": base, "jobs": jobs}), encoding="utf-8")
        command = [sys.executable, "-m", "weftune", "plan", str(file), "--json", str(answer)]
        status, output = await _run([*command, *_plan_options(settings, budget_bytes)])
        if status == 0:
            return _read_preview(json.loads(answer.read_text(encoding="utf-8")))
    message = _public_message(output)
    if status == 2 and (found := re.search(rf"{NEW}: (even alone it .*)", message)):
        return Preview(why_not=found[1])
    if status == 2 and not re.search(r"job other-\d+", message):
        raise UserError(message)
    log.warning("a plan failed with status %d: %s", status, message)
    raise PlanFailed("The plan could not be made; the job can be submitted all the same.")


def _planned_job(job: OtherJob) -> dict[str, Any]:
    keys = {**job.job, "name": job.name, "priority": job.priority}
    if job.remaining_steps is not None:
        keys.pop("epochs", None)
        keys["steps"] = max(1, job.remaining_steps)
    return keys


def _plan_options(settings: ServiceSettings, budget_bytes: int | None) -> list[str]:
    device = [] if settings.device is None else ["--device", settings.device]
    limits = {"--memory": budget_bytes or settings.memory, "--gpu-memory": settings.gpu_memory}
    return device + [word for name, value in limits.items() if value for word in (name, f"{value >> 20}MiB")]


async def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit status of a command and its standard error output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "10000", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    try:
        _, output = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
    except TimeoutError:
        raise PlanFailed("The plan takes too long; the job can be submitted all the same.") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode("utf-8", "replace")


def _public_message(output: str) -> str:
    """Return the message without paths of this machine."""
    text = re.sub(r"/\S*/(?=[^/\s]+)", "", output.strip())
    return re.sub(r"^(Error|error): ", "", text)


def _read_preview(plan: Mapping[str, Any]) -> Preview:
    own, run = plan["run"]["jobs"].get(NEW), plan["run"]
    if (why_not := plan["too_large"].get(NEW)) or own is None:
        return Preview(why_not=why_not or "it cannot run")
    return Preview(
        why_not="",
        waits_for=plan["waiting"].get(NEW, ""),
        steps=own["steps"],
        seconds=own["ends"],
        state_bytes=own["state_bytes"],
        needs_bytes=run["needs_bytes"],
        budget_bytes=run["budget_bytes"],
        source=plan["source"],
    )
