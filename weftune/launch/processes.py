"""Processes of one run on this machine: how they are forked, logged and signalled, and what their exit codes
mean.

They are forked from a server that has imported what training needs, so a restart costs no imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from weftune.core.files import replace_file
from weftune.jobs.store.status import WORKER_LOGS
from weftune.run.workers.heartbeat import LOST

CRASHED = 70
"""Exit code of a process that met a bug in Weftune."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that was interrupted and has saved what there was to save."""
PIDS = "pids"
"""File beside the logs that maps the number of each process to its id."""
PRELOADED = [
    "weftune.launch.workers",
    "weftune.launch.split",
    "weftune.trainer.trainer",
    "weftune.cli.main",
    "peft",
    "datasets",
]


THREADS = "OMP_NUM_THREADS"


def forks(neighbours: int) -> Any:
    """Return the context that forks new processes, each of which is one of `neighbours` on this machine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    if THREADS in os.environ:
        return context
    # Some of torch's libraries count their threads once, when they are loaded, and ignore later changes: on
    # ARM the products of a linear would take all cores in each of the processes.
    os.environ[THREADS] = str(_threads(neighbours))
    try:
        ensure_running()
    finally:
        del os.environ[THREADS]
    return context


def _threads(neighbours: int) -> int:
    return max(1, (os.cpu_count() or 1) // neighbours)


def log_folder(output: Path) -> Path | None:
    """Return the folder of the logs. None if nothing can be written; the process that trains reports that
    better."""
    try:
        (output / WORKER_LOGS).mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return (output / WORKER_LOGS).absolute()


def write_pids(logs: Path | None, processes: Sequence[Any]) -> None:
    if logs:
        pids = "".join(f"{number} {one.pid}\n" for number, one in enumerate(processes))
        replace_file(logs / PIDS, pids.encode())


def how_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "lost another worker" if code == LOST else f"ended with code {code}"


@contextmanager
def signals_to(processes: Callable[[], Iterable[Any]]) -> Iterator[threading.Event]:
    """Forward Ctrl-C and SIGTERM to these processes, which finish their windows and save.

    The yielded event is set when there was a signal. Only the main thread receives signals.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def hand_on(number: int, _: FrameType | None) -> None:
        asked.set()
        for process in processes():
            if process.exitcode is None:
                os.kill(process.pid, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def be_process(
    main: Callable[[Connection], object], connection: Connection, log: Path | None, neighbours: int | None
) -> None:
    """Run `main` in the new process and exit with its code. The process is one of `neighbours` on this
    machine; None if the user has set the number of threads of each."""
    # Leave the terminal's foreground: Ctrl-C reaches only the launcher, which forwards it.
    os.setpgrp()
    if log is not None:
        _write_to(log)
    if neighbours is not None:
        # This is the value of the server, not a setting of the user.
        os.environ.pop(THREADS, None)
        torch.set_num_threads(_threads(neighbours))
    code = _exit_code(partial(main, connection))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the transport may still hold a connection to a worker that is gone.
    os._exit(code)


def _exit_code(main: Callable[[], object]) -> int:
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return CRASHED
    return 0


def _write_to(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
