"""The processes of a run in shares: each an ordinary run over its own jobs, heard by the launcher, and
started again by itself when it is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from weftune.errors import UserError
from weftune.jobs.spec.spec import RunSpec
from weftune.launch.processes import be_process, forks, how_ended, log_folder, signals_to, write_pids
from weftune.report.terminal import JobRow
from weftune.run.workers.heartbeat import LOST
from weftune.trainer.journal import View
from weftune.trainer.trainer import Options, trainer_for

RESTARTS = 3
"""How often a share is started again after it was lost."""
EVERY = 1.0
SILENT_AFTER = 30.0
"""Seconds without a sign of life after which a share counts as lost: long, for nobody waits for it, and what
holds the interpreter's lock holds its signs back."""
MISTAKEN, STOPPED = 2, 128 + signal.SIGINT
"""Exit codes of a share's process: a user's mistake, and an interruption that it has saved for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that the process of a share is told."""

    number: int
    of: int
    run: RunSpec
    """With the jobs of this share only."""
    output: Path
    max_steps: int | None
    options: Options


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a share's jobs have not all ended."""

    share: int
    sentence: str
    mistaken: bool = False
    """By a user's mistake, as opposed to a loss."""


@dataclass(frozen=True, slots=True)
class Service:
    """How the crew ended."""

    interrupted: bool
    troubles: tuple[Trouble, ...]


@dataclass(frozen=True, slots=True)
class CrewMember:
    task: Task
    process: Any
    connection: Connection
    restarts: int = 0


Message = JobRow | str | Trouble | None
"""A row of the table, a sentence for the user, the end of a share by a mistake, or a mere sign of life."""


class Crew:
    """Made once for a run; `serve` returns when every share has ended."""

    def __init__(self, tasks: Sequence[Task], output: Path, view: View) -> None:
        self.tasks = tasks
        self.view = view
        self.troubles: dict[int, Trouble] = {}
        self._logs = log_folder(output)
        self._members: dict[int, CrewMember] = {}
        self._working: set[int] = set()
        self._heard: dict[int, float] = {}
        """Share → when it last gave a sign of life."""
        self._told: set[str] = set()
        self._stopped = False

    def serve(self) -> Service:
        with signals_to(self._processes) as asked:
            try:
                for task in self.tasks:
                    self._start(task, 0, asked)
                while self._working:
                    self._hear(asked)
            finally:
                for number in self._working:
                    self._members[number].process.kill()
        return Service(asked.is_set() or self._stopped, tuple(self.troubles.values()))

    def _processes(self) -> list[Any]:
        return [self._members[number].process for number in list(self._working)]

    def _start(self, task: Task, restarts: int, asked: threading.Event) -> None:
        context = forks()
        ours, theirs = context.Pipe(duplex=False)
        log = self._logs / f"share-{task.number}.log" if self._logs else Path(os.devnull)
        process = context.Process(target=be_share, args=(task, theirs, log), name=f"share {task.number}")
        process.start()
        theirs.close()
        self._members[task.number] = CrewMember(task, process, ours, restarts)
        self._working.add(task.number)
        self._heard[task.number] = time.monotonic()
        write_pids(self._logs, [member.process for member in self._members.values()])
        if asked.is_set():
            # It may have been started just as somebody asked to stop.
            os.kill(process.pid, signal.SIGINT)

    def _hear(self, asked: threading.Event) -> None:
        members = [self._members[number] for number in sorted(self._working)]
        sources = [source for one in members for source in (one.process.sentinel, one.connection)]
        ready = set(wait(sources, timeout=EVERY))
        for member in members:
            # Looked at before its messages are read: what it said last is then among them.
            has_ended = member.process.sentinel in ready
            if has_ended or member.connection in ready:
                self._read(member, has_ended)
            if has_ended:
                self._end(member, asked)
            elif time.monotonic() - self._heard[member.task.number] > SILENT_AFTER:
                self.view.note(
                    f"share {member.task.number} has given no sign of life for {SILENT_AFTER:.0f} seconds."
                )
                member.process.kill()
                member.process.join()

    def _read(self, member: CrewMember, has_ended: bool) -> None:
        self._heard[member.task.number] = time.monotonic()
        try:
            while member.connection.poll():
                self._take(member.connection.recv())
        except (EOFError, OSError):
            # It has closed its side, so it is ending; its sentinel says when and how.
            if not has_ended:
                member.process.join()

    def _take(self, message: Message) -> None:
        match message:
            case JobRow():
                self.view.update(message)
            case Trouble():
                self.troubles[message.share] = message
                self._note(message.sentence)
            case str():
                self._note(message)
            case None:
                pass

    def _note(self, sentence: str) -> None:
        """Once: all shares say the same of what concerns them all."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.view.note(sentence)

    def _end(self, member: CrewMember, asked: threading.Event) -> None:
        member.process.join()
        member.connection.close()
        number, code = member.task.number, member.process.exitcode
        self._working.discard(number)
        self._stopped |= code == STOPPED
        if code in (0, MISTAKEN, STOPPED) or asked.is_set():
            return
        sentence = f"share {number} {how_ended(code)}"
        if member.restarts < RESTARTS:
            again = f"starting it again from the last checkpoints ({member.restarts + 1} of {RESTARTS})"
            self.view.note(f"{sentence}; {again}.")
            self._start(member.task, member.restarts + 1, asked)
            return
        self.troubles[number] = Trouble(number, f"{sentence}; go on with --resume")
        self.view.note(f"{sentence}; giving up on it; go on with --resume.")


# -- one share ------------------------------------------------------------------------------------------


class ToldByShare:
    """The view of a share: the process that started it shows what it says."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._one_at_a_time = threading.Lock()

    def live(self) -> None:
        """Give signs of life, for ever."""
        while True:
            self._send(None)
            time.sleep(EVERY)

    def update(self, row: JobRow) -> None:
        self._send(row)

    def note(self, text: str) -> None:
        self._send(text)

    def stumble(self, trouble: Trouble) -> None:
        self._send(trouble)

    def _send(self, message: Message) -> None:
        try:
            with self._one_at_a_time:
                self._connection.send(message)
        except OSError:
            os._exit(LOST)


def be_share(task: Task, connection: Connection, log: Path) -> None:
    """In the new process."""
    be_process(partial(_train, task, connection), log, task.of)


def _train(task: Task, connection: Connection) -> None:
    told = ToldByShare(connection)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    threading.Thread(target=told.live, daemon=True).start()
    device = torch.device(task.options.device or "cpu")
    if device.type == "cuda":
        # Kernels are launched on the current device, whatever device their tensors are on.
        torch.cuda.set_device(device)
    options = replace(task.options, resume=True, restart=(), retry=(), share=task.number)
    trainer = trainer_for(task.run, output=task.output, max_steps=task.max_steps, options=options, view=told)
    try:
        trainer.run()
    except UserError as error:
        print(error, file=sys.stderr)
        told.stumble(Trouble(task.number, str(error), mistaken=True))
        raise SystemExit(MISTAKEN) from None
    if trainer.interrupted:
        raise SystemExit(STOPPED)


def _end_with_launcher() -> None:
    """Nobody would gather what an orphan records, and a resumed run would meet it at work on its jobs."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a share is never the first process"
    wait([launcher.sentinel])
    os._exit(LOST)
