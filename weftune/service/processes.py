"""The supervisor of a service. It starts the HTTP process and the training process, and restarts them if they
die.

Each of the two starts without the other and stores everything that it has acknowledged, so that it can be
restarted alone. `weftune.launch.supervise` serves runs, whose processes are forked from a server that has
imported torch and end together; here the HTTP process never imports torch, and both run until they are told
to stop."""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

from weftune.core.files import replace_json
from weftune.errors import UserError
from weftune.service.settings import ServiceSettings

log = logging.getLogger(__name__)

PIDS = "pids.json"
"""Name of the file, in the service's store folder, that maps the names of the service's processes to their
ids."""
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds between the end of a process and its restart: first value, and maximum. Each delay is twice as long
as the one before."""
STABLE_SECONDS = 60.0
"""Seconds after which a process counts as healthy. The delay before its next restart is then `FIRST_DELAY`
again."""
STOP_SECONDS = 30.0
"""Seconds that a process has for ending after a stop request. After that, it is killed."""
POLL_SECONDS = 0.2
USER_ERROR_CODE = 2
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes of a service."""

    name: str
    main: str
    """Function that the process runs, as `module:function`. It receives the settings, and returns after the
    process has received SIGTERM."""


TRAINING = Member("training", "weftune.service.training:main")
HTTP = Member("http", "weftune.service.server:serve")
MEMBERS = (TRAINING, HTTP)
"""All processes, in the order in which they are stopped: HTTP answers until training has saved its jobs."""


class _Running:
    """A process of the service that was started or, if it has ended, the time at which it is restarted."""

    def __init__(self, member: Member, settings: ServiceSettings) -> None:
        self.member, self._settings = member, settings
        self.delay = FIRST_DELAY
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.process: BaseProcess = context.Process(
            target=_run_member, args=(self.member, self._settings, os.getpid()), name=self.member.name
        )
        self.process.start()
        self.began = time.monotonic()
        self.restart_at: float | None = None

    def handle_end(self) -> None:
        """Schedule a restart after the process has ended."""
        if time.monotonic() - self.began > STABLE_SECONDS:
            self.delay = FIRST_DELAY
        self.restart_at = time.monotonic() + self.delay
        code = self.process.exitcode or 0
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        log.warning("The %s process %s; it is started again in %.1f s.", self.member.name, end, self.delay)
        self.delay = min(MAX_DELAY, 2 * self.delay)


def supervise(settings: ServiceSettings, members: Sequence[Member] = MEMBERS) -> int:
    """Run the processes of a service until Ctrl-C or SIGTERM. Return the exit code: 0, or the exit code of a
    user error."""
    stop = threading.Event()
    running: list[_Running] = []
    with _stop_on_signals(stop, running):
        running += [_Running(member, settings) for member in members]
        _write_pids(settings, running)
        try:
            return _watch_processes(settings, running, stop)
        finally:
            _stop_processes(running)
            with suppress(OSError):
                (settings.store / PIDS).unlink()


def _watch_processes(settings: ServiceSettings, running: Sequence[_Running], stop: threading.Event) -> int:
    while not stop.is_set():
        alive = [one.process.sentinel for one in running if one.restart_at is None]
        wait(alive, timeout=POLL_SECONDS) if alive else time.sleep(POLL_SECONDS)
        for one in running:
            if one.restart_at is None and not one.process.is_alive():
                if stop.is_set():
                    break
                if one.process.exitcode == USER_ERROR_CODE:
                    # Its sentence has been printed, and another start would end in the same way.
                    return USER_ERROR_CODE
                one.handle_end()
            elif one.restart_at is not None and time.monotonic() >= one.restart_at:
                one.start()
                _write_pids(settings, running)
    return 0


def _stop_processes(running: Sequence[_Running]) -> None:
    """Stop the processes of a service one after another."""
    for one in running:
        if one.process.is_alive():
            one.process.terminate()
        one.process.join(STOP_SECONDS)
        if one.process.is_alive():
            log.warning("The %s process did not end within %.0f s.", one.member.name, STOP_SECONDS)
            one.process.kill()
            one.process.join()


@contextmanager
def _stop_on_signals(stop: threading.Event, running: Sequence[_Running]) -> Iterator[None]:
    """Set `stop` at the first SIGINT or SIGTERM, and kill all processes at the second one."""

    def handle(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            for one in running:
                one.process.kill()
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_pids(settings: ServiceSettings, running: Sequence[_Running]) -> None:
    replace_json(settings.store / PIDS, {one.member.name: one.process.pid for one in running})


# -- inside a member ------------------------------------------------------------------------------------


def _run_member(member: Member, settings: ServiceSettings, supervisor: int) -> None:
    """Run the function of a service's process after the process was started, and exit with its exit code."""
    # Leave the terminal's foreground: Ctrl-C reaches only the supervisor, which tells the members in order.
    os.setpgrp()
    _exit_with_supervisor(supervisor)
    module, _, name = member.main.partition(":")
    main: Callable[[ServiceSettings], object] = getattr(importlib.import_module(module), name)
    try:
        main(settings)
    except UserError as error:
        for mistake in error.mistakes:
            print(mistake, file=sys.stderr, flush=True)
        sys.exit(USER_ERROR_CODE)


def _exit_with_supervisor(supervisor: int) -> None:
    """Make the kernel send SIGTERM to this process when the supervisor ends, even if it is killed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:
        sys.exit("The supervisor has ended.")
