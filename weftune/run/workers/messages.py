"""Commands of the first worker of a pipeline, and the answers of the others.

Commands are executed one after another, in the order in which they were sent. Only the first worker decides.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import torch
import torch.distributed as dist
from torch import Tensor

from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import KINDS
from weftune.adapters.vector import VectorLayout
from weftune.base.spec import BaseSpec
from weftune.core.batch import Microbatch
from weftune.plan.program.layout import OnWorker
from weftune.plan.program.program import Program
from weftune.run.training.schedule import Recipe
from weftune.run.training.slices import Slice
from weftune.run.workers.agreed import WorkerReport
from weftune.run.workers.codec import Forged, decode, encode, records_in
from weftune.run.workers.groups import Wires, secret
from weftune.run.workers.mailbox import PeerLost


@dataclass(frozen=True, slots=True)
class Begin:
    """Load this part of a base. `delay` slows the links down, for tests and benchmarks."""

    spec: BaseSpec
    part: OnWorker
    delay: float = 0.0
    most: int | None = None
    """Bytes that the worker may use of its GPU. None means all."""
    deterministic: bool = False
    """Whether the worker runs torch's deterministic kernels."""


@dataclass(frozen=True, slots=True)
class Attach:
    adapter: JobAdapter
    recipe: Recipe
    checkpoints: Path
    resumes: bool
    """Whether the first worker found a checkpoint there."""


@dataclass(frozen=True, slots=True)
class RunProgram:
    program: Program
    microbatches: Mapping[int, Microbatch]
    """The microbatches that the worker's replica runs."""


@dataclass(frozen=True, slots=True)
class EndEarly:
    """Compute nothing more of the running Program. It is read at once, even while another command runs."""


@dataclass(frozen=True, slots=True)
class KeepBest:
    """This job's last evaluation was its best: keep its weights."""

    job: str


@dataclass(frozen=True, slots=True)
class ShowMean:
    """Make passes read the mean of this job's last weights."""

    job: str


@dataclass(frozen=True, slots=True)
class ShowMaster:
    """Make passes read this job's own weights again."""

    job: str


@dataclass(frozen=True, slots=True)
class SaveSlice:
    """Write a slice of a checkpoint. Sent only to workers of the first replica, since the others hold the
    same weights."""

    job: str


@dataclass(frozen=True, slots=True)
class Detach:
    """Detach the job; workers of the first replica return its weights."""

    job: str


@dataclass(frozen=True, slots=True)
class End:
    pass


Command = Begin | Attach | RunProgram | EndEarly | KeepBest | ShowMean | ShowMaster | SaveSlice | Detach | End


@dataclass(frozen=True, slots=True)
class Begun:
    """The part of the base is loaded."""


@dataclass(frozen=True, slots=True)
class Saved:
    job: str
    step: int
    slice: Slice | None
    error: str = ""
    """Reason why the slice could not be written."""


@dataclass(frozen=True, slots=True)
class Through:
    """The worker has finished its list of a window."""

    report: WorkerReport
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    job: str
    layout: VectorLayout
    master: Tensor
    best: Tensor | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A user's mistake that only this worker could see; the first worker shows the sentence."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message of a worker that was dismissed."""


Answer = Begun | Saved | Through | HandedOver | Refused | Ended


class Orders:
    """The worker's side: commands in, answers out. A thread receives commands, since `EndEarly` cannot
    wait."""

    def __init__(self, wires: Wires) -> None:
        worker = wires.place.worker
        self._commands, self._reports = wires.commands[worker], wires.reports[worker]
        self._heard: queue.Queue[Command | PeerLost | Forged] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        """Lock for answers, which threads that write slices send too."""
        self.overdue = threading.Event()
        """Set if the running Program is to end early."""
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self) -> Command:
        command = self._heard.get()
        if isinstance(command, PeerLost | Forged):
            raise command
        return command

    def _listen(self) -> None:
        command: Command | PeerLost | Forged | None = None
        while not isinstance(command, End | PeerLost | Forged):
            try:
                command = receive_message(self._commands, 0)
            except (PeerLost, Forged) as mistrusted:
                command = mistrusted
            assert command is not None
            if isinstance(command, EndEarly):
                self.overdue.set()
                continue
            if isinstance(command, RunProgram):
                # The previous Program is finished on all workers.
                self.overdue.clear()
            self._heard.put(command)

    def answer(self, answer: Answer) -> None:
        with self._one_at_a_time:
            send_message(answer, self._reports, 0)


class Staff:
    """The first worker's side. One thread per other worker receives its answers, so that neither side waits
    for them."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.workers = tuple(wires.commands)
        self.first_replica = tuple(worker for worker in self.workers if worker < wires.place.stages)
        """Workers that write checkpoints and return adapters."""
        self._heard: queue.Queue[tuple[int, Answer | PeerLost | Forged]] = queue.Queue()
        self._listeners = [
            threading.Thread(target=self._listen, args=(worker,), daemon=True) for worker in self.workers
        ]
        for listener in self._listeners:
            listener.start()

    def command(self, worker: int, command: Command) -> None:
        send_message(command, self.wires.commands[worker], worker)

    def command_all(self, command: Command) -> None:
        for worker in self.workers:
            self.command(worker, command)

    def dismiss(self) -> None:
        """Dismiss all workers, and wait for their last answer."""
        self.command_all(End())
        for listener in self._listeners:
            listener.join()

    def heard(self, seconds: float = 0.0) -> tuple[int, Answer] | None:
        """Return the next answer, or None if there is none within this time."""
        try:
            return self._checked(*self._heard.get(seconds > 0, seconds or None))
        except queue.Empty:
            return None

    def wait(self) -> tuple[int, Answer]:
        return self._checked(*self._heard.get())

    def _checked(self, worker: int, answer: Answer | PeerLost | Forged) -> tuple[int, Answer]:
        if isinstance(answer, PeerLost | Forged):
            raise answer
        return worker, answer

    def _listen(self, worker: int) -> None:
        while self._hear_next(worker):
            pass

    def _hear_next(self, worker: int) -> bool:
        """Receive one answer and return whether there are more to come. It is a separate function, so that
        the last answer, with its weights, is not held while waiting for the next."""
        answer: Answer | PeerLost | Forged
        try:
            answer = receive_message(self.wires.reports[worker], worker)
        except (PeerLost, Forged) as mistrusted:
            answer = mistrusted
        self._heard.put((worker, answer))
        return not isinstance(answer, Ended | PeerLost | Forged)


KNOWN = {**records_in(Command), **records_in(Answer), **records_in(Union[*KINDS.values()])}
"""Maps names to the records that a message may hold."""


def send_message(message: Command | Answer, group: Any, peer: int) -> None:
    payload = torch.frombuffer(bytearray(encode(message, secret())), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(payload)]), peer, group=group)
        dist.send(payload, peer, group=group)
    except RuntimeError as error:
        raise PeerLost(f"worker {peer} is gone: {error}") from error


def receive_message(group: Any, peer: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    try:
        dist.recv(size, peer, group=group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, peer, group=group)
    except RuntimeError as error:
        raise PeerLost(f"worker {peer} is gone: {error}") from error
    return decode(payload.numpy().tobytes(), KNOWN, secret())
