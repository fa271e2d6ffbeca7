"""Stores for several processes that train into one output folder. Each process trains a share (a part of the
jobs) with workers of its own.

The store of a share contains all data about its jobs, including that of earlier runs; the output folder's own
store contains all other data. Merging the stores can be repeated, so that a run that is killed meanwhile
neither loses nor duplicates data."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftune.core.files import filtered_lines, replace_file, replace_json, sync_folder
from weftune.errors import OutputError
from weftune.jobs.store.status import (
    FITTED_MODELS,
    METRICS,
    WINDOWS,
    RunStatus,
    State,
    lock_folder,
    read_status,
    requeue_jobs,
    write_status,
)
from weftune.plan.layout.split import DeviceShare

SHARES = ".shares"
"""Name of the folder with the stores of the processes that each train a part of the jobs. No job may have
this name."""
SHARES_FILE = "shares.json"
"""Name of the file that records how the jobs were last divided among processes, with the predicted and
measured seconds of each process."""
EXIT_SECONDS = 10.0
"""Maximum seconds that processes, which each train a part of the jobs, need to notice that their launcher was
killed."""


def share_folder(output: Path, number: int) -> Path:
    return output / SHARES / str(number)


def share_folders(output: Path) -> list[Path]:
    """Return the folders of the processes that each train a part of a run's jobs. Folders that do not exist
    are left out."""
    numbers = sorted(int(path.name) for path in (output / SHARES).glob("*") if path.name.isdecimal())
    return [share_folder(output, number) for number in numbers]


# -- before ---------------------------------------------------------------------------------------------


def create_shares(output: Path, status: RunStatus, shares: Sequence[DeviceShare]) -> None:
    """Create a store for each share (the part of the jobs that one process trains), with all data about its
    jobs. All stores appear atomically."""
    fresh = output / f"{SHARES}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    for number, share in enumerate(shares):
        folder = fresh / str(number)
        folder.mkdir(parents=True)
        replace_file(folder / METRICS, _share_lines(output, share.jobs))
        if (output / FITTED_MODELS).exists():
            shutil.copyfile(output / FITTED_MODELS, folder / FITTED_MODELS)
        jobs = {name: status.jobs[name] for name in share.jobs}
        write_status(folder, replace(status, device="", dtype="", notes=(), jobs=jobs))
    record = {
        "before": {"seconds": status.seconds, "solo_seconds": status.solo_seconds},
        "shares": [{"jobs": share.jobs, "predicted_seconds": share.seconds} for share in shares],
    }
    replace_json(output / SHARES_FILE, record)
    fresh.replace(output / SHARES)
    sync_folder(output)


def _share_lines(folder: Path, jobs: Collection[str]) -> bytes:
    """Return the lines of metrics.jsonl that belong to the given jobs."""
    return filtered_lines(folder / METRICS, lambda line: line.get("job") in jobs)


# -- after ----------------------------------------------------------------------------------------------


def merge_shares(output: Path, run_status: RunStatus) -> RunStatus:
    """Merge the files of all shares (parts of the jobs, each trained by one process) into those of the output
    folder: metrics, records of windows (a few global batches of every job each), and fitted models of time
    and memory. Return the combined status, which the caller writes before it calls `delete_shares`."""
    folders = share_folders(output)
    with ExitStack() as locks:
        for folder in folders:
            locks.callback(os.close, _lock_share(folder, output))
        statuses = [read_status(folder) for folder in folders]
        owned = frozenset(name for status in statuses for name in status.jobs)
        others = filtered_lines(output / METRICS, lambda line: line.get("job") not in owned)
        replace_file(output / METRICS, others + b"".join(_share_lines(folder, owned) for folder in folders))
        replace_file(output / WINDOWS, _read_windows([output, *folders]))
        _save_fitted_models(output, folders)
        _save_seconds(output, statuses)
    # Paused jobs stay paused: the run may be about to end.
    return requeue_jobs(combine_statuses(output, run_status, statuses), (State.RUNNING,))


def delete_shares(output: Path) -> None:
    """Delete the stores of all shares (parts of the jobs, each trained by one process). The stores are
    renamed first, so that a partly deleted one is never mistaken for a complete one."""
    old = output / f"{SHARES}.old"
    shutil.rmtree(old, ignore_errors=True)
    if (output / SHARES).exists():
        (output / SHARES).rename(old)
        shutil.rmtree(old, ignore_errors=True)


def read_shares(output: Path) -> list[RunStatus]:
    """Return the statuses of the processes that each train a part of the jobs, except statuses that cannot be
    read."""
    found = []
    for folder in share_folders(output):
        with suppress(OutputError):
            found.append(read_status(folder))
    return found


def combine_statuses(output: Path, run_status: RunStatus, shares: Sequence[RunStatus]) -> RunStatus:
    """Return the status of the output folder combined with the statuses of its shares: parts of the jobs that
    processes of their own have trained at the same time."""
    if not shares:
        return run_status
    before = _totals_before(output, run_status)
    alone = before.solo_seconds or before.seconds
    solo = [share.solo_seconds - alone for share in shares if share.solo_seconds is not None]
    peaks = [share.peak_bytes for share in (run_status, *shares) if share.peak_bytes is not None]
    devices = dict.fromkeys(share.device for share in shares if share.device)
    jobs = dict(run_status.jobs)
    for share in shares:
        jobs.update(share.jobs)
    return replace(
        run_status,
        device=", ".join(devices) or run_status.device,
        dtype=next((share.dtype for share in shares if share.dtype), run_status.dtype),
        updated=max(one.updated for one in (run_status, *shares)),
        seconds=max(before.seconds, *(share.seconds for share in shares)),
        solo_seconds=alone + sum(solo) if solo else before.solo_seconds,
        peak_bytes=max(peaks, default=None),
        notes=tuple(dict.fromkeys(note for one in (run_status, *shares) for note in one.notes)),
        jobs=jobs,
    )


def _totals_before(output: Path, run_status: RunStatus) -> RunStatus:
    """Return the status with the run's totals (seconds) from before the jobs were divided into shares, the
    parts that one process each trains. The totals in `run_status` may already include the work of the
    shares."""
    try:
        totals: Any = json.loads((output / SHARES_FILE).read_bytes())["before"]
        seconds, solo = float(totals["seconds"]), totals["solo_seconds"]
        return replace(run_status, seconds=seconds, solo_seconds=None if solo is None else float(solo))
    except (OSError, ValueError, KeyError, TypeError):
        return run_status


def _read_windows(folders: Sequence[Path]) -> bytes:
    """Return the distinct lines about windows (a few global batches of every job) in these folders. Every
    line has a timestamp, so equal lines are copies from an interrupted merge."""
    lines = (
        line
        for folder in folders
        for line in filtered_lines(folder / WINDOWS, lambda _: True).splitlines(True)
    )
    return b"".join(dict.fromkeys(lines))


def _save_fitted_models(output: Path, folders: Sequence[Path]) -> None:
    """Copy the time and memory models of one process to the output folder: those of the process that has
    measured the most windows (a few global batches of every job each)."""
    found = [folder / FITTED_MODELS for folder in folders if (folder / FITTED_MODELS).exists()]
    if found:
        replace_file(output / FITTED_MODELS, max(found, key=_count_fitted_windows).read_bytes())


def _save_seconds(output: Path, shares: Sequence[RunStatus]) -> None:
    """Add the measured training seconds of each process to the file that has the predicted seconds of its
    share of the jobs."""
    try:
        record: Any = json.loads((output / SHARES_FILE).read_bytes())
        for entry, share in zip(record["shares"], shares, strict=True):
            entry["seconds"] = share.seconds - record["before"]["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    replace_json(output / SHARES_FILE, record)


def _count_fitted_windows(path: Path) -> int:
    try:
        return int(json.loads(path.read_bytes())["windows"])
    except (ValueError, KeyError, TypeError):
        return -1


def _lock_share(folder: Path, output: Path) -> int:
    deadline = time.monotonic() + EXIT_SECONDS
    while True:
        try:
            return lock_folder(folder, output)
        except OutputError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
