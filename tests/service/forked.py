"""`weftune serve` at the price of forks."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.forks import PipedFork, be_weftune
from tests.run.processes import context


class ForkedCommand:
    """`weftune serve`, whose processes are all forked, in the place of one in a new interpreter."""

    def __init__(
        self, words: Sequence[str], log: IO[Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = context().Process(
            target=serve_in_forks, args=([*words], str(Path(log.name).parent), environment)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("weftune", seconds)
        return int(self._process.exitcode)


def serve_in_forks(words: list[str], cwd: str, environment: Mapping[str, str] | None) -> None:
    from weftune.service import preparer, processes

    class Fork(multiprocessing.get_context("fork").Process):  # type: ignore[misc]
        def __init__(self, args: tuple[Any, ...], **keys: Any) -> None:
            # A new interpreter would be sent them.
            super().__init__(args=pickle.loads(pickle.dumps(args)), **keys)

        def run(self) -> None:
            # The supervisor's own handlers would be inherited.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            # With pytest's handlers the logs of a service would be none.
            logging.getLogger().handlers.clear()
            super().run()

    preparer.start_server = PipedFork  # type: ignore[assignment]
    processes.multiprocessing = SimpleNamespace(  # type: ignore[attr-defined]
        get_context=lambda _: SimpleNamespace(Process=Fork)
    )
    be_weftune(words, cwd, environment=environment)
