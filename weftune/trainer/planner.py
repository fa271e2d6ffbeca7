"""The process that plans the windows of a pipeline. A window is a few global batches of every job.

Planning is pure Python and takes tenths of a second. In a thread it would hold the interpreter's lock most of
that time, and the training thread, which needs the lock for every operation that it starts, would wait.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import Any

from weftune.core.limited import SINGLE_THREADED, receive_bytes, send_bytes, start_server
from weftune.plan.program.program import Program
from weftune.plan.window.window import plan_window


class PlannerProcess:
    """A handle of a separate process that runs `plan_window`. The process is started at the first call. Only
    one thread at a time may use this object."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def plan_window(self, *arguments: Any) -> Program:
        """Return the Program (executable plan) that the function `plan_window` returns for these arguments.
        If the process cannot answer, for example because it was killed, the calling thread plans instead."""
        answer = self._request(pickle.dumps(arguments))
        if not answer:
            return plan_window(*arguments)
        program: Program = pickle.loads(answer)
        return program

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _request(self, payload: bytes) -> bytes | None:
        """Return the reply of the planning process, or None if the process cannot be started or has died."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._process = start_server(__name__, SINGLE_THREADED)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            send_bytes(process.stdin, payload)
            return receive_bytes(process.stdout)
        except OSError:
            return None


def serve() -> None:
    """Plan windows on request, as the main function of the planning process, until the caller closes the pipe
    or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the caller decides
    # Answers must not be mixed with what libraries print.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while (payload := receive_bytes(sys.stdin.buffer)) is not None:
        try:
            answer = pickle.dumps(plan_window(*pickle.loads(payload)))
        except Exception:
            # The caller plans the same window again, and raises the error with its own traceback.
            answer = b""
        send_bytes(answers, answer)
