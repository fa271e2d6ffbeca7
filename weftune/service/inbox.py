"""The inbox of the training process: jobs and commands that the HTTP process has stored.

Every row of the database with such a request is applied exactly once and in order, since the number of the
last applied row is written in the same transaction as the effects. A client may cancel or pause a job before
its rows are prepared, so a command may arrive before its job."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftune.errors import DataError, UserError
from weftune.jobs.store.inbox import RequestAnswer
from weftune.jobs.store.status import State
from weftune.service.job_store import ServiceJobStore
from weftune.service.store.database import StoreUnavailable
from weftune.service.store.requests import Command, PreparedSubmission, RequestStore, Submission
from weftune.trainer.inbox import Cancel, Enter, Pause, Request, Resume, SetPriority
from weftune.trainer.job import PreparedJob

log = logging.getLogger(__name__)

READ_SECONDS = 0.1
"""Minimum number of seconds between two reads of the database while jobs train."""
IDLE_SECONDS = 1.0
"""Maximum seconds that a training loop without jobs waits before it considers its waiting jobs again, since a
tenant's quota may have been renewed."""

Prepare = Callable[[Submission], PreparedJob]


class ServiceInbox:
    """The inbox from which the training loop reads clients' requests, which the HTTP process has stored in
    the database. The function `prepare` returns a job with its tokens, or raises a UserError."""

    def __init__(self, requests: RequestStore, store: ServiceJobStore, prepare: Prepare) -> None:
        self._requests, self._store, self._prepare = requests, store, prepare
        self.serve_idle: Callable[[float], object] = time.sleep
        """Function that is called while no job trains, to answer prompts. Its argument is the number of
        seconds that it may take."""
        self.entered_jobs: set[str] = set()
        """Jobs that were passed to the training loop and have not ended."""
        self.cursors = {"prepared": 0, "commands": 0}
        """Maps `prepared` (prepared jobs) and `commands` (requests to change jobs) to the number of the last
        database row that was read."""
        self._read_at = float("-inf")

    def read(self) -> Sequence[Request]:
        now = time.monotonic()
        if now - self._read_at < READ_SECONDS:
            return ()
        self._read_at = now
        try:
            submissions = self._requests.prepared_after(self.cursors["prepared"])
            commands = self._requests.commands_after(self.cursors["commands"])
        except StoreUnavailable as error:
            log.warning("%s", error)
            return ()
        self.entered_jobs &= self._store.notes.keys()
        found = [request for one in submissions for request in self._take_submission(one)]
        found += [request for one in commands for request in self._run_command(one)]
        if submissions:
            self.cursors["prepared"] = submissions[-1].number
        if commands:
            self.cursors["commands"] = commands[-1].number
        if (submissions or commands) and not found:
            # Nothing is left for the loop to apply.
            self.mark_applied()
            self._store.schedule_flush()
        return found

    def mark_applied(self) -> None:
        self._store.set_cursors(self.cursors)

    def answer(self, request: Request, answer: RequestAnswer) -> None:
        if not answer.accepted:
            log.info("%s", answer.sentence)

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Wait until a request may have arrived, for at most `IDLE_SECONDS`. Always return True, since a
        service without jobs runs until it is stopped."""
        deadline = time.monotonic() + IDLE_SECONDS
        self._store.schedule_flush()
        while not stop() and time.monotonic() < deadline:
            try:
                if self._requests.prepared_after(self.cursors["prepared"], 1):
                    break
                if self._requests.commands_after(self.cursors["commands"], 1):
                    break
            except StoreUnavailable as error:
                log.warning("%s", error)
            self.serve_idle(READ_SECONDS)
        self._read_at = float("-inf")
        return not stop()

    # -- requests ----------------------------------------------------------------------------------------

    def prepare(self, submission: Submission) -> PreparedJob | None:
        """Prepare a queued job for the training loop. If it cannot be prepared, mark the job as failed and
        return None."""
        try:
            job = self._prepare(submission)
        except UserError as error:
            self._store.fail_job(submission.id, error_record(error))
            return None
        self.entered_jobs.add(submission.id)
        return job

    def _enter_job(self, submission: Submission) -> list[Request]:
        job = self.prepare(submission)
        return [] if job is None else [Enter(submission.id, job)]

    def _take_submission(self, prepared: PreparedSubmission) -> list[Request]:
        submission = prepared.submission
        if submission.id in self._store:
            # A command has come before it.
            row = self._store.row(submission.id)
            if (
                prepared.refusal is None
                or row is None
                or row.state.has_ended
                or submission.id in self.entered_jobs
            ):
                return []
            if row.state is State.PAUSED:
                self._store.move_job(submission.id, State.QUEUED)
            self._store.fail_job(submission.id, prepared.refusal)
            return []
        self._store.admit_submission(submission)
        if prepared.refusal is not None:
            self._store.fail_job(submission.id, prepared.refusal)
            return []
        return self._enter_job(submission)

    def _run_command(self, command: Command, is_sweep_command: bool = False) -> list[Request]:
        """Translate a client's command into requests to the training loop and return them. Commands that are
        none of the loop's, such as deletions, are applied immediately. A command for a sweep applies to each
        of its trials."""
        name, id = command.job, str(command.number)
        row = self._store.row(name)
        if row is None:
            submission = self._requests.submission(None, name)
            if submission is not None and submission.is_sweep:
                commands = [replace(command, job=one) for one in self._requests.trial_ids([name])[name]]
                return [
                    request for one in commands for request in self._run_command(one, is_sweep_command=True)
                ]
            if submission is None or command.verb not in ("cancel", "pause"):
                return []
            self._store.admit_submission(submission)
            row = self._store.row(name)
        assert row is not None
        if row.state.has_ended:
            if command.verb == "delete":
                self._delete_adapter(name)
            return []
        if command.verb == "priority":
            self._store.set_priority(name, int(command.value))
        if name in self.entered_jobs:
            match command.verb:
                case "cancel":
                    return [Cancel(id, name)]
                case "pause":
                    return [Pause(id, name, with_sweep=is_sweep_command)]
                case "resume":
                    return [Resume(id, name)]
                case "priority":
                    return [SetPriority(id, name, int(command.value))]
            return []
        return self._apply_to_unplanned_job(command, row.state)

    def _apply_to_unplanned_job(self, command: Command, state: State) -> list[Request]:
        """Apply a client's command to a job that the training loop does not have, since the job is paused or
        not prepared yet."""
        name = command.job
        match command.verb:
            case "cancel":
                self._store.move_job(name, State.CANCELLED)
            case "pause" if state is State.QUEUED:
                self._store.move_job(name, State.PAUSED, "paused on request before it started")
            case "resume" if state is State.PAUSED:
                submission = self._requests.submission(None, name)
                assert submission is not None, "a job has been submitted"
                self._store.move_job(name, State.QUEUED)
                return self._enter_job(submission)
        return []

    def _delete_adapter(self, name: str) -> None:
        self._store.delete_model(name)
        delete_folder(self._store.output / name)


def delete_folder(folder: Path) -> None:
    """Delete a job's folder. The folder is renamed first, so that a partly deleted folder is never mistaken
    for a complete one."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def error_record(error: UserError) -> Mapping[str, Any]:
    """Convert the error of a job that cannot be prepared to the form in which the API shows it."""
    code = "invalid_training_file" if isinstance(error, DataError) else "invalid_job"
    return {"code": code, "message": str(error), "param": None}
