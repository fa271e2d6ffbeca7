"""Commands of the first worker of a pipeline, and the answers of the others.

Commands are executed one after another, in the order in which they were sent. Only the first worker decides.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union

import torch
import torch.distributed as dist

from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import KINDS
from weftune.base.spec import BaseSpec
from weftune.core.batch import Microbatch
from weftune.objectives.spec import OBJECTIVES
from weftune.plan.program.layout import WorkerLayout
from weftune.plan.program.program import Program
from weftune.run.training.checkpoint import Slice
from weftune.run.training.schedule import Recipe
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.writer import Unsaved
from weftune.run.workers.agreed import WorkerReport
from weftune.run.workers.codec import ForgedMessage, decode, encode, records_in
from weftune.run.workers.groups import WorkerConnections, read_secret
from weftune.run.workers.mailbox import PeerLane, PeerLost


@dataclass(frozen=True, slots=True)
class Begin:
    """Load this part of a base. `delay` slows the links down, for tests and benchmarks."""

    spec: BaseSpec
    part: WorkerLayout
    delay: float = 0.0
    max_bytes: int | None = None
    """Bytes that the worker may use of its GPU. None means all."""
    deterministic: bool = False
    """Whether the worker runs torch's deterministic kernels."""


@dataclass(frozen=True, slots=True)
class Attach:
    adapter: JobAdapter
    recipe: Recipe
    checkpoints: Path
    resumes: bool
    """Whether the first worker found a checkpoint of the job, from which every worker then reads its part."""


@dataclass(frozen=True, slots=True)
class RunProgram:
    program: Program
    microbatches: Mapping[int, Microbatch]
    """The microbatches that the worker's replica runs."""


JobAction = Literal["keep best", "show mean", "show master", "save slice", "detach"]
"""Keep the weights, since the last evaluation was the best; make passes read the mean of the last weights, or
the job's own weights again; write a slice of a checkpoint (`WorkerControl.writers` only: the others hold the
same weights); detach the job, for which the same workers return its weights."""


@dataclass(frozen=True, slots=True)
class JobCommand:
    action: JobAction
    job: str


@dataclass(frozen=True, slots=True)
class End:
    """End this worker."""

    window_only: bool = False
    """Whether only the running Program ends: nothing more of it is computed. This is read at once, even while
    another command runs."""


Command = Begin | Attach | RunProgram | JobCommand | End


@dataclass(frozen=True, slots=True)
class Begun:
    """The part of the base is loaded."""

    refusal: str = ""
    """A user's mistake that only this worker could see, instead; the first worker shows the sentence."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last message of a worker that was dismissed."""


Answer = Begun | Slice | Unsaved | WorkerReport | Snapshot | Ended
"""A `Slice` has been written, or why not; a `WorkerReport` says that the worker has finished its list of a
window; a `Snapshot` holds the weights of a job that was detached."""


MessageError = PeerLost | ForgedMessage
"""An error while a message was received, raised where it is taken."""


class CommandReceiver:
    """The worker's side. A thread receives commands, since the end of a window cannot wait."""

    def __init__(self, connections: WorkerConnections) -> None:
        (self._commands,), (self._reports,) = connections.incoming("command"), connections.outgoing("report")
        self._queue: queue.Queue[Command | MessageError] = queue.Queue()
        self._send_lock = threading.Lock()
        """Lock for answers, which threads that write slices send too."""
        self.stop_requested = threading.Event()
        """Set if the running Program is to end early."""
        threading.Thread(target=self._receive_all, daemon=True).start()

    def next_command(self) -> Command:
        command = self._queue.get()
        if isinstance(command, MessageError):
            raise command
        return command

    def _receive_all(self) -> None:
        while True:
            command: Command | MessageError = _receive_message(self._commands)
            if isinstance(command, End) and command.window_only:
                self.stop_requested.set()
                continue
            if isinstance(command, RunProgram):
                # The previous Program is finished on all workers.
                self.stop_requested.clear()
            self._queue.put(command)
            if isinstance(command, End | MessageError):
                return

    def answer(self, answer: Answer) -> None:
        with self._send_lock:
            send_message(answer, self._reports)


class WorkerControl:
    """The first worker's side. One thread per other worker receives its answers."""

    def __init__(self, connections: WorkerConnections) -> None:
        self.connections = connections
        self._commands = {lane.peer: lane for lane in connections.outgoing("command")}
        self.workers = tuple(self._commands)
        position = connections.position
        self.writers = tuple(one for one in self.workers if replace(position, worker=one).writes)
        """Workers that write checkpoints and return adapters."""
        self._queue: queue.Queue[tuple[int, Answer | MessageError]] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._receive_all, args=(lane,), daemon=True)
            for lane in connections.incoming("report")
        ]
        for listener in self._threads:
            listener.start()

    def command(self, worker: int, command: Command) -> None:
        send_message(command, self._commands[worker])

    def broadcast(self, command: Command) -> None:
        for worker in self.workers:
            self.command(worker, command)

    def end_workers(self) -> None:
        """Dismiss all workers, and wait for their last answer."""
        self.broadcast(End())
        for listener in self._threads:
            listener.join()

    def next_answer(self, seconds: float | None = 0.0) -> tuple[int, Answer] | None:
        """Return the next answer and its worker, or None if there is none within this time."""
        try:
            worker, answer = self._queue.get(seconds != 0.0, seconds)
        except queue.Empty:
            return None
        if isinstance(answer, MessageError):
            raise answer
        return worker, answer

    def wait(self) -> tuple[int, Answer]:
        found = self.next_answer(None)
        assert found is not None
        return found

    def _receive_all(self, lane: PeerLane) -> None:
        while self._receive_answer(lane):
            pass

    def _receive_answer(self, lane: PeerLane) -> bool:
        """Receive one answer and return whether there are more to come. It is a separate function, so that
        the last answer, with its weights, is not held while waiting for the next."""
        answer = _receive_message(lane)
        self._queue.put((lane.peer, answer))
        return not isinstance(answer, Ended | MessageError)


MESSAGE_RECORDS = {
    **records_in(Command),
    **records_in(Answer),
    **records_in(Union[*KINDS.values()]),
    **records_in(Union[*OBJECTIVES.values()]),
}
"""Maps names to the records that a message may hold."""


def send_message(message: Command | Answer, lane: PeerLane) -> None:
    payload = torch.frombuffer(bytearray(encode(message, read_secret())), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(payload)]), lane.peer, group=lane.group)
        dist.send(payload, lane.peer, group=lane.group)
    except RuntimeError as error:
        raise PeerLost(f"worker {lane.peer} is gone: {error}") from error


def _receive_message(lane: PeerLane) -> Any:
    """Return the next message, or the error that it met."""
    size = torch.zeros(1, dtype=torch.int64)
    try:
        dist.recv(size, lane.peer, group=lane.group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, lane.peer, group=lane.group)
    except RuntimeError as error:
        return PeerLost(f"worker {lane.peer} is gone: {error}")
    try:
        return decode(payload.numpy().tobytes(), MESSAGE_RECORDS, read_secret())
    except ForgedMessage as error:
        return error
