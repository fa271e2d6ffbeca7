"""The lock and the status of an output folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weftune.core.files import UnknownFormat, temporary
from weftune.errors import OutputError
from weftune.jobs.store.folder import (
    LOCK,
    STATUS,
    DamagedStatus,
    lock_folder,
    read_status,
    waiting_again,
    write_status,
)
from weftune.jobs.store.states import State
from weftune.jobs.store.status import JobStatus, RunStatus


def test_a_lock_is_for_one_and_free_again_once_it_is_closed(tmp_path: Path) -> None:
    handle = lock_folder(tmp_path, tmp_path)
    os.set_inheritable(handle, False)
    with pytest.raises(OutputError, match="another weftune train is writing to the-output; wait for it"):
        lock_folder(tmp_path, Path("the-output"))
    os.close(handle)
    os.close(lock_folder(tmp_path, tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_lock_that_is_refused_leaves_no_file_open(tmp_path: Path) -> None:
    handle = lock_folder(tmp_path, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OutputError):
            lock_folder(tmp_path, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(handle)


def test_whoever_may_write_to_the_folder_by_the_umask_may_take_its_lock(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(lock_folder(tmp_path, tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o666


def test_a_status_that_cannot_be_read_is_told_with_what_is_wrong_with_itself(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text("[]")
    temporary(tmp_path / STATUS).write_text("{")
    with pytest.raises(
        DamagedStatus, match=r"status.json cannot be used \(it is no status\); put back"
    ) as told:
        read_status(tmp_path)
    assert told.value.complaint == "it is no status"


def test_of_a_complaint_of_many_lines_the_first_is_told(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text('{"jobs": {}, "seconds": "many", "base": 3}')
    with pytest.raises(DamagedStatus) as told:
        read_status(tmp_path)
    assert told.value.complaint == "2 validation errors for RunStatus"


def test_a_status_of_a_later_weftune_is_not_passed_over_for_an_older_draft(tmp_path: Path) -> None:
    write_status(tmp_path, RunStatus())
    (tmp_path / STATUS).rename(temporary(tmp_path / STATUS))
    (tmp_path / STATUS).write_text('{"format": 99, "jobs": {}}')
    with pytest.raises(UnknownFormat, match="has the format 99"):
        read_status(tmp_path)


def test_a_status_is_written_for_eyes_too(tmp_path: Path) -> None:
    write_status(tmp_path, RunStatus(base="demo", jobs={"a": JobStatus()}))
    text = (tmp_path / STATUS).read_text()
    assert text.startswith('{\n  "format": 1,\n  "base": "demo",\n')
    assert text.endswith("}\n")
    assert read_status(tmp_path) == RunStatus(base="demo", jobs={"a": JobStatus()})


def test_jobs_that_were_stopped_wait_again_and_those_that_ended_do_not() -> None:
    jobs = {state.value: JobStatus(state=state, reason="so", step=3) for state in State}
    again = waiting_again(RunStatus(jobs=jobs)).jobs
    waiting = JobStatus(state=State.QUEUED, step=3)
    assert again == {**jobs, "running": waiting, "paused": waiting}
    only = waiting_again(RunStatus(jobs=jobs), (State.RUNNING,)).jobs
    assert only == {**jobs, "running": waiting}
