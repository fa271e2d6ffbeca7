"""Finished adapters are announced to a running vLLM, which answers with them until they are deleted."""

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
"""Environment variable with the key that vLLM requires, if it requires one."""
ATTEMPTS = 10
FIRST_DELAY, MAX_DELAY = 1.0, 60.0
"""Seconds before the second attempt, and the limit that they double up to: four minutes in total."""
TIMEOUT_SECONDS = 60.0
"""Seconds for one attempt, in which vLLM reads the adapter."""
RETRIED = (408, 429)
"""Statuses after which an attempt is repeated, besides those from 500 on."""
LOADED, ABSENT = "has already been loaded", "cannot be found"
"""Words of vLLM's refusals to load an adapter that it has, and to unload one that it does not have."""

Tell = Callable[[str, str, Literal["info", "warn"], bool], None]


@dataclass(frozen=True, slots=True)
class Notice:
    """A request to vLLM to load or unload the adapter of a job."""

    verb: Literal["load", "unload"]
    job: str
    model: str
    """Name of the adapter."""


class Announcer:
    """A thread that lets vLLM load and unload adapters one after another, so that training never waits.

    `tell` is called in that thread with a job, a message for its owner, the message's level, and whether vLLM
    has loaded the adapter. The messages name neither vLLM's address nor paths, which are the operator's.
    """

    def __init__(self, url: str, base: BaseSpec, jobs_folder: Path, tell: Tell) -> None:
        self._url, self._base, self._jobs_folder, self._tell = url, base, jobs_folder, tell
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        """Notices in the order in which they are sent. None ends the thread."""
        self._deleted: set[str] = set()
        """Jobs whose adapters are not announced any more, since they were deleted."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def announce(self, row: JobRow) -> None:
        """Announce the adapter of a job that has succeeded, unless it has been deleted."""
        if row.model is not None:
            self._notices.put(Notice("load", row.id, row.model))

    def withdraw(self, job: str, model: str) -> None:
        """Let vLLM unload the adapter of a job that was deleted."""
        self._deleted.add(job)
        self._notices.put(Notice("unload", job, model))

    def close(self) -> None:
        """Make no further attempts. Notices without an outcome are sent at the next start."""
        self._closed.set()
        self._notices.put(None)

    def _run(self) -> None:
        while (notice := self._notices.get()) is not None and not self._closed.is_set():
            try:
                if notice.verb == "load":
                    self._load(notice)
                else:
                    self._unload(notice)
            except Exception:
                log.exception("%s: vLLM could not %s its adapter", notice.job, notice.verb)

    def _load(self, notice: Notice) -> None:
        job, folder = notice.job, self._jobs_folder / notice.job
        if job in self._deleted:
            return
        if vllm_rank(self._base, folder) is None:
            self._tell(
                job, "The adapter is not announced to vLLM, which loads no such adapter", "info", False
            )
            return
        status = self._send(notice, {"lora_path": str(folder)}, LOADED)
        if status == 200:
            self._tell(job, f"vLLM answers with the adapter as {notice.model}", "info", True)
        elif status is not None:
            self._tell(job, _failure(status), "warn", False)

    def _unload(self, notice: Notice) -> None:
        status = self._send(notice, {}, ABSENT)
        if status == 200:
            self._tell(notice.job, "vLLM does not answer with the deleted adapter", "info", False)
        elif status is not None:
            # It counts as loaded, so that the next start tries again.
            self._tell(notice.job, _failure(status), "warn", True)

    def _send(self, notice: Notice, values: Mapping[str, str], nothing_to_do: str) -> int | None:
        """Repeat a notice until vLLM obeys or refuses, and return the status: 200 also if its answer has the
        words `nothing_to_do`, and 0 if it cannot be reached. None if the notice is not needed any more."""
        delay = FIRST_DELAY
        for attempt in range(1, ATTEMPTS + 1):
            status, answer = self._post(notice, values)
            if status == 200 or nothing_to_do in answer:
                return 200
            log.warning(
                "%s: vLLM at %s: %s (attempt %d of %d)", notice.job, self._url, answer, attempt, ATTEMPTS
            )
            if 0 < status < 500 and status not in RETRIED:
                return status
            if attempt < ATTEMPTS and self._closed.wait(delay):
                return None
            if notice.verb == "load" and notice.job in self._deleted:
                return None
            delay = min(MAX_DELAY, 2 * delay)
        return 0

    def _post(self, notice: Notice, values: Mapping[str, str]) -> tuple[int, str]:
        """Return the status and the text of vLLM's answer. The status is 0 if vLLM does not answer."""
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


def _failure(status: int) -> str:
    """Return a sentence about a notice that vLLM has not obeyed."""
    if status == 0:
        return f"vLLM could not be reached in {ATTEMPTS} attempts"
    return f"vLLM has refused the adapter with status {status}"
