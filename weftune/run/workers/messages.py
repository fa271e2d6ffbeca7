"""Commands that the first worker of a pipeline sends to the other workers, and their answers. Commands are
executed one after another, in the order in which they were sent. Only the first worker makes decisions."""

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
    """The command to load the worker's part of a base. `delay` is the number of seconds by which tests and
    benchmarks delay every message."""

    spec: BaseSpec
    part: WorkerLayout
    delay: float = 0.0
    max_bytes: int | None = None
    """Maximum size in bytes of the GPU memory that the worker may use. None sets no limit."""
    deterministic: bool = False
    """Whether the worker uses torch's deterministic kernels."""


@dataclass(frozen=True, slots=True)
class Attach:
    adapter: JobAdapter
    recipe: Recipe
    checkpoints: Path
    resumes: bool
    """Whether the first worker found a checkpoint of the job. If so, every worker reads its part of the
    checkpoint."""


@dataclass(frozen=True, slots=True)
class RunProgram:
    program: Program
    microbatches: Mapping[int, Microbatch]
    """Maps the index of each microbatch that the worker's replica (copy of the pipeline) runs to the
    microbatch's tensors."""


JobAction = Literal["keep best", "show mean", "show master", "save slice", "detach"]
"""Actions of a `JobCommand`. 'keep best': keep the current weights, since the last evaluation was the best.
'show mean' and 'show master': make passes read the mean of the last weights, or the latest weights again.
'save slice': write this worker's file (slice) of a checkpoint. 'detach': detach the job and return its
weights. Only workers in `WorkerControl.writers` write slices and return weights, since all other workers hold
copies of the same weights."""


@dataclass(frozen=True, slots=True)
class JobCommand:
    action: JobAction
    job: str


@dataclass(frozen=True, slots=True)
class End:
    """The command to end the worker, or only the Program that it is running."""

    ends_window_only: bool = False
    """Whether the command ends the running Program but not the worker. A command to end is read at once, even
    while another command is executed."""


Command = Begin | Attach | RunProgram | JobCommand | End


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to the command `Begin`: the worker's part of the base is loaded, or it is refused for the
    given reason."""

    refusal: str = ""
    """Error message for the user, which the first worker shows, if the base cannot be loaded for a reason
    that only this worker could find. Empty if the worker's part of the base is loaded."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last answer of a worker, sent after the command to end."""


Answer = Begun | Slice | Unsaved | WorkerReport | Snapshot | Ended
"""Any message of a worker to the first worker. A `Slice` says that the worker's file (slice) of a checkpoint
has been written, an `Unsaved` why it could not be written. A `WorkerReport` says that the worker has finished
its actions of a Program. A `Snapshot` holds the weights of a job that was detached."""


MessageError = PeerLost | ForgedMessage
"""An error that occurred while a message was received. The error is put into the queue of messages, and
raised when it is taken from there."""


class CommandReceiver:
    """The part of a worker that receives commands and sends answers. A thread receives the commands, so that
    a command to end the running Program is read at once."""

    def __init__(self, connections: WorkerConnections) -> None:
        (self._commands,), (self._reports,) = (
            connections.incoming_lanes("command"),
            connections.outgoing_lanes("report"),
        )
        self._queue: queue.Queue[Command | MessageError] = queue.Queue()
        self._send_lock = threading.Lock()
        """Lock under which answers are sent one at a time, since threads that write checkpoints also send
        answers."""
        self.stop_requested = threading.Event()
        """An event that is set when the running Program is to end early."""
        threading.Thread(target=self._receive_all, daemon=True).start()

    def next_command(self) -> Command:
        command = self._queue.get()
        if isinstance(command, MessageError):
            raise command
        return command

    def _receive_all(self) -> None:
        while True:
            command: Command | MessageError = _receive_message(self._commands)
            if isinstance(command, End) and command.ends_window_only:
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
    """The part of the first worker that sends commands to the other workers. For each of them, a thread
    receives its answers."""

    def __init__(self, connections: WorkerConnections) -> None:
        self.connections = connections
        self._commands = {lane.peer: lane for lane in connections.outgoing_lanes("command")}
        self.workers = tuple(self._commands)
        position = connections.position
        self.writers = tuple(one for one in self.workers if replace(position, worker=one).writes_checkpoints)
        """Workers, except the first, that write checkpoints and return the weights of adapters. Other workers
        hold copies of the same weights."""
        self._queue: queue.Queue[tuple[int, Answer | MessageError]] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._receive_all, args=(lane,), daemon=True)
            for lane in connections.incoming_lanes("report")
        ]
        for listener in self._threads:
            listener.start()

    def command(self, worker: int, command: Command) -> None:
        send_message(command, self._commands[worker])

    def broadcast(self, command: Command) -> None:
        for worker in self.workers:
            self.command(worker, command)

    def end_workers(self) -> None:
        """Send all workers the command to end, and wait for the last answer of each."""
        self.broadcast(End())
        for listener in self._threads:
            listener.join()

    def next_answer(self, seconds: float | None = 0.0) -> tuple[int, Answer] | None:
        """Return the next answer and the worker that sent it, or None if no answer arrives within `seconds`.
        With `seconds` None, wait without limit."""
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
        """Receive one answer and return whether more answers will follow. This is a separate function, so
        that an answer with weights is not held in memory while the next answer is awaited."""
        answer = _receive_message(lane)
        self._queue.put((lane.peer, answer))
        return not isinstance(answer, Ended | MessageError)


MESSAGE_RECORDS = {
    **records_in(Command),
    **records_in(Answer),
    **records_in(Union[*KINDS.values()]),
    **records_in(Union[*OBJECTIVES.values()]),
}
"""Maps the name of each dataclass that a message between workers may contain to the class."""


def send_message(message: Command | Answer, lane: PeerLane) -> None:
    payload = torch.frombuffer(bytearray(encode(message, read_secret())), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(payload)]), lane.peer, group=lane.group)
        dist.send(payload, lane.peer, group=lane.group)
    except RuntimeError as error:
        raise PeerLost(f"worker {lane.peer} is gone: {error}") from error


def _receive_message(lane: PeerLane) -> Any:
    """Return the next message, or the error that occurred while it was received."""
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
