"""Commands of the first worker of a pipeline, and the answers of the others.

Commands are executed one after another, in the order in which they were sent. Only the first worker decides.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

import torch
import torch.distributed as dist

from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import KINDS
from weftune.base.spec import BaseSpec
from weftune.core.batch import Microbatch
from weftune.plan.program.layout import OnWorker
from weftune.plan.program.program import Program
from weftune.run.training.checkpoint import Slice
from weftune.run.training.schedule import Recipe
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.writer import Unsaved
from weftune.run.workers.agreed import WorkerReport
from weftune.run.workers.codec import Forged, decode, encode, records_in
from weftune.run.workers.groups import Wires, secret
from weftune.run.workers.mailbox import PeerLane, PeerLost


@dataclass(frozen=True, slots=True)
class Begin:
    """Load this part of a base. `delay` slows the links down, for tests and benchmarks."""

    spec: BaseSpec
    part: OnWorker
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
    """Whether the first worker found a checkpoint there."""


@dataclass(frozen=True, slots=True)
class RunProgram:
    program: Program
    microbatches: Mapping[int, Microbatch]
    """The microbatches that the worker's replica runs."""


JobAction = Literal["keep best", "show mean", "show master", "save slice", "detach"]
"""Keep the weights, since the last evaluation was the best; make passes read the mean of the last weights, or
the job's own weights again; write a slice of a checkpoint (workers of the first replica only: the others hold
the same weights); detach the job, for which workers of the first replica return its weights."""


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


MessageError = PeerLost | Forged
"""An error while a message was received, raised where it is taken."""


class Orders:
    """The worker's side. A thread receives commands, since the end of a window cannot wait."""

    def __init__(self, wires: Wires) -> None:
        (self._commands,), (self._reports,) = wires.incoming("command"), wires.outgoing("report")
        self._heard: queue.Queue[Command | MessageError] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        """Lock for answers, which threads that write slices send too."""
        self.overdue = threading.Event()
        """Set if the running Program is to end early."""
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self) -> Command:
        command = self._heard.get()
        if isinstance(command, MessageError):
            raise command
        return command

    def _listen(self) -> None:
        while True:
            command: Command | MessageError = _received(self._commands)
            if isinstance(command, End) and command.window_only:
                self.overdue.set()
                continue
            if isinstance(command, RunProgram):
                # The previous Program is finished on all workers.
                self.overdue.clear()
            self._heard.put(command)
            if isinstance(command, End | MessageError):
                return

    def answer(self, answer: Answer) -> None:
        with self._one_at_a_time:
            send_message(answer, self._reports)


class Staff:
    """The first worker's side. One thread per other worker receives its answers."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self._commands = {lane.peer: lane for lane in wires.outgoing("command")}
        self.workers = tuple(self._commands)
        self.first_replica = tuple(worker for worker in self.workers if worker < wires.position.stages)
        """Workers that write checkpoints and return adapters."""
        self._heard: queue.Queue[tuple[int, Answer | MessageError]] = queue.Queue()
        self._listeners = [
            threading.Thread(target=self._listen, args=(lane,), daemon=True)
            for lane in wires.incoming("report")
        ]
        for listener in self._listeners:
            listener.start()

    def command(self, worker: int, command: Command) -> None:
        send_message(command, self._commands[worker])

    def command_all(self, command: Command) -> None:
        for worker in self.workers:
            self.command(worker, command)

    def dismiss(self) -> None:
        """Dismiss all workers, and wait for their last answer."""
        self.command_all(End())
        for listener in self._listeners:
            listener.join()

    def heard(self, seconds: float | None = 0.0) -> tuple[int, Answer] | None:
        """Return the next answer and its worker, or None if there is none within this time."""
        try:
            worker, answer = self._heard.get(seconds != 0.0, seconds)
        except queue.Empty:
            return None
        if isinstance(answer, MessageError):
            raise answer
        return worker, answer

    def wait(self) -> tuple[int, Answer]:
        found = self.heard(None)
        assert found is not None
        return found

    def _listen(self, lane: PeerLane) -> None:
        while self._hear_next(lane):
            pass

    def _hear_next(self, lane: PeerLane) -> bool:
        """Receive one answer and return whether there are more to come. It is a separate function, so that
        the last answer, with its weights, is not held while waiting for the next."""
        answer = _received(lane)
        self._heard.put((lane.peer, answer))
        return not isinstance(answer, Ended | MessageError)


KNOWN = {**records_in(Command), **records_in(Answer), **records_in(Union[*KINDS.values()])}
"""Maps names to the records that a message may hold."""


def send_message(message: Command | Answer, lane: PeerLane) -> None:
    payload = torch.frombuffer(bytearray(encode(message, secret())), dtype=torch.uint8)
    try:
        dist.send(torch.tensor([len(payload)]), lane.peer, group=lane.group)
        dist.send(payload, lane.peer, group=lane.group)
    except RuntimeError as error:
        raise PeerLost(f"worker {lane.peer} is gone: {error}") from error


def _received(lane: PeerLane) -> Any:
    """Return the next message, or the error that it met."""
    size = torch.zeros(1, dtype=torch.int64)
    try:
        dist.recv(size, lane.peer, group=lane.group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, lane.peer, group=lane.group)
    except RuntimeError as error:
        return PeerLost(f"worker {lane.peer} is gone: {error}")
    try:
        return decode(payload.numpy().tobytes(), KNOWN, secret())
    except Forged as error:
        return error
