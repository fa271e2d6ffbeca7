"""The process groups of a pipeline: between neighbours and between replicas of a stage, one for each
direction and purpose; between the first worker and every other, one for commands and one for reports.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from weftune.errors import UserError
from weftune.run.workers.mailbox import PeerLane
from weftune.run.workers.transport import Lanes

FOREVER = timedelta(days=30)
"""Timeout that never expires: a slow worker is not an error, and a lost one is found by the heartbeat."""


LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=5)
"""Time that a worker waits for the store, or for another worker to appear."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The position of this process in a pipeline."""

    worker: int
    workers: int
    local_worker: int = 0
    """Number of the worker among those of this machine."""
    local_workers: int = 1
    replicas: int = 1
    """Number of copies of the pipeline. The first replica's workers come first; within a replica workers are
    in the order of stages."""
    ring: bool = False
    """Whether there are more stages than workers, so that the last worker sends to the first."""

    @property
    def stages(self) -> int:
        return self.workers // self.replicas

    @property
    def stage(self) -> int:
        return self.worker % self.stages

    @property
    def replica(self) -> int:
        return self.worker // self.stages


def place_here() -> WorkerPlace | None:
    """Return the position that torchrun, or Weftune's launcher, has put in the environment, or None if this
    is the only process."""
    workers = _number("WORLD_SIZE", 1)
    if workers == 1 or "RANK" not in os.environ:
        return None
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"The environment says worker {os.environ['RANK']} of {workers}, but not {missing[0]}; start the "
            "workers with torchrun or --pipeline, or unset RANK and WORLD_SIZE to train in one process"
        )
    return WorkerPlace(_number("RANK", 0), workers, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise UserError(f"The environment variable {name} is {text!r}; torchrun sets it to a number")
    return int(text)


SECRET = "WEFTUNE_SECRET"
"""Environment variable with a secret that all machines of a run share."""


def secret() -> bytes:
    """Return the secret that signs commands and answers; empty if there is none."""
    return os.environ.get(SECRET, "").encode()


def require_secret(place: WorkerPlace) -> None:
    """Raise UserError for workers on several machines without a secret: any machine in the network could send
    messages. On one machine they use the loopback."""
    if place.local_workers < place.workers and not secret():
        raise UserError(
            f"The workers of this run are on several machines, and {SECRET} is not set; set it to the same "
            "long random text on all of them, so that they take orders from one another only"
        )


def attempt() -> int:
    """Return how often torchrun has restarted all workers; Weftune's launcher passes it on the command
    line."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True, slots=True)
class Wires:
    place: WorkerPlace
    lanes: Lanes
    commands: Mapping[int, Any]
    """Maps each worker to the group in which the first worker sends it commands."""
    reports: Mapping[int, Any]
    """Maps each worker to the group in which it answers the first worker."""


def connect(place: WorkerPlace, device: torch.device) -> Wires:
    """Connect to the other workers at the address in the environment, and create all groups."""
    # Not by `env://`: torchrun may keep its store over a restart, with addresses of workers that are gone.
    store = dist.PrefixStore(f"weftune/meet/{attempt()}", store_here(place))
    dist.init_process_group("gloo", store=store, rank=place.worker, world_size=place.workers, timeout=FOREVER)
    return lay_wires(place, device)


def store_here(place: WorkerPlace) -> dist.TCPStore:
    """Return a connection to the store at the address in the environment, the launcher's or the first
    worker's. Every thread that may wait on it needs a separate connection."""
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=place.worker == 0 and not launchers,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=PATIENCE,
    )


def loopback_store() -> dist.TCPStore:
    """Return a store for processes of this machine. It listens on the loopback address only, so that no other
    machine can read its keys or have a worker declared lost."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


Purpose = Literal["activation", "gradient", "sums", "decision", "share", "command", "report"]
SMALL: tuple[Purpose, ...] = ("sums", "decision")
"""Purposes whose messages stay in host memory."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A connection from one worker to another, for one purpose."""

    purpose: Purpose
    sender: int
    receiver: int


def _ways(place: WorkerPlace) -> Iterator[_Way]:
    """Yield all connections of a run, of all workers."""
    stages = place.stages
    if place.ring:
        yield _Way("activation", place.workers - 1, 0)
        yield _Way("gradient", 0, place.workers - 1)
    for first in range(0, place.workers, stages):
        for worker in range(first, first + stages - 1):
            yield _Way("activation", worker, worker + 1)
            yield _Way("gradient", worker + 1, worker)
            yield _Way("decision", worker, worker + 1)
            if first == 0:
                yield _Way("sums", worker + 1, worker)
        if first > 0:
            yield _Way("decision", 0, first)
    for sender in range(place.workers):
        for receiver in range(sender % stages, place.workers, stages):
            if receiver != sender:
                yield _Way("share", sender, receiver)


def lay_wires(place: WorkerPlace, device: torch.device) -> Wires:
    """Create all groups. Every worker creates every group in the same order, as torch requires."""
    library = "nccl" if own_gpus(place, device) else "gloo"
    laid = {way: _group(way, "gloo" if way.purpose in SMALL else library) for way in _ways(place)}
    for way, group in laid.items():
        _greet(way, group, place, device if library == "nccl" else torch.device("cpu"))
    others = range(1, place.workers)
    commands = {worker: _group(_Way("command", 0, worker), "gloo") for worker in others}
    reports = {worker: _group(_Way("report", worker, 0), "gloo") for worker in others}

    def coming(purpose: Purpose) -> tuple[PeerLane, ...]:
        mine = [way for way in laid if way.purpose == purpose and way.receiver == place.worker]
        return tuple(PeerLane(laid[way], way.sender) for way in mine)

    def going(purpose: Purpose) -> tuple[PeerLane, ...]:
        mine = [way for way in laid if way.purpose == purpose and way.sender == place.worker]
        return tuple(PeerLane(laid[way], way.receiver) for way in mine)

    lanes = Lanes(
        activation_in=_only(coming("activation")),
        activation_out=_only(going("activation")),
        gradient_in=_only(coming("gradient")),
        gradient_out=_only(going("gradient")),
        sums_in=_only(coming("sums")),
        sums_out=_only(going("sums")),
        decision_in=_only(coming("decision")),
        decisions_out=going("decision"),
        shares_in=coming("share"),
        shares_out=going("share"),
    )
    return Wires(place, lanes, commands, reports)


def _only(lanes: tuple[PeerLane, ...]) -> PeerLane | None:
    assert len(lanes) <= 1, "a worker has one neighbour on each side"
    return lanes[0] if lanes else None


def own_gpus(place: WorkerPlace, device: torch.device) -> bool:
    """Return whether every worker of this machine has a separate GPU, as NCCL requires."""
    return device.type == "cuda" and torch.cuda.device_count() >= place.local_workers


def _greet(way: _Way, group: Any, place: WorkerPlace, device: torch.device) -> None:
    """Send a first message on a connection. NCCL connects two workers at their first message, and the first
    of them waits for the other. With receives posted ahead, neighbours would wait for each other forever."""
    if way.purpose in SMALL:
        return
    greeting = torch.zeros(1, device=device)
    if place.worker == way.sender:
        dist.send(greeting, way.receiver, group=group)
    if place.worker == way.receiver:
        dist.recv(greeting, way.sender, group=group)


def _group(way: _Way, backend: str) -> Any:
    return dist.new_group(sorted((way.sender, way.receiver)), backend=backend, timeout=FOREVER)
