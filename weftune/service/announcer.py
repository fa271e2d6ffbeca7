"""Requests to a running vLLM server to load the adapters of finished jobs, and to unload those that are
deleted."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weftune.base.spec import BaseSpec
from weftune.report.snippets import vllm_rank
from weftune.service.store.records import JobRow

log = logging.getLogger(__name__)

API_KEY = "VLLM_API_KEY"
"""Name of the environment variable with the API key for vLLM. The variable is unset if vLLM requires no
key."""
ATTEMPTS = 10
FIRST_DELAY, MAX_DELAY = 1.0, 60.0
"""Seconds between the first two attempts at a request, and the maximum seconds between any two. Each pause is
twice as long as the one before, so that all attempts together take four minutes."""
TIMEOUT_SECONDS = 60.0
"""Maximum seconds that vLLM may take to answer a request, such as to load an adapter."""
RETRIED = (408, 429)
"""HTTP statuses below 500 with which vLLM may answer a request that is then sent again. Statuses of 500 and
above always lead to another attempt."""
LOADED, ABSENT = "has already been loaded", "cannot be found"
"""Words in vLLM's error messages: the first marks a refusal to load an adapter that is loaded already, the
second a refusal to unload an adapter that is not loaded."""

Notify = Callable[[str, str, Literal["info", "warn"], bool], None]


@dataclass(frozen=True, slots=True)
class Notice:
    """A request to vLLM to load or unload the adapter of a job."""

    verb: Literal["load", "unload"]
    job: str
    model: str
    """Name of the model under which vLLM serves the job's adapter."""


class Announcer:
    """A thread that asks vLLM to load and unload adapters, one after another, so that training never waits.

    The function `notify` is called in that thread with a job, a message for its owner, the message's level,
    and whether vLLM has loaded the adapter. The messages contain neither vLLM's address nor paths, which are
    not shown to owners.
    """

    def __init__(self, url: str, base: BaseSpec, jobs_folder: Path, notify: Notify) -> None:
        self._url, self._base, self._jobs_folder, self._notify = url, base, jobs_folder, notify
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        """Queue of the requests to vLLM, in the order in which they are sent. The item None ends the
        thread."""
        self._deleted_jobs: set[str] = set()
        """Jobs that have been deleted, so that their adapters are not announced to vLLM any more."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def announce(self, row: JobRow) -> None:
        """Queue a request that vLLM loads the adapter of a job that has succeeded. Do nothing if the adapter
        has been deleted."""
        if row.model is not None:
            self._notices.put(Notice("load", row.id, row.model))

    def withdraw(self, job: str, model: str) -> None:
        """Queue a request that vLLM unloads the adapter of a deleted job."""
        self._deleted_jobs.add(job)
        self._notices.put(Notice("unload", job, model))

    def close(self) -> None:
        """Stop sending requests to vLLM. Requests without an outcome are sent again at the next start of the
        service."""
        self._closed.set()
        self._notices.put(None)

    def _run(self) -> None:
        while (notice := self._notices.get()) is not None and not self._closed.is_set():
            try:
                if notice.verb == "load":
                    self._load_adapter(notice)
                else:
                    self._unload_adapter(notice)
            except Exception:
                log.exception("%s: vLLM could not %s its adapter", notice.job, notice.verb)

    def _load_adapter(self, notice: Notice) -> None:
        job, folder = notice.job, self._jobs_folder / notice.job
        if job in self._deleted_jobs:
            return
        if vllm_rank(self._base, folder) is None:
            self._notify(
                job, "The adapter is not announced to vLLM, which loads no such adapter", "info", False
            )
            return
        status = self._send_notice(notice, {"lora_path": str(folder)}, LOADED)
        if status == 200:
            self._notify(job, f"vLLM answers with the adapter as {notice.model}", "info", True)
        elif status is not None:
            self._notify(job, _failure_text(status), "warn", False)

    def _unload_adapter(self, notice: Notice) -> None:
        status = self._send_notice(notice, {}, ABSENT)
        if status == 200:
            self._notify(notice.job, "vLLM does not answer with the deleted adapter", "info", False)
        elif status is not None:
            # It counts as loaded, so that the next start tries again.
            self._notify(notice.job, _failure_text(status), "warn", True)

    def _send_notice(self, notice: Notice, values: Mapping[str, str], ignored_error: str) -> int | None:
        """Send a request repeatedly until vLLM accepts or refuses it, or all attempts have failed. Return the
        last HTTP status. A response that contains `ignored_error` counts as status 200, and status 0 means
        that vLLM could not be reached. Return None if the service is stopping or the adapter was deleted in
        the meantime."""
        delay = FIRST_DELAY
        for attempt in range(1, ATTEMPTS + 1):
            status, answer = self._post_request(notice, values)
            if status == 200 or ignored_error in answer:
                return 200
            log.warning(
                "%s: vLLM at %s: %s (attempt %d of %d)", notice.job, self._url, answer, attempt, ATTEMPTS
            )
            if 0 < status < 500 and status not in RETRIED:
                return status
            if attempt < ATTEMPTS and self._closed.wait(delay):
                return None
            if notice.verb == "load" and notice.job in self._deleted_jobs:
                return None
            delay = min(MAX_DELAY, 2 * delay)
        return 0

    def _post_request(self, notice: Notice, values: Mapping[str, str]) -> tuple[int, str]:
        """Send a request to vLLM once. Return the HTTP status and the body of its response. If vLLM does not
        answer, the status is 0 and the body is the error."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps({"lora_name": notice.model, **values}).encode()
        request = urllib.request.Request(f"{self._url}/v1/{notice.verb}_lora_adapter", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return 200, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")[:1000]
        except OSError as error:
            return 0, str(error)


def _failure_text(status: int) -> str:
    """Return a sentence for the owner of a job whose adapter vLLM could not load or unload."""
    if status == 0:
        return f"vLLM could not be reached in {ATTEMPTS} attempts"
    return f"vLLM has refused the adapter with status {status}"
