"""The supervisor of a run's processes: it starts them in teams, watches them, and restarts a team when one of
its members is lost.

Workers that hold a base together are one team, since none can continue without the others. Each share of the
jobs is a team, of one process or of several workers, so that other shares continue without it. Torch's
elastic agent is not used: it restarts the whole group, treats every exit code but 0 as a failure, although
user errors and interruptions must not be retried, sends SIGTERM to all workers, although the first finishes
the step for all, and repeats all imports. Workers that torchrun starts are supported through its environment
variables.

Processes are forked from a server that has already imported torch and Weftune, so a restart is fast.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from weftune.core.files import replace_file
from weftune.errors import UserError
from weftune.jobs.store.status import UNKNOWN_COMMAND, WORKER_LOGS
from weftune.run.workers.heartbeat import LOST

CRASHED = 70
"""Exit code of a process that ended with an unexpected exception."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that was interrupted, such as by Ctrl-C, and has saved its jobs."""
UNGUARDED = 64
"""Exit code of a process whose script calls `weftune.train` without an `if __name__ == "__main__":` guard."""
PIDS = "pids"
"""Name of the file, in the folder of logs, that lists the index and the id of each process."""
PRELOADED = [
    "weftune.launch.workers",
    "weftune.launch.split",
    "weftune.trainer.trainer",
    "weftune.cli.main",
    "peft",
    "datasets",
]


THREADS = "OMP_NUM_THREADS"
MAX_RESTARTS = 3
"""Maximum number of times that a team of processes is restarted after a process was lost."""
POLL_SECONDS = 1.0
"""Seconds between two checks of the processes, and between the messages that show that a process is alive."""
GRACE_SECONDS = 15.0
"""Seconds that the other processes of a team have to end after the first process has ended."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to be started. It runs the function `main`, whose argument is a connection for messages to
    the launcher. The message None only shows that the process is alive."""

    name: str
    main: Callable[[Connection], object]
    prints_output: bool = False
    """Whether the process prints to the launcher's output instead of a log file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Processes that are restarted together. The team ends when its first process ends. Only the first
    process receives Ctrl-C and SIGTERM."""

    members: Callable[[int], Sequence[ProcessSpec]]
    """Function that returns the processes of the team, given the number of earlier starts of the team."""
    name: str = "it"
    """Name of the team in the message that reports a restart."""
    silent_seconds: float | None = None
    """Seconds without a message after which a process counts as lost. None if the processes of the team watch
    one another instead."""


@dataclass(frozen=True, slots=True)
class TeamEnd:
    """The end of a team of processes: the exit code of the first process, or the exit code `LOST` and a
    sentence about a process that crashed or hung."""

    code: int
    loss_reason: str = ""


@dataclass(slots=True)
class _Process:
    name: str
    process: Any
    connection: Connection
    code: int | None = None
    """Exit code of the process, set when it has ended and all of its messages were read."""
    last_message_time: float = field(default_factory=time.monotonic)
    """Time of the last message, in seconds of the monotonic clock."""


class Supervisor:
    """The supervisor of all teams of a run. The supervisor calls `show_sentence` with sentences for the user,
    and `handle_message` with messages from the processes. `resume` is the command line that resumes the
    run."""

    def __init__(
        self,
        teams: Sequence[Team],
        output: Path,
        show_sentence: Callable[[str], None],
        handle_message: Callable[[Any], None] = lambda message: None,
        resume: str = UNKNOWN_COMMAND,
    ) -> None:
        self._resume = resume
        self._teams, self._show_sentence, self._handle_message = teams, show_sentence, handle_message
        self._logs: Path | None = (output / WORKER_LOGS).absolute()
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError:
            # The process that trains reports that nothing can be written.
            self._logs = None
        self._restarts = [0] * len(teams)
        self._processes: list[list[_Process]] = [[] for _ in teams]
        self._team_ends: dict[int, TeamEnd] = {}
        self._stop_requested = threading.Event()

    def run(self) -> list[TeamEnd]:
        """Run all teams until they have ended, and return how each ended."""
        numbers = range(len(self._teams))

        def leader_processes() -> list[Any]:
            return [processes[0].process for processes in self._processes if processes]

        with forward_signals(leader_processes) as self._stop_requested:
            try:
                for number in numbers:
                    self._start_team(number)
                while len(self._team_ends) < len(numbers):
                    self._handle_messages([one for number in numbers for one in self._processes[number]])
                    for number in numbers:
                        if number not in self._team_ends:
                            self._check_worker_team(number)
            finally:
                for processes in self._processes:
                    kill_processes(processes)
        return [self._team_ends[number] for number in numbers]

    def _start_team(self, number: int) -> None:
        members = self._teams[number].members(self._restarts[number])
        neighbours = len(self._teams) * len(members)
        self._processes[number] = [start_process(member, self._logs, neighbours) for member in members]
        if self._logs:
            everyone = [one.process.pid for processes in self._processes for one in processes]
            pids = "".join(f"{number} {pid}\n" for number, pid in enumerate(everyone))
            replace_file(self._logs / PIDS, pids.encode())
        if self._stop_requested.is_set():
            # The team may have been started just as the user requested a stop.
            os.kill(self._processes[number][0].process.pid, signal.SIGINT)

    def _handle_messages(self, processes: Sequence[_Process]) -> None:
        """Wait until a process sends a message or ends, at most `POLL_SECONDS`, and pass all received
        messages on."""
        alive = [one for one in processes if one.code is None]
        wait(
            [source for one in alive for source in (one.process.sentinel, one.connection)],
            timeout=POLL_SECONDS,
        )
        for one in alive:
            # The exit code is read before the messages, so that the last message is not missed.
            code = one.process.exitcode
            self._read_messages(one)
            one.code = code

    def _read_messages(self, process: _Process) -> None:
        try:
            while process.connection.poll():
                process.last_message_time = time.monotonic()
                if (message := process.connection.recv()) is not None:
                    self._handle_message(message)
        except (EOFError, OSError):
            # The process has closed its side of the connection, so it is ending.
            process.process.join()

    def _check_worker_team(self, number: int) -> None:
        """Check one team of processes: record how it ended, restart it if a process was lost, or kill its
        silent processes."""
        first, *others = self._processes[number]
        if UNGUARDED in (one.code for one in self._processes[number]):
            raise UserError(
                "weftune.train starts processes that import the script that calls it, and would train there "
                'again: write `if __name__ == "__main__":` before the call, and indent it'
            )
        lost = [one for one in others if one.code]
        if first.code is not None and (first.code < 0 or first.code in (LOST, CRASHED)):
            lost.append(first)
        if lost:
            # If several are lost, one that did not merely lose another is reported.
            self._handle_loss(number, min(lost, key=lambda one: one.code == LOST))
        elif first.code is not None:
            for one in others:
                one.process.join(GRACE_SECONDS)
            self._team_ends[number] = TeamEnd(first.code)
        else:
            self._kill_silent_processes(number)

    def _kill_silent_processes(self, number: int) -> None:
        """Kill the processes of a team that have sent no message for too long. The next call of
        `_check_worker_team` restarts the team."""
        patience = self._teams[number].silent_seconds or math.inf
        for one in self._processes[number]:
            if one.code is None and time.monotonic() - one.last_message_time > patience:
                self._show_sentence(f"{one.name} has given no sign of life for {patience:.0f} seconds.")
                kill_processes([one])

    def _handle_loss(self, number: int, lost_process: _Process) -> None:
        assert lost_process.code is not None, "a process that is lost has ended"
        how = "lost another worker" if lost_process.code == LOST else f"ended with code {lost_process.code}"
        how = f"was ended by {signal.Signals(-lost_process.code).name}" if lost_process.code < 0 else how
        loss = f"{lost_process.name} {how}"
        kill_processes(self._processes[number])
        if self._stop_requested.is_set():
            self._team_ends[number] = TeamEnd(INTERRUPTED, loss)
        elif self._restarts[number] == MAX_RESTARTS:
            self._show_sentence(f"{loss}; giving up; resume with {self._resume}")
            self._team_ends[number] = TeamEnd(LOST, loss)
        else:
            self._restarts[number] += 1
            which = f"{self._teams[number].name} again from the last checkpoints"
            self._show_sentence(f"{loss}; starting {which} ({self._restarts[number]} of {MAX_RESTARTS}).")
            self._start_team(number)


def start_process(member: ProcessSpec, logs: Path | None, neighbours: int) -> _Process:
    """Start a process. `neighbours` is the number of processes that share the machine's cores."""
    context, told = fork_context(neighbours), THREADS in os.environ
    ours, theirs = context.Pipe(duplex=False)
    own = logs / f"{member.name.replace(' ', '-')}.log" if logs else Path(os.devnull)
    arguments = (member.main, theirs, None if member.prints_output else own, None if told else neighbours)
    process = context.Process(target=run_process, args=arguments, name=member.name)
    process.start()
    theirs.close()
    return _Process(member.name, process, ours)


def kill_processes(processes: Sequence[_Process]) -> None:
    """Kill the processes that are still running."""
    for one in processes:
        one.process.kill()
        one.process.join()


# -- processes ------------------------------------------------------------------------------------------


def fork_context(neighbours: int) -> Any:
    """Return the `multiprocessing` context that forks processes from a server with preloaded modules.
    `neighbours` is the number of processes that share the machine's cores."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    if THREADS in os.environ:
        return context
    # Some of torch's libraries count their threads once, when they are loaded, and ignore later changes: on
    # ARM the products of a linear would take all cores in each of the processes.
    os.environ[THREADS] = str(_thread_count(neighbours))
    try:
        ensure_running()
    finally:
        del os.environ[THREADS]
    return context


def _thread_count(neighbours: int) -> int:
    return max(1, (os.cpu_count() or 1) // neighbours)


def exit_unguarded_script() -> None:
    """End this process if it was started for training and is now importing the user's script, whose call of
    `weftune.train` would start further processes."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


@contextmanager
def forward_signals(processes: Callable[[], Iterable[Any]]) -> Iterator[threading.Event]:
    """Forward Ctrl-C and SIGTERM to the processes, which then save their jobs and end. Yield an event that is
    set when a signal arrives."""
    stop_requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requested
        return

    def forward_signal(number: int, _: FrameType | None) -> None:
        stop_requested.set()
        for process in processes():
            if process.exitcode is None:
                os.kill(process.pid, number)

    before = {number: signal.signal(number, forward_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_process(
    main: Callable[[Connection], object], connection: Connection, log: Path | None, neighbours: int | None
) -> None:
    """Run `main` in the new process and exit with its exit code. `neighbours` is the number of processes that
    share the machine's cores, or None if the user has set the number of threads."""
    # Leave the terminal's foreground: Ctrl-C reaches only the launcher, which forwards it.
    os.setpgrp()
    if log is not None:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
    if neighbours is not None:
        # This is the value of the server, not a setting of the user.
        os.environ.pop(THREADS, None)
        torch.set_num_threads(_thread_count(neighbours))
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
