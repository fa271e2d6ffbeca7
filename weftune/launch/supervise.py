"""The supervisor of a run's processes: it starts them in teams, watches them, and starts a team again when
one of its members is lost.

The workers that have a base together are one team: none can go on without the others. Shares of the jobs are
teams of one: the others go on. Torch's elastic agent would restart all of a group whatever happened; takes
every exit code but 0 for a failure, where a user's mistake or an interruption must not be tried again; sends
SIGTERM to all workers at once, where the first finishes the step for all; and starts every attempt from
scratch, with seconds of imports. What torchrun starts is served all the same, by its environment variables.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from weftune.jobs.store.resumption import UNKNOWN
from weftune.launch.processes import (
    CRASHED,
    INTERRUPTED,
    THREADS,
    be_process,
    forks,
    how_ended,
    log_folder,
    signals_to,
    write_pids,
)
from weftune.run.workers.heartbeat import LOST

RESTARTS = 3
"""How often a team is started again after one of its members was lost."""
EVERY = 1.0
"""Seconds between two looks at members that say nothing."""
GRACE = 15.0
"""Seconds that the other members of a team have to end after the first."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """A process to be started. What it runs may tell the launcher something; None is a sign of life."""

    name: str
    main: Callable[[Connection], object]
    prints: bool = False
    """Whether it prints where the launcher does, and not to a log of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Processes that are lost and started again together. The team ends with its first member, which alone
    hears of Ctrl-C and SIGTERM."""

    members: Callable[[int], Sequence[Supervised]]
    """By how often it has been started before."""
    named: str = "it"
    """In the sentence that says what is started again."""
    silent_after: float | None = None
    """Seconds without a word after which a member is lost; None where members look after one another."""


@dataclass(frozen=True, slots=True)
class TeamEnd:
    """The exit code of a team's first member; LOST, and who was lost and how, where it was given up."""

    code: int
    loss: str = ""


@dataclass(slots=True)
class _Process:
    name: str
    process: Any
    connection: Connection
    code: int | None = None
    """Its exit code, when it has ended and all that it said was heard."""
    heard: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life."""


class Supervisor:
    """Made once for a run. `say` takes sentences for the user, `hear` what members tell. `resume` is the line
    that resumes the run."""

    def __init__(
        self,
        teams: Sequence[Team],
        output: Path,
        say: Callable[[str], None],
        hear: Callable[[Any], None] = lambda message: None,
        resume: str = UNKNOWN,
    ) -> None:
        self._resume = resume
        self._teams, self._say, self._hear = teams, say, hear
        self._logs = log_folder(output)
        self._restarts = [0] * len(teams)
        self._processes: list[list[_Process]] = [[] for _ in teams]
        self._ended: dict[int, TeamEnd] = {}
        self._asked = threading.Event()

    def run(self) -> list[TeamEnd]:
        """How every team ended, when all have."""
        numbers = range(len(self._teams))
        with signals_to(self._leaders) as self._asked:
            try:
                for number in numbers:
                    self._start(number)
                while len(self._ended) < len(numbers):
                    self._listen([one for number in numbers for one in self._processes[number]])
                    for number in numbers:
                        if number not in self._ended:
                            self._judge(number)
            finally:
                for processes in self._processes:
                    end(processes)
        return [self._ended[number] for number in numbers]

    def _leaders(self) -> list[Any]:
        return [processes[0].process for processes in self._processes if processes]

    def _start(self, number: int) -> None:
        members = self._teams[number].members(self._restarts[number])
        neighbours = len(self._teams) * len(members)
        self._processes[number] = [start(member, self._logs, neighbours) for member in members]
        write_pids(self._logs, [one.process for processes in self._processes for one in processes])
        if self._asked.is_set():
            # It may have been started just as somebody asked to stop.
            os.kill(self._processes[number][0].process.pid, signal.SIGINT)

    def _listen(self, processes: Sequence[_Process]) -> None:
        """Wait until somebody says something or ends."""
        alive = [one for one in processes if one.code is None]
        wait([source for one in alive for source in (one.process.sentinel, one.connection)], timeout=EVERY)
        for one in alive:
            # Asked before its messages are read: what it said last is then among them.
            code = one.process.exitcode
            self._read(one)
            one.code = code

    def _read(self, one: _Process) -> None:
        try:
            while one.connection.poll():
                one.heard = time.monotonic()
                if (message := one.connection.recv()) is not None:
                    self._hear(message)
        except (EOFError, OSError):
            # It has closed its side, so it is ending.
            one.process.join()

    def _judge(self, number: int) -> None:
        """End or restart a team if one of its members has ended."""
        first, *others = self._processes[number]
        lost = [one for one in others if one.code]
        if first.code is not None and (first.code < 0 or first.code in (LOST, CRASHED)):
            lost.append(first)
        if lost:
            # Of several not one that only lost another.
            self._lose(number, min(lost, key=lambda one: one.code == LOST))
        elif first.code is not None:
            for one in others:
                one.process.join(GRACE)
            self._ended[number] = TeamEnd(first.code)
        else:
            self._end_silent(number)

    def _end_silent(self, number: int) -> None:
        """A member that says nothing any more is lost, too: it ends now, and is judged when it has."""
        patience = self._teams[number].silent_after or math.inf
        for one in self._processes[number]:
            if one.code is None and time.monotonic() - one.heard > patience:
                self._say(f"{one.name} has given no sign of life for {patience:.0f} seconds.")
                one.process.kill()
                one.process.join()

    def _lose(self, number: int, lost: _Process) -> None:
        assert lost.code is not None, "who is lost has ended"
        loss = f"{lost.name} {how_ended(lost.code)}"
        end(self._processes[number])
        if self._asked.is_set():
            self._ended[number] = TeamEnd(INTERRUPTED, loss)
        elif self._restarts[number] == RESTARTS:
            self._say(f"{loss}; giving up; go on with {self._resume}")
            self._ended[number] = TeamEnd(LOST, loss)
        else:
            self._restarts[number] += 1
            which = f"{self._teams[number].named} again from the last checkpoints"
            self._say(f"{loss}; starting {which} ({self._restarts[number]} of {RESTARTS}).")
            self._start(number)


def start(member: Supervised, logs: Path | None, neighbours: int) -> _Process:
    """Start a process, one of so many on this machine."""
    context, told = forks(neighbours), THREADS in os.environ
    ours, theirs = context.Pipe(duplex=False)
    own = logs / f"{member.name.replace(' ', '-')}.log" if logs else Path(os.devnull)
    arguments = (member.main, theirs, None if member.prints else own, None if told else neighbours)
    process = context.Process(target=be_process, args=arguments, name=member.name)
    process.start()
    theirs.close()
    return _Process(member.name, process, ours)


def end(processes: Sequence[_Process]) -> None:
    """End those that have not ended by themselves."""
    for one in processes:
        one.process.kill()
        one.process.join()
