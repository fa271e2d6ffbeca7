"""The worker processes that hold a base model together. Each worker has one or several stages (consecutive
layers). Workers read their position from the environment variables that torchrun sets, so torchrun can start
them too."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import typer
from torch.distributed import TCPStore

from weftune.base.load import select_device
from weftune.core.clock import COMMAND_STARTED, current_clock
from weftune.errors import UserError
from weftune.launch.supervise import ProcessSpec, Supervisor, Team
from weftune.run.shards import ShardShortage
from weftune.run.workers.groups import (
    LOOPBACK,
    RESTART_COUNT,
    WorkerPosition,
    bind_interface,
    connect,
    connect_to_store,
    has_separate_gpus,
    loopback_store,
    require_secret,
)
from weftune.run.workers.heartbeat import LOST, Heartbeat
from weftune.run.workers.mailbox import PeerLost
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.topology import assign_gpus
from weftune.run.workers.worker import serve

# -- one worker -----------------------------------------------------------------------------------------


@contextmanager
def connect_workers(
    worker: WorkerPosition, device: str | None, first_gpu: int = 0
) -> Iterator[WorkerControl | None]:
    """Connect this worker process to the other workers that hold parts of the same base model. Yield a
    `WorkerControl`, which sends commands to them, in the first worker. Other workers execute its commands
    until it ends them, and then yield None. If every worker has a separate GPU, their GPUs begin with number
    `first_gpu`."""
    if worker.worker > 0:
        # Only the first worker handles an interruption; the others end when it tells them to.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    require_secret(worker)
    bind_interface(worker)
    heartbeat = Heartbeat(worker, connect_to_store(worker))
    heartbeat.start()
    try:
        found = select_device(device)
        if has_separate_gpus(worker, found):
            numbers = assign_gpus(worker.local_workers) if worker.is_ring else range(worker.local_workers)
            found = torch.device("cuda", first_gpu + numbers[worker.local_worker])
            torch.cuda.set_device(found)
        connections = connect(worker, found)
        if worker.worker > 0:
            serve(connections, found)
            yield None
        else:
            control = WorkerControl(connections)
            try:
                yield control
            except (UserError, typer.Exit):
                control.end_workers()
                raise
            # Not after a bug or by force: then the other workers are lost.
            control.end_workers()
    except (PeerLost, ShardShortage) as lost:
        print(f"weftune: {lost}", file=sys.stderr, flush=True)
        os._exit(LOST)
    except (UserError, typer.Exit):
        _disconnect(heartbeat)
        raise
    _disconnect(heartbeat)


def _disconnect(heartbeat: Heartbeat) -> None:
    heartbeat.stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- all workers ----------------------------------------------------------------------------------------


Main = Callable[[], object]
"""Function that a worker process runs. The function reads its command line from `sys.argv`."""
WorkerMain = Callable[[int, Mapping[str, str], Connection], object]
"""A function that a worker process runs. Its arguments are the number of earlier starts of its team,
environment variables with which `connect_workers` finds the other workers of the team, and a connection to
the launcher."""


def launch(
    main: Main, first_arguments: Sequence[str], restart_arguments: Sequence[str], workers: int, output: Path
) -> int:
    """Run `weftune` with `first_arguments` in `workers` processes. If a process is lost, start all of them
    again with `restart_arguments`. Return the exit code of the first process."""
    run = partial(run_worker, main, (list(first_arguments), list(restart_arguments)))
    names = [f"worker {number}" for number in range(workers)]
    team = connected_team(run, names, "all workers", prints_to_terminal=True)
    say = partial(print, "weftune:", file=sys.stderr, flush=True)
    (ended,) = Supervisor([team], output, say, resume=shlex.join(["weftune", *restart_arguments])).run()
    return ended.code


def connected_team(
    main: WorkerMain, names: Sequence[str], name: str, prints_to_terminal: bool = False
) -> Team:
    """Return a team of workers (processes that are restarted together) that connect to one another, one
    worker for each name in `names`. `name` is the name of the team. With `prints_to_terminal`, the first
    worker prints to the launcher's output instead of a log file."""
    clock = current_clock()
    command_started = time.time() if clock is None else clock.started
    stores: list[TCPStore] = []

    def members(attempt: int) -> list[ProcessSpec]:
        # A new store, in which no worker that is gone has left anything.
        stores[:] = [loopback_store()]
        environments = [
            worker_environment(worker, len(names), stores[0].port, command_started, attempt)
            for worker in range(len(names))
        ]
        return [
            ProcessSpec(
                process, partial(main, attempt, environments[worker]), prints_to_terminal and worker == 0
            )
            for worker, process in enumerate(names)
        ]

    return Team(members=members, name=name)


def worker_environment(
    worker: int, workers: int, port: int, start_time: float, attempt: int = 0
) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a worker. The launcher hosts the TCPStore
    on `port`. `start_time` is when the command started, in seconds since 1970, and `attempt` is the number of
    restarts so far."""
    return {
        COMMAND_STARTED: str(start_time),
        "RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(worker),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RESTART_COUNT: str(attempt),
    }


def run_worker(
    main: Main,
    command_lines: tuple[list[str], list[str]],
    attempt: int,
    variables: Mapping[str, str],
    _: Connection,
) -> None:
    """Run `main` in the new process with the first of the two command lines, or with the second one if the
    workers are started again. `attempt` is the number of restarts so far."""
    os.environ.update(variables)
    sys.argv = ["weftune", *command_lines[min(attempt, 1)]]
    main()
