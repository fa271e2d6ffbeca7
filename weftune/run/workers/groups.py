"""The process groups of a pipeline. There is a group for each direction and purpose between neighbouring
stages and between replicas of a stage. Between the first worker and every other worker there is a group for
commands and a group for reports."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from weftune.errors import UserError
from weftune.run.workers import ordered
from weftune.run.workers.mailbox import PeerLane
from weftune.run.workers.ordered import WaitWatch

NO_TIMEOUT = timedelta(days=30)
"""A timeout that never expires in practice. A slow worker is no error, and a lost worker is found by the
heartbeat."""


LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(minutes=5)
"""Time that a worker waits for the store (torch's key-value server of the run), or for another worker to
connect."""


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """The position of this process among the workers of a pipeline."""

    worker: int
    workers: int
    local_worker: int = 0
    """Index of the worker among the workers of its machine."""
    local_workers: int = 1
    replicas: int = 1
    """Number of copies of the pipeline (replicas). Workers are ordered by replica, then by stage."""
    is_ring: bool = False
    """Whether there are more stages than workers, so that the last worker also sends hidden states to the
    first worker."""
    shards: int = 1
    """Number of workers (shards) among which each layer is divided. The shards of a stage have consecutive
    worker numbers."""

    @property
    def stages(self) -> int:
        return self.workers // (self.replicas * self.shards)

    @property
    def shard(self) -> int:
        return self.worker % self.shards

    @property
    def stage(self) -> int:
        return self.worker // self.shards % self.stages

    @property
    def replica(self) -> int:
        return self.worker // (self.stages * self.shards)

    @property
    def list_index(self) -> int:
        """Index of the worker's list of actions in a Program. The workers that divide the same layers among
        them (shards) run the same list."""
        return self.worker // self.shards

    @property
    def writes_checkpoints(self) -> bool:
        """Whether the worker writes checkpoints. Of all replicas and shards that hold the same weights, only
        the first writes them."""
        return self.replica == 0 and self.shard == 0


def read_position() -> WorkerPosition | None:
    """Return the position among the workers that the environment variables describe, or None if this is the
    only process."""
    workers = _environment_integer("WORLD_SIZE", 1)
    if workers == 1 or "RANK" not in os.environ:
        return None
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"The environment says worker {os.environ['RANK']} of {workers}, but not {missing[0]}; start the "
            "workers with torchrun or --pipeline, or unset RANK and WORLD_SIZE to train in one process"
        )
    return WorkerPosition(
        _environment_integer("RANK", 0),
        workers,
        _environment_integer("LOCAL_RANK", 0),
        _environment_integer("LOCAL_WORLD_SIZE", 1),
    )


def _environment_integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"The environment variable {name} is {text!r}; torchrun sets it to a number")
    return int(text)


SECRET = "WEFTUNE_SECRET"
"""Environment variable with the secret that all machines of a run share."""


def read_secret() -> bytes:
    """Return the secret that signs messages between the first worker and the others, or empty bytes if there
    is none."""
    return os.environ.get(SECRET, "").encode()


def require_secret(position: WorkerPosition) -> None:
    """Raise UserError if workers are on several machines and there is no secret, since any machine in the
    network could then send messages. On one machine the workers use the loopback address, so no secret is
    needed."""
    if position.local_workers < position.workers and not read_secret():
        raise UserError(
            f"The workers of this run are on several machines, and {SECRET} is not set; set it to the same "
            "long random text on all of them, so that workers accept messages of this run only"
        )


RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable that counts how often torchrun, or Weftune's launcher, has restarted all workers."""


def restart_count() -> int:
    return int(os.environ.get(RESTART_COUNT, "0"))


def connect(position: WorkerPosition, device: torch.device) -> WorkerConnections:
    """Connect to the other workers at the address in the environment variables, create all process groups,
    and return the connections."""
    # Not by `env://`: torchrun may keep its store over a restart, with addresses of workers that are gone.
    store = dist.PrefixStore(f"weftune/meet/{restart_count()}", connect_to_store(position))
    dist.init_process_group(
        "gloo", store=store, rank=position.worker, world_size=position.workers, timeout=NO_TIMEOUT
    )
    return create_groups(position, device)


def connect_to_store(position: WorkerPosition) -> dist.TCPStore:
    """Return a connection to the store, the key-value server of the launcher or of the first worker, at the
    address in the environment variables. Every thread that may wait on the store needs a separate
    connection."""
    launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=position.worker == 0 and not launchers,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=CONNECT_TIMEOUT,
    )


def loopback_store() -> dist.TCPStore:
    """Return a new store (torch's key-value server) for processes of this machine. It listens on the loopback
    address only, so that no other machine can read its keys or report a worker as lost."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


Purpose = Literal["activation", "gradient", "sums", "decision", "share", "scores", "command", "report"]
HOST_PURPOSES: tuple[Purpose, ...] = ("sums", "decision", "scores", "command", "report")
"""Purposes of connections whose messages are in host memory, even if the workers use GPUs."""


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """A connection from one worker to another, for messages of one purpose."""

    purpose: Purpose
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class WorkerConnections:
    """All connections between the workers of a run, with the process groups that this worker has created for
    them."""

    position: WorkerPosition
    groups: Mapping[WorkerLink, Any]
    """Maps each connection between two workers to its process group."""
    shard_group: Any = None
    """Process group of the workers (shards) among which this worker's layers are divided. None if layers are
    not divided."""
    announcement_groups: Mapping[WorkerLink, Any] = field(default_factory=dict)
    """Maps each connection whose transfers occupy a device, as NCCL's do, to a second process group, over
    which each tensor is announced before it is sent."""
    watch: WaitWatch | None = None

    def incoming_lanes(self, purpose: Purpose) -> tuple[PeerLane, ...]:
        """Return the connections to this worker for this purpose, in the order of their senders."""
        mine = self.position.worker
        links = [one for one in self.groups if one.purpose == purpose and one.receiver == mine]
        return tuple(self._lane_to_peer(one, one.sender) for one in links)

    def outgoing_lanes(self, purpose: Purpose) -> tuple[PeerLane, ...]:
        mine = self.position.worker
        links = [one for one in self.groups if one.purpose == purpose and one.sender == mine]
        return tuple(self._lane_to_peer(one, one.receiver) for one in links)

    def _lane_to_peer(self, link: WorkerLink, peer: int) -> PeerLane:
        return PeerLane(self.groups[link], peer, self.announcement_groups.get(link), self.watch)


def _all_links(position: WorkerPosition) -> Iterator[WorkerLink]:
    """Yield the connections between all workers of a run. A shard (a worker's part of every layer) exchanges
    tensors with the shard of the same index in other stages and replicas."""
    for link in _links_between_workers(position):
        for shard in range(position.shards):
            sender, receiver = (one * position.shards + shard for one in (link.sender, link.receiver))
            yield WorkerLink(link.purpose, sender, receiver)
    for worker in range(1, position.workers):
        yield WorkerLink("command", 0, worker)
        yield WorkerLink("report", worker, 0)


def _links_between_workers(position: WorkerPosition) -> Iterator[WorkerLink]:
    """Yield the connections for tensors and decisions. Sender and receiver are indices of lists of actions in
    a Program, so all shards of the same layers have the same index."""
    stages, lists = position.stages, position.workers // position.shards
    if position.is_ring:
        yield WorkerLink("activation", lists - 1, 0)
        yield WorkerLink("gradient", 0, lists - 1)
    for first in range(0, lists, stages):
        for index in range(first, first + stages - 1):
            yield WorkerLink("activation", index, index + 1)
            yield WorkerLink("gradient", index + 1, index)
            yield WorkerLink("decision", index, index + 1)
            if first == 0:
                # Sums of a batch over the stages after.
                yield WorkerLink("sums", index + 1, index)
        if first > 0:
            yield WorkerLink("decision", 0, first)
    for sender in range(lists):
        for receiver in range(sender % stages, lists, stages):
            if receiver != sender:
                yield WorkerLink("share", sender, receiver)
                if sender % stages == stages - 1:
                    yield WorkerLink("scores", sender, receiver)


Library = Literal["nccl", "gloo", "ordered"]
"""Library that transfers tensors between workers. `ordered` is gloo with the rules of NCCL
(`workers/ordered.py`)."""
NCCL_RULES = "WEFTUNE_NCCL_RULES"
"""Environment variable that tests set to 1 so that workers on a CPU exchange tensors by the rules of NCCL."""


def has_separate_gpus(position: WorkerPosition, device: torch.device) -> bool:
    """Return whether every worker of this machine has a separate GPU, as NCCL requires."""
    return device.type == "cuda" and torch.cuda.device_count() >= position.local_workers


def choose_library(position: WorkerPosition, device: torch.device) -> Library:
    """Return the library for hidden states, gradients and sums over shards: NCCL if every worker of this
    machine has a separate GPU, and gloo otherwise."""
    if has_separate_gpus(position, device):
        return "nccl"
    follows_rules = device.type == "cpu" and os.environ.get(NCCL_RULES) == "1"
    return "ordered" if follows_rules else "gloo"


def agree_on_library(position: WorkerPosition, device: torch.device) -> Library:
    """Return the library that all workers use for tensors. It is gloo if workers would choose different
    libraries, because machines differ in their GPUs."""
    chosen = choose_library(position, device)
    agreeing = torch.tensor([int(chosen == "nccl")])
    dist.all_reduce(agreeing)
    if 0 < int(agreeing) < position.workers:
        return "gloo"
    return chosen


def create_groups(position: WorkerPosition, device: torch.device) -> WorkerConnections:
    """Create all process groups and return the connections. Every worker creates every group in the same
    order, as torch requires."""
    library = agree_on_library(position, device)
    if library == "ordered":
        ordered.register()
    links = list(_all_links(position))
    groups = {link: _pair_group(link, "gloo" if link.purpose in HOST_PURPOSES else library) for link in links}
    announcement_groups = {
        link: _pair_group(link, "gloo")
        for link in links
        if library != "gloo" and link.purpose not in HOST_PURPOSES
    }
    # NCCL connects two workers at their first message, and the first of them waits for the other. With
    # receives posted ahead, neighbours would wait for each other forever.
    first_tensor = torch.zeros(1, device=device if library == "nccl" else "cpu")
    for link, group in groups.items():
        if link.purpose not in HOST_PURPOSES and position.worker == link.sender:
            dist.send(first_tensor, link.receiver, group=group)
        if link.purpose not in HOST_PURPOSES and position.worker == link.receiver:
            dist.recv(first_tensor, link.sender, group=group)
    watch = ordered.make_watch(position.worker) if library == "ordered" else None
    shard_group = _shard_group(position, library, first_tensor)
    return WorkerConnections(position, groups, shard_group, announcement_groups, watch)


def _pair_group(link: WorkerLink, library: Library) -> Any:
    return dist.new_group(sorted((link.sender, link.receiver)), backend=library, timeout=NO_TIMEOUT)


def _shard_group(position: WorkerPosition, library: Library, first_tensor: torch.Tensor) -> Any:
    """Create a process group for the shards (workers that divide the layers of a stage among them) of each
    stage. Return the group of this worker, or None if layers are not divided."""
    if position.shards == 1:
        return None
    found = None
    for first in range(0, position.workers, position.shards):
        members = list(range(first, first + position.shards))
        group = dist.new_group(members, backend=library, timeout=NO_TIMEOUT)
        if position.worker in members:
            found = group
            dist.all_reduce(first_tensor, group=group)
    return found


# -- the network interface that reaches the other workers, for the libraries that must bind one -------------

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network interface of gloo and of NCCL. A value set by the user is kept.
By default both libraries use the interface of the machine's own name. That is often the loopback, although
other workers are on other machines, or a public interface, although all workers are on this machine."""


def bind_interface(position: WorkerPosition) -> None:
    """Set the environment variables of gloo and NCCL to the network interface that reaches the other workers.
    If all workers are on this machine, gloo listens on the loopback only; NCCL then needs no network."""
    alone = position.local_workers == position.workers
    local = (name for name, addresses in _interface_addresses().items() if any(map(_is_loopback, addresses)))
    found = next(local, None) if alone else find_interface(os.environ["MASTER_ADDR"])
    if found is not None:
        for name in INTERFACE_VARIABLES[:1] if alone else INTERFACE_VARIABLES:
            os.environ.setdefault(name, found)


def find_interface(host: str) -> str | None:
    """Return the network interface by which `host` is reached. If `host` is an address of this machine,
    return the interface with that address.

    Return None if the interface is not known: `host` is unknown, or it is the loopback and there are several
    other interfaces.
    """
    own = _find_own_address(host)
    addresses_by_name = _interface_addresses()
    outward = [name for name, addresses in addresses_by_name.items() if not all(map(_is_loopback, addresses))]
    if own is None or _is_loopback(own):
        # The machine's own name is its loopback address; others may know it by another address.
        return outward[0] if len(outward) == 1 else None
    return next((name for name in outward if own in addresses_by_name[name]), None)


def _interface_addresses() -> dict[str, set[str]]:
    """Return a dict from each network interface of this machine to its addresses."""
    return {
        name: {address.address for address in addresses if address.family is socket.AF_INET}
        for name, addresses in psutil.net_if_addrs().items()
    }


def _find_own_address(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: connecting a datagram socket only determines its own address.
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
