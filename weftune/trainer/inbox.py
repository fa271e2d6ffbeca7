"""Requests to the training loop, which it reads between two windows (runs of a few global batches of every
job): jobs enter, leave, and change priority.

A run of `weftune train` reads the requests from files in its output folder (`FolderInbox`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weftune.errors import OutputError, SpecError, UserError
from weftune.jobs.spec.keys import nearest_word
from weftune.jobs.store.inbox import (
    FileRequest,
    RequestAnswer,
    added_path,
    keep_added_file,
    pending_requests,
    read_request,
    rename_damaged_request,
    write_answer,
)
from weftune.trainer.job import PreparedJob

if TYPE_CHECKING:
    from weftune.trainer.loop import Loop

MAX_NAMED_JOBS = 8
"""Maximum number of job names in the answer to a request that adds jobs."""


@dataclass(frozen=True, slots=True)
class Enter:
    """A request to train a job. `id` identifies the request in the answer to it."""

    id: str
    job: PreparedJob


@dataclass(frozen=True, slots=True)
class Cancel:
    id: str
    job: str


@dataclass(frozen=True, slots=True)
class Pause:
    """A request to save a job and detach it, so that it does not train until it is resumed."""

    id: str
    job: str
    with_sweep: bool = False
    """Whether all trials of the job's sweep are to be paused."""


@dataclass(frozen=True, slots=True)
class Resume:
    id: str
    job: str


@dataclass(frozen=True, slots=True)
class SetPriority:
    id: str
    job: str
    priority: int


Request = Enter | Cancel | Pause | Resume | SetPriority


class JobInbox(Protocol):
    """The source of requests to a training loop. The thread that trains calls its methods each time that a
    few global batches of every job (a window) have been run."""

    def read(self) -> Sequence[Request]:
        """Return the requests that have arrived since the last call."""
        ...

    def mark_applied(self) -> None:
        """Record that all requests that were read have been applied. The loop writes the effects of the
        requests to disk afterwards."""
        ...

    def answer(self, request: Request, answer: RequestAnswer) -> None:
        """Report the outcome of a request whose effect is already on disk."""
        ...

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Wait for requests while no job trains. Return False if the training loop should end."""
        ...


def handle_requests(loop: Loop, inbox: JobInbox) -> None:
    """Apply the requests that have arrived, and answer them when their effect is on disk."""
    if not (requests := inbox.read()):
        return
    answers = []
    for request in requests:
        try:
            answers.append(RequestAnswer(accepted=True, sentence=_apply_request(loop, request)))
        except UserError as refusal:
            answers.append(RequestAnswer(accepted=False, sentence=str(refusal)))
    inbox.mark_applied()
    loop.finish_requests()
    for request, answer in zip(requests, answers, strict=True):
        inbox.answer(request, answer)


def _apply_request(loop: Loop, request: Request) -> str:
    """Apply a request and return a sentence about its effect. Raise SpecError to refuse the request."""
    if isinstance(request, Enter):
        loop.add_job(request.job)
        return f"{request.job.name} is queued"
    name = request.job
    _check_is_active(loop, name)
    step = loop.store.job(name).step
    match request:
        case Cancel():
            loop.cancel(name)
            return f"{name} is cancelled at step {step}"
        case Pause():
            loop.pause(name, request.with_sweep)
            status = loop.store.job(name)
            return f"{name} is paused at step {status.step}"
        case Resume():
            loop.resume(name)
            return f"{name} is queued; it resumes from step {step}"
        case SetPriority():
            loop.set_priority(name, request.priority)
            return f"{name} has priority {request.priority}"


def _check_is_active(loop: Loop, name: str) -> None:
    """Raise SpecError if the run has no such job, or if the job has ended."""
    if name not in loop.store:
        near = nearest_word(name, loop.jobs)
        raise SpecError(f"there is no job {name} in this run" + (f"; did you mean {near}?" if near else ""))
    status = loop.store.job(name)
    if status.state.has_ended:
        raise SpecError(f"{name} has ended: it is {status.state}")
    if name in loop.result_writer:
        raise SpecError(f"{name} has made its last step, and its adapter is being written")
    if name not in loop.jobs:
        raise SpecError(f"{name} takes no part in this run: {status.reason}")


class FolderInbox:
    """The inbox of a run of `weftune train`: files in its output folder or, if several processes each train a
    part of the jobs, in the folder of one process.

    `prepare` prepares the jobs of a jobs file for training, or raises a UserError. Once all of them are
    prepared, it calls its second argument, which records the file. `show_note` is called with sentences for
    the user.
    """

    def __init__(
        self,
        records_folder: Path,
        prepare: Callable[[FileRequest, Callable[[], None]], Sequence[PreparedJob]],
        show_note: Callable[[str], None],
    ) -> None:
        self._records_folder, self._prepare, self._show_note = records_folder, prepare, show_note

    def read(self) -> Sequence[Request]:
        return [one for path in pending_requests(self._records_folder) for one in self._read_requests(path)]

    def mark_applied(self) -> None:
        pass

    def answer(self, request: Request, answer: RequestAnswer) -> None:
        # The jobs of one file are answered together, when they have been prepared.
        if not isinstance(request, Enter):
            self._answer_request(Path(request.id), answer)

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Return whether there are requests, without waiting for one: a run of `weftune train` ends when no
        job is left."""
        return bool(pending_requests(self._records_folder)) and not stop()

    def close(self) -> None:
        """Answer all remaining requests with a refusal, since they arrived too late to be applied."""
        for path in pending_requests(self._records_folder):
            self._answer_request(
                path, RequestAnswer(accepted=False, sentence="the run ended before it read the request")
            )

    def _read_requests(self, path: Path) -> Sequence[Request]:
        """Return the requests that a file contains. A request to add jobs is answered and recorded at once,
        as soon as the jobs are prepared."""
        try:
            found = read_request(path)
        except OSError:
            # It was withdrawn.
            return ()
        except ValueError as error:
            what = str(error).splitlines()[0]
            self._show_note(f"warning: {path.name} in the inbox is no request ({what}); it is left aside.")
            rename_damaged_request(path)
            self._answer_request(path, RequestAnswer(accepted=False, sentence=f"it is no request: {what}"))
            return ()
        job, name = found.job, str(path)
        match found.verb:
            case "cancel":
                return [Cancel(name, job)]
            case "pause":
                return [Pause(name, job)]
            case "resume":
                return [Resume(name, job)]
            case "priority":
                return [SetPriority(name, job, found.priority)]
            case "add":
                return self._add_jobs_file(path, found)

    def _add_jobs_file(self, path: Path, request: FileRequest) -> Sequence[Request]:
        jobs: Sequence[PreparedJob] = ()
        answer = RequestAnswer(accepted=True, sentence="the jobs have joined the run")
        # An earlier process may have been killed before it answered.
        if not added_path(path).exists():
            try:
                jobs = self._prepare(request, partial(keep_added_file, path))
                listed, more = [job.name for job in jobs[:MAX_NAMED_JOBS]], len(jobs) - MAX_NAMED_JOBS
                names = ", ".join([*listed, *([f"{more} more"] if more > 0 else [])])
                verb = "has" if len(jobs) == 1 else "have"
                answer = RequestAnswer(accepted=True, sentence=f"{names} {verb} joined the run")
                self._show_note(f"{answer.sentence}: {request.file}")
            except UserError as refusal:
                answer = RequestAnswer(accepted=False, sentence=str(refusal))
        self._answer_request(path, answer)
        return [Enter(str(path), job) for job in jobs]

    def _answer_request(self, path: Path, answer: RequestAnswer) -> None:
        # Without room on the disk there is no answer, and training continues.
        with suppress(OutputError):
            write_answer(path, answer)
