"""The prediction for a job or a sweep that has not been submitted, when it trains together with the service's
current jobs. A separate process runs `weftune plan`, because planning takes seconds of CPU time, in which the
HTTP process could not answer requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from weftune.errors import UserError, WeftuneError
from weftune.jobs.sweeps.read import read_sweep
from weftune.jobs.sweeps.search import trial_names
from weftune.jobs.sweeps.spec import Trial
from weftune.report.words import count_noun
from weftune.service.settings import ServiceSettings

log = logging.getLogger(__name__)

NEW = "this-job"
"""Name of the new job in the plan. If the job is a sweep, the names of its trials begin with this name."""
TIMEOUT_SECONDS = 60.0
NICENESS = 5
"""Niceness of the planning process: how much lower its priority is than that of the HTTP and training
processes."""


class PlanFailed(WeftuneError):
    """An error raised if no plan can be made for a reason other than an error in the job."""


@dataclass(frozen=True, slots=True)
class OtherJob:
    """A job that trains or waits while the plan of a new job is computed."""

    name: str
    """Name of the job in the plan and in its messages."""
    job: Mapping[str, Any]
    """Specification of the job, as keys and values of jobs.yaml."""
    priority: int
    """Effective priority that the service's policy has assigned to the job."""
    remaining_steps: int | None
    """Number of steps that the job still has to make. None if it is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPreview:
    """The predictions for a trial, one of the jobs of a sweep."""

    name: str
    values: Mapping[str, Any]
    why_not: str
    """Reason why the trial cannot run even alone. Empty if it can; otherwise all numbers of this record are
    0."""
    waits_for: str = ""
    """Reason why the trial has to wait before it is admitted. Empty if it can start at once."""
    steps: int = 0
    seconds: float = 0.0
    """Predicted seconds until the trial ends if no trial is dropped."""
    state_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The predictions for a new job or sweep. For a sweep, each number is for all its trials (jobs) together,
    if no trial is dropped."""

    why_not: str
    """Reason why the job, or a trial of the sweep, cannot run even alone. Empty if all can."""
    waits_for: str = ""
    """Reason why the job, or every trial of the sweep, has to wait before it is admitted. Empty if a job or
    trial can start at once."""
    steps: int = 0
    seconds: float = 0.0
    """Predicted seconds until the job or the last trial ends."""
    state_bytes: int = 0
    """Predicted bytes of the adapters, their gradients and the states of their optimizers."""
    needs_bytes: int = 0
    """Predicted peak memory, in bytes, of all jobs together."""
    budget_bytes: int = 0
    source: str = ""
    """Description of where the predicted times come from, such as measurements of this device."""
    trials: Sequence[TrialPreview] = ()
    """Trials of a sweep, in the order of the sweep."""
    rungs: Sequence[Mapping[str, int]] = ()
    """Steps at which a sweep compares its trials, each as `step` and `trials`, the number of trials that
    reach it. The last step is the end of training."""
    expected_share: float = 1.0
    """Fraction of all samples of its trials that a sweep is expected to train on, since successive halving
    drops trials."""
    warnings: Sequence[str] = ()


async def preview(
    settings: ServiceSettings,
    job: Mapping[str, Any],
    trials: Mapping[str, Trial],
    priority: int,
    others: Sequence[OtherJob],
    budget_bytes: int | None,
    hold_reasons: Mapping[str, str],
) -> Preview:
    """Plan a job with an effective priority, together with `others`, which precede it among jobs of equal
    priority.

    `trials` maps the names of a sweep's trials in the plan to the trials; the mapping is empty for a job that
    is no sweep. `hold_reasons` maps names in the plan to the reason why a quota would hold the job or trial
    back. `budget_bytes` is the host memory for training on a CPU, including memory that is already in use;
    None if it is not known. Raise UserError for an error in the job, and PlanFailed if the plan takes too
    long.
    """
    jobs = [_planned_job(one) for one in others] + [{**job, "name": NEW, "priority": priority}]
    base = {key: value for key, value in settings.base.record().items() if value is not None}
    with TemporaryDirectory(prefix="weftune-plan-") as folder:
        file, answer = Path(folder, "jobs.yaml"), Path(folder, "plan.json")
        # The order of a sweep's keys is that of its trials.
        content = yaml.safe_dump({"base": base, "jobs": jobs}, sort_keys=False)
        file.write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "weftune", "plan", str(file), "--json", str(answer)]
        status, output = await _run([*command, *_plan_options(settings, budget_bytes)])
        if status == 0:
            plan = json.loads(answer.read_text(encoding="utf-8"))
            plan["waiting"] |= hold_reasons
            return _read_preview(plan, trials)
    message = _public_message(output)
    if status == 2 and (found := re.findall(rf"job ({NEW}\S*): (even alone,? .*)", message)):
        return _refused_preview(dict(found), trials)
    if status == 2 and not re.search(r"job other-\d+", message):
        raise UserError(message)
    log.warning("a plan failed with status %d: %s", status, message)
    raise PlanFailed("The plan could not be made; the job can be submitted all the same.")


def planned_trials(job: Mapping[str, Any], trials: Sequence[Trial]) -> dict[str, Trial]:
    """Return the trials (jobs) of a sweep, each under its name in the plan."""
    if not trials:
        return {}
    spec, _ = read_sweep(job)
    assert spec is not None, "the trials were made from it"
    return dict(zip(trial_names(NEW, spec.over, [one.values for one in trials]), trials, strict=True))


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
    """Return the planning process's error output without paths of this machine, as a message for clients."""
    text = re.sub(r"/\S*/(?=[^/\s]+)", "", output.strip())
    return re.sub(r"^(Error|error): ", "", text)


def _refused_preview(reasons: Mapping[str, str], trials: Mapping[str, Trial]) -> Preview:
    """Return the preview of a job or sweep that cannot run. `reasons` maps names in the plan to the reason
    why the job or trial cannot run."""
    name, why_not = next(iter(reasons.items()), ("", ""))
    if trials and reasons:
        why_not = (
            f"{len(reasons)} of {count_noun(len(trials), 'trial')} cannot run; {trials[name].name}: {why_not}"
        )
    return Preview(
        why_not=why_not,
        trials=[
            TrialPreview(name=one.name, values=one.values, why_not=reasons.get(name, ""))
            for name, one in trials.items()
        ],
    )


def _read_preview(plan: Mapping[str, Any], trials: Mapping[str, Trial]) -> Preview:
    run, names = plan["run"], list(trials) or [NEW]
    own, too_large, waiting = run["jobs"], plan["too_large"], plan["waiting"]
    refused = {
        name: too_large.get(name, "it cannot run") for name in names if name in too_large or name not in own
    }
    found = _refused_preview(refused, trials)
    planned = [name for name in names if name not in refused]
    if not planned:
        return found
    waits = [waiting.get(name, "") for name in planned]
    found = replace(
        found,
        waits_for=waits[0] if all(waits) else "",
        steps=sum(own[name]["steps"] for name in planned),
        seconds=max(own[name]["ends"] for name in planned),
        state_bytes=sum(own[name]["state_bytes"] for name in planned),
        needs_bytes=run["needs_bytes"],
        budget_bytes=run["budget_bytes"],
        source=plan["source"],
    )
    if not trials:
        return found
    [sweep] = plan["sweeps"]
    return replace(
        found,
        trials=[
            one
            if name in refused
            else replace(
                one,
                waits_for=waiting.get(name, ""),
                steps=own[name]["steps"],
                seconds=own[name]["ends"],
                state_bytes=own[name]["state_bytes"],
            )
            for name, one in zip(trials, found.trials, strict=True)
        ],
        rungs=sweep["rungs"],
        expected_share=sweep["samples"]["expected"] / sweep["samples"]["all"],
        warnings=sweep["warnings"],
    )
