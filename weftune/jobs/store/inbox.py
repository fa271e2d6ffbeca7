"""The inbox of an output folder: files by which `weftune jobs` sends requests to a running `weftune train`.

A request is a file `inbox/*.json`, which the run reads at the end of a window (a few global batches of every
job). The run deletes the file and writes an answer to `inbox/answers`, under the name of the request. Jobs
files that were added are kept in `inbox/added`, from which `--resume` reads them again. A file that is not a
valid request is moved to `inbox/refused`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from weftune.core.files import replace_file, replace_json
from weftune.errors import OutputError
from weftune.jobs.spec.read import read_added_run
from weftune.jobs.spec.spec import RunSpec
from weftune.jobs.store.shares import share_folders
from weftune.jobs.store.status import (
    LOCK,
    DamagedStatus,
    RunStatus,
    lock_folder,
    read_status,
    validate_record,
)

INBOX, ADDED, ANSWERS, REFUSED = "inbox", "added", "answers", "refused"
Verb = Literal["add", "pause", "resume", "cancel", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """A request to a run that is in progress."""

    verb: Verb
    job: str = ""
    """Name of the job that the request is about. Empty if a jobs file is to be added."""
    priority: int = 0
    """New priority of the job. None if the request does not change the priority."""
    file: str = ""
    """Absolute path of the jobs file to add. Paths in the file are relative to its folder."""
    text: str = ""
    """Content of the jobs file. The content is recorded because the file may change or disappear before the
    run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAnswer:
    """The answer of a run to a request."""

    accepted: bool
    sentence: str
    """Sentence for the user that says what the run has done, or why it refuses the request."""


def write_request(records: Path, request: FileRequest) -> Path:
    """Write a request to the inbox in `records`, the folder of a run or of one of its processes. Return the
    path of the request."""
    folder = records / INBOX
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}") from error
    path = folder / f"{time.time_ns():020d}-{os.getpid()}.json"
    replace_json(path, asdict(request))
    return path


def pending_requests(records: Path) -> list[Path]:
    """Return the files of requests that have not been answered, the earliest first."""
    return sorted((records / INBOX).glob("[!.]*.json"))


def read_request(path: Path) -> FileRequest:
    """Read a request. Raises ValueError if the file contains no request, and OSError if it cannot be read."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict) or "verb" not in value:
        raise ValueError("it is no request")
    found: FileRequest = validate_record(FileRequest, value)
    return found


def answer_path(request: Path) -> Path:
    return request.parent / ANSWERS / request.name


def write_answer(request: Path, answer: RequestAnswer) -> None:
    """Write the answer to a request and delete the request, in this order."""
    path = answer_path(request)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_json(path, asdict(answer))
        request.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def pop_answer(request: Path) -> RequestAnswer | None:
    """Return the run's answer to a request and delete it. Return None if there is no answer yet."""
    path = answer_path(request)
    try:
        found: RequestAnswer = validate_record(RequestAnswer, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    return found


def added_path(request: Path) -> Path:
    return request.parent / ADDED / request.name


def keep_added_file(request: Path) -> None:
    """Keep the jobs file of an accepted `add` request, so that `--resume` reads it again."""
    target = added_path(request)
    try:
        target.parent.mkdir(exist_ok=True)
        replace_file(target, request.read_bytes())
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}") from error


def rename_damaged_request(request: Path) -> None:
    """Move a file that is not a valid request from the inbox to its folder `refused`."""
    with suppress(OSError):
        (request.parent / REFUSED).mkdir(exist_ok=True)
        request.replace(request.parent / REFUSED / request.name)


def added_runs(output: Path, known_jobs: Iterable[str]) -> Iterator[RunSpec]:
    """Yield the parsed content of each jobs file that was added to an earlier run into an output folder. The
    jobs of such a file may start from the adapters of `known_jobs`."""
    known = list(known_jobs)
    for request in _added_files(output):
        run = read_added_run(request.text, Path(request.file), known)
        known += [job.name for job in run.jobs]
        yield run


def _added_files(output: Path) -> Iterator[FileRequest]:
    for path in sorted((output / INBOX / ADDED).glob("[!.]*.json")):
        try:
            yield read_request(path)
        except (OSError, ValueError) as error:
            raise OutputError(
                f"{path}, which holds jobs that were added to the run, cannot be used ({error}); put back a "
                "copy of it, or delete it to resume without its jobs"
            ) from error


def is_active(records: Path) -> bool:
    """Return whether a process is training into this output folder."""
    if not (records / LOCK).exists():
        return False
    try:
        os.close(lock_folder(records, records))
    except OutputError:
        return True
    return False


def find_inbox_folder(output: Path, job: str) -> Path:
    """Return the folder with the inbox of the process that trains a job. If several processes train into
    `output`, each process has a folder of its own."""
    for folder in share_folders(output):
        with suppress(OutputError):
            if job in read_status(folder).jobs:
                return folder
    return output


def read_run_status(output: Path) -> RunStatus:
    """Return the status of a run from its output folder, without the statuses of processes among which the
    jobs are divided. The status is empty before the first status is written."""
    try:
        return read_status(output)
    except DamagedStatus:
        return RunStatus()
