"""Finished adapters are announced to a running vLLM, which loads them and answers with them."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
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
LOADED = "has already been loaded"
"""Words of vLLM's refusal of an adapter that it has."""

Tell = Callable[[str, str, Literal["info", "warn"], bool], None]


class Announcer:
    """A thread that announces adapters one after another, so that training never waits for vLLM.

    `tell` is called in that thread with a job, a message for its owner, the message's level, and whether vLLM
    has loaded the adapter. The messages name neither vLLM's address nor paths, which are the operator's.
    """

    def __init__(self, url: str, base: BaseSpec, jobs_folder: Path, tell: Tell) -> None:
        self._url, self._base, self._jobs_folder, self._tell = url, base, jobs_folder, tell
        self._jobs: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        """Jobs with the names of their adapters. None ends the thread."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def announce(self, row: JobRow) -> None:
        """Announce the adapter of a job that has succeeded, unless it has been deleted."""
        if row.model is not None:
            self._jobs.put((row.id, row.model))

    def close(self) -> None:
        """Make no further attempts. Adapters without an outcome are announced at the next start."""
        self._closed.set()
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            try:
                self._announce(*job)
            except Exception:
                log.exception("%s: its adapter could not be announced", job[0])

    def _announce(self, job: str, model: str) -> None:
        folder = self._jobs_folder / job
        if vllm_rank(self._base, folder) is None:
            self._tell(
                job, "The adapter is not announced to vLLM, which loads no such adapter", "info", False
            )
            return
        delay = FIRST_DELAY
        for attempt in range(1, ATTEMPTS + 1):
            status, answer = self._post(model, folder)
            if status == 200 or LOADED in answer:
                self._tell(job, f"vLLM answers with the adapter as {model}", "info", True)
                return
            log.warning("%s: vLLM at %s: %s (attempt %d of %d)", job, self._url, answer, attempt, ATTEMPTS)
            if 0 < status < 500 and status not in RETRIED:
                self._tell(job, f"vLLM has refused the adapter with status {status}", "warn", False)
                return
            if attempt < ATTEMPTS and self._closed.wait(delay):
                return
            delay = min(MAX_DELAY, 2 * delay)
        self._tell(job, f"vLLM could not be reached in {ATTEMPTS} attempts", "warn", False)

    def _post(self, model: str, folder: Path) -> tuple[int, str]:
        """Return the status and the text of vLLM's answer. The status is 0 if vLLM does not answer."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps({"lora_name": model, "lora_path": str(folder)}).encode()
        request = urllib.request.Request(f"{self._url}/v1/load_lora_adapter", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return 200, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")[:1000]
        except OSError as error:
            return 0, str(error)
