"""The worker processes that hold a base together, each with one resident or several streamed stages.

Workers read their rank from the environment variables of torchrun, so that torchrun can start them too.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
def connect_workers(worker: WorkerPosition, device: str | None) -> Iterator[WorkerControl | None]:
    """Connect to the other workers. On the first worker, yield the `WorkerControl` that commands the
    others. Any other worker executes its commands until the end, and then yields None."""
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
            numbers = assign_gpus(worker.local_workers) if worker.ring else range(worker.local_workers)
            found = torch.device("cuda", numbers[worker.local_worker])
            torch.cuda.set_device(found)
        connections = connect(worker, found)
        if worker.worker > 0:
            serve(connections, found)
            yield None
        else:
            staff = WorkerControl(connections)
            try:
                yield staff
            except (UserError, typer.Exit):
                staff.end_workers()
                raise
            # Not after a bug or by force: then the other workers are lost.
            staff.end_workers()
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
"""A function that a worker runs, with its command line in `sys.argv`."""


def launch(
    main: Main, first_arguments: Sequence[str], restart_arguments: Sequence[str], workers: int, output: Path
) -> int:
    """Run `weftune FIRST` in `workers` processes, and `weftune AGAIN` after a process was lost. Return the
    exit code of the first process."""

    def members(attempt: int) -> list[ProcessSpec]:
        stores[:] = [loopback_store()]
        words, port = list(restart_arguments if attempt else first_arguments), stores[0].port
        told = [
            worker_environment(worker, workers, port, command_started, attempt) for worker in range(workers)
        ]
        started = [partial(run_worker, main, words, one) for one in told]
        return [
            ProcessSpec(f"worker {number}", one, prints_output=number == 0)
            for number, one in enumerate(started)
        ]

    stores: list[TCPStore] = []
    clock = current_clock()
    command_started = time.time() if clock is None else clock.started
    say = partial(print, "weftune:", file=sys.stderr, flush=True)
    team, resume = Team(members=members, name="all workers"), shlex.join(["weftune", *restart_arguments])
    (ended,) = Supervisor([team], output, say, resume=resume).run()
    return ended.code


def worker_environment(
    worker: int, workers: int, port: int, started: float, attempt: int = 0
) -> dict[str, str]:
    """Return the environment variables that torchrun would set; the launcher hosts the store. `started` is
    the start of the command in seconds since 1970, and `attempt` the number of restarts of all workers."""
    return {
        COMMAND_STARTED: str(started),
        "RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(worker),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RESTART_COUNT: str(attempt),
    }


def run_worker(main: Main, arguments: list[str], variables: dict[str, str], _: Connection) -> None:
    """Run the command `weftune WORDS` in the new process, with these environment variables."""
    os.environ.update(variables)
    sys.argv = ["weftune", *arguments]
    main()
