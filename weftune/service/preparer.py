"""Preparation of uploaded files and submitted jobs, in separate processes.

Rows are parsed, checked and tokenised here, because this work would keep the HTTP process busy for seconds.
Tokens are written to the cache that training reads, so that training need not pause when it admits a job. A
process that dies is restarted, and its work is repeated.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftune.core.limited import receive_bytes, send_bytes, start_server
from weftune.errors import DataError, Mistake, UserError, WeftuneError

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.data.row import Row
    from weftune.service.settings import ServiceSettings
    from weftune.service.store.requests import RequestStore, Submission

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum number of attempts to check a file or prepare a job if the process that does so dies. After the
last one, the file or job is refused."""
CHECK_PROCESSES = 2
"""Number of processes that check uploaded files. Clients wait for these checks."""
STORE_SECONDS = 1.0
"""Seconds between two attempts to write the result of a preparation to a locked database."""
NICENESS = 5
"""Niceness of the processes that check files and prepare jobs: how much lower their priority is than that of
the HTTP and training processes."""
MAX_MISTAKES = 3
"""Maximum number of invalid rows and keys that the error message of a refused job lists."""


class ProcessDied(WeftuneError):
    """An error raised if the process that checks a file or prepares a job died in every attempt."""


class Preparer:
    """The processes that check uploaded files and prepare submitted jobs (tokenise their rows). They are
    started on first use, or by `load_base`."""

    def __init__(self, settings: ServiceSettings, requests: RequestStore, job_processes: int = 1) -> None:
        self._settings, self._requests = settings, requests
        self._checks, self._jobs = _Pool(CHECK_PROCESSES, "check"), _Pool(job_processes, "prepare")
        self._closed = threading.Event()

    def start(self) -> None:
        """Queue the jobs that were submitted before the service was restarted and have not been prepared."""
        for submission in self._requests.unprepared_submissions():
            self.prepare(submission)

    def load_base(self) -> None:
        """Start the process that prepares jobs and load the tokenizer in it, so that the first job does not
        wait for that. Failures are reported when a job is prepared."""
        self._jobs.call(load_base_parts, self._settings.base)

    def check(self, path: Path, label: str, max_rows: int) -> int:
        """Check an uploaded file and return its number of rows. Raise DataError if rows are invalid."""
        return int(self._checks.call(check_file, path, label, max_rows).result())

    def prepare(self, submission: Submission) -> None:
        """Queue a job for preparation. When this is done, the store records that the job is prepared, or why
        it is refused."""
        log.info("%s: its rows are being checked", submission.id)
        done = self._jobs.call(prepare_job, self._settings.base, submission.job)
        done.add_done_callback(lambda finished: self._record_result(submission, finished))

    def close(self) -> None:
        self._closed.set()
        self._checks.close()
        self._jobs.close()

    def _record_result(self, submission: Submission, done: Future[Any]) -> None:
        if done.cancelled() or self._closed.is_set():
            return
        refusal = job_error(done.exception())
        log.info("%s: %s", submission.id, refusal["message"] if refusal else "its rows are tokenised")
        from weftune.service.store.database import StoreUnavailable

        while True:
            try:
                self._requests.mark_prepared(submission.id, refusal)
                return
            except StoreUnavailable as error:
                log.warning("%s: %s", submission.id, error)
            if self._closed.wait(STORE_SECONDS):
                return


def job_error(error: BaseException | None) -> dict[str, Any] | None:
    """Convert an error of a job's preparation to the form in which the API shows a job's error. None if there
    is no error."""
    if error is None:
        return None
    if not isinstance(error, UserError):
        return {"code": "preparation_failed", "message": str(error), "param": None}
    sentences = [str(mistake) for mistake in error.mistakes[:MAX_MISTAKES]]
    if len(error.mistakes) > MAX_MISTAKES:
        sentences.append(f"and {len(error.mistakes) - MAX_MISTAKES} more mistakes")
    is_data = isinstance(error, DataError)
    return {
        "code": "invalid_training_file" if is_data else "invalid_job",
        "message": "; ".join(sentences),
        "param": "training_file" if is_data else None,
    }


# -- work, which runs in the processes ------------------------------------------------------------------


def check_file(path: Path, label: str, max_rows: int) -> int:
    """Check the rows of an uploaded file in all ways that need no tokenizer, and return the number of
    rows."""
    from weftune.data.build import check_all_rows, find_format
    from weftune.data.formats import detect_format, row_kind_name
    from weftune.data.spec import DataSpec
    from weftune.data.tables import open_path

    count = 0

    def count_rows() -> Iterator[Row]:
        nonlocal count
        count = 0
        for row in table.rows():
            count += 1
            if count > max_rows:
                raise DataError(Mistake(label, f"holds more than {max_rows:,} rows; split it into parts"))
            yield row

    table = open_path(str(path), None, label)
    spec = DataSpec(path=str(path))
    formats = (detect_format(row.value) for row in table.rows() if row.problem is None)
    first = next((found for found in formats if found is not None), None)
    format = find_format(table, spec, row_kind_name(first))
    check_all_rows(replace(table, rows=count_rows), format, spec)
    return count


def prepare_job(base: BaseSpec, job: Mapping[str, Any]) -> None:
    """Tokenise a job's rows into the cache on disk, and check that the job fits the base model."""
    from weftune.core.files import cache_folder
    from weftune.data.prepare import SharedData
    from weftune.jobs.spec.checks import check_on_base
    from weftune.jobs.spec.spec import JobSpec
    from weftune.trainer.job import prepare_job as prepare

    spec = JobSpec(**job)
    loaded = _load_base_parts(base)
    if mistakes := check_on_base((spec,), loaded.shape, base):
        raise UserError(mistakes)
    folder = cache_folder() / "tokens"
    # The data are not kept for the next job: they would stay in memory.
    shared = SharedData(loaded.encoder, folder, loaded.shape.context)
    prepare(spec, 0, loaded.tokenizer, loaded.shape, folder, shared_data=shared)


def load_base_parts(base: BaseSpec) -> None:
    """Import what `prepare_job` needs, and load the tokenizer and the sizes of the base."""
    import weftune.jobs.spec.checks
    import weftune.trainer.job  # noqa: F401

    _load_base_parts(base)


WORK: Mapping[str, Callable[..., Any]] = {
    "check_file": check_file,
    "load_base_parts": load_base_parts,
    "prepare_job": prepare_job,
}


@dataclass(frozen=True, slots=True)
class _Loaded:
    tokenizer: Any
    encoder: Any
    shape: Any


@cache
def _load_base_parts(base: BaseSpec) -> _Loaded:
    """Return the tokenizer, the encoder and the sizes of the base model, without loading its weights."""
    from weftune.base.load import inspect, load_tokenizer
    from weftune.data.encode import Encoder

    tokenizer = load_tokenizer(base)
    return _Loaded(tokenizer, Encoder(tokenizer), inspect(base))


# -- processes ------------------------------------------------------------------------------------------


class _Pool:
    """A pool of processes that take calls from one queue. Each process is driven by a thread of its own."""

    def __init__(self, processes: int, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._processes: list[_PreparerProcess] = [_PreparerProcess() for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._run, args=(one,), name=f"{name}-{at}", daemon=True)
            for at, one in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call of one of the functions in `WORK`, which one of the processes executes. Return a
        future of the result."""
        done: Future[Any] = Future()
        self._work.put((done, bytes(ForkingPickler.dumps((function.__name__, arguments)))))
        return done

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for one in self._processes:
            one.end()

    def _run(self, process: _PreparerProcess) -> None:
        while (item := self._work.get()) is not None:
            done, payload = item
            try:
                done.set_result(process.call(payload))
            except Exception as error:
                done.set_exception(error)


class _PreparerProcess:
    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._closed = False

    def call(self, payload: bytes) -> Any:
        for attempt in range(ATTEMPTS):
            reply = self._request_from_process(payload)
            if reply is not None:
                break
            if self._closed:
                raise ProcessDied("The service is being stopped.")
            log.warning("a preparing process died (attempt %d of %d)", attempt + 1, ATTEMPTS)
            time.sleep(0.1 * 2**attempt)
        else:
            raise ProcessDied(
                f"The process that prepares the job died {ATTEMPTS} times; its rows may need more memory "
                "than there is."
            )
        if "bug" in reply:
            log.error("%s", reply["bug"])
            raise ProcessDied("The job cannot be prepared because of a mistake in the service, see its log.")
        if "mistakes" in reply:
            kind = DataError if reply["data"] else UserError
            raise kind([Mistake(*one) for one in reply["mistakes"]])
        return reply["value"]

    def _request_from_process(self, payload: bytes) -> dict[str, Any] | None:
        """Send a pickled call to the process and return its reply, or None if the process died."""
        if self._closed:
            return None
        if self._running is None or self._running.poll() is not None:
            self._running = start_server(__name__, {})
        process = self._running
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send_bytes(process.stdin, payload)
            answer = receive_bytes(process.stdout)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            process.kill()
            process.wait()
            return None
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def end(self) -> None:
        self._closed = True
        if self._running is not None:
            self._running.kill()
            self._running.wait()


def serve() -> None:
    """Answer calls that another process sends over a pipe, as the main function of a preparing process, until
    the caller closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and the supervisor decides
    with suppress(OSError):
        os.nice(NICENESS)
    # Answers must not be mixed with what libraries print.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while (payload := receive_bytes(sys.stdin.buffer)) is not None:
        send_bytes(answers, json.dumps(_answer_request(payload)).encode())


def _answer_request(payload: bytes) -> dict[str, Any]:
    name, arguments = ForkingPickler.loads(payload)
    try:
        return {"value": WORK[name](*arguments)}
    except UserError as error:
        mistakes = [(mistake.location, mistake.sentence) for mistake in error.mistakes]
        return {"data": isinstance(error, DataError), "mistakes": mistakes}
    except Exception:
        import traceback

        return {"bug": traceback.format_exc()}
