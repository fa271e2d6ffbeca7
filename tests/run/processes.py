"""Real processes for a pipeline's workers, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from typing import Any

from weftune.launch.supervise import PRELOADED
from weftune.run.workers.groups import NCCL_RULES

MODULES = [
    *PRELOADED,
    "pytest",
    "tests.bench",
    "tests.run.executors",
    "tests.launch.mains",
    "transformers.models.opt.modeling_opt",
]


def context() -> Any:
    """The server is started here: whoever asks for one later, with fewer modules, takes it as it is."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(MODULES)
    ensure_running()
    return made


def run_workers(
    workers: int,
    target: Callable[..., Any],
    *arguments: Any,
    replicas: int = 1,
    ring: bool = False,
    shards: int = 1,
    rules: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """What `target(connections, *arguments)` returns on every worker; `workers` are those of all replicas.

    They exchange tensors by NCCL's rules, or without `rules` as runs on a CPU do.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = context()
    started = []
    for worker in range(workers):
        mine, theirs = made.Pipe(duplex=False)
        environment = {
            "RANK": str(worker),
            "WORLD_SIZE": str(workers),
            "LOCAL_RANK": str(worker),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "WEFTUNE_CACHE": os.environ.get("WEFTUNE_CACHE", ""),
            NCCL_RULES: str(int(rules)),
        }
        process = made.Process(
            target=_be_worker, args=(environment, theirs, replicas, ring, shards, device, target, arguments)
        )
        process.start()
        theirs.close()
        started.append((process, mine))
    answers = [_answer(connection) for _, connection in started]
    for process, _ in started:
        process.join(30)
        assert process.exitcode == 0
    broken = [str(answer) for answer in answers if isinstance(answer, Broken)]
    assert not broken, "\n".join(broken)
    return answers


class Broken(str):
    """The traceback of a worker that failed."""

    __slots__ = ()


def _answer(connection: Connection) -> Any:
    """By value: a tensor sent as shared memory would ask for its process, which may be gone."""
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return Broken("a worker died without a word")


def _be_worker(
    environment: dict[str, str],
    connection: Connection,
    replicas: int,
    ring: bool,
    shards: int,
    device: str,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from weftune.run.workers.groups import connect, read_position

    torch.set_num_threads(1)
    try:
        place = read_position()
        assert place is not None
        connections = connect(
            replace(place, replicas=replicas, is_ring=ring, shards=shards), torch.device(device)
        )
        connection.send_bytes(pickle.dumps(target(connections, *arguments)))
        dist.barrier()
    except BaseException:
        connection.send_bytes(pickle.dumps(Broken(traceback.format_exc())))
    dist.destroy_process_group()
