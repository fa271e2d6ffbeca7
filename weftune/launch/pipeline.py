"""The processes of a pipeline on this machine: start them, watch them, and start them again when one is lost.

Ranks are told who they are by the environment, in torchrun's words, so that it does not matter who started
them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import typer

from weftune.errors import UserError
from weftune.launch.processes import CRASHED, be_process, forks, how_ended, log_folder, signals_to, write_pids
from weftune.run.workers.groups import (
    LOOPBACK,
    Wires,
    WorkerPlace,
    connect,
    loopback_store,
    own_gpus,
    require_secret,
    store_here,
)
from weftune.run.workers.heartbeat import LOST, Heartbeat
from weftune.run.workers.mailbox import PeerLost
from weftune.run.workers.messages import Staff
from weftune.run.workers.network import bind_interface
from weftune.run.workers.topology import crossed_gpus
from weftune.run.workers.worker import serve

RESTARTS = 3
"""How often all ranks are started again after one was lost."""
FULL = 71
"""The exit code of a rank that ran out of memory, as it would again."""
FAILED = 1
GRACE = 15.0
"""Seconds that the other ranks have to end after the first."""


# -- one rank -------------------------------------------------------------------------------------------


@contextmanager
def joined(place: WorkerPlace, device: str | None) -> Iterator[Staff | None]:
    """Meet the other ranks. The first gets them as its staff; any other has obeyed when this is entered."""
    if place.rank > 0:
        # Only the first rank hears of an interruption; the others end when it says so.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    require_secret(place)
    bind_interface(place)
    heartbeat = Heartbeat(place, store_here(place))
    heartbeat.start()
    try:
        wires, found = _connected(place, device)
        if place.rank > 0:
            serve(wires, found)
            yield None
        else:
            yield from _leading(Staff(wires))
    except PeerLost as lost:
        print(f"weftune: {lost}", file=sys.stderr, flush=True)
        os._exit(LOST)
    except (UserError, typer.Exit):
        _part(heartbeat)
        raise
    _part(heartbeat)


def _part(heartbeat: Heartbeat) -> None:
    heartbeat.stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _leading(staff: Staff) -> Iterator[Staff]:
    """However the run ends, unless by a bug or by force, the others are sent home."""
    try:
        yield staff
    except (UserError, typer.Exit):
        staff.dismiss()
        raise
    staff.dismiss()


def _connected(place: WorkerPlace, device: str | None) -> tuple[Wires, torch.device]:
    from weftune.base.load import device_named

    found = device_named(device)
    if own_gpus(place, found):
        numbers = crossed_gpus(place.local_ranks) if place.ring else range(place.local_ranks)
        found = torch.device("cuda", numbers[place.local_rank])
        torch.cuda.set_device(found)
    return connect(place, found), found


# -- all ranks ------------------------------------------------------------------------------------------


Main = Callable[[], object]
"""What a rank runs, with its command line in `sys.argv`."""


def launch(main: Main, first: Sequence[str], again: Sequence[str], ranks: int, output: Path) -> int:
    """Run `weftune FIRST` in `ranks` processes, and `weftune AGAIN` after a loss. Rank 0's exit code."""
    for attempt in range(RESTARTS + 1):
        ended = _run_once(main, first if attempt == 0 else again, ranks, output)
        if isinstance(ended, int):
            return ended
        goes_on = ended.passes and attempt < RESTARTS
        again_text = f"starting all ranks again from the last checkpoints ({attempt + 1} of {RESTARTS})"
        what = again_text if goes_on else "giving up; go on with --resume"
        print(f"weftune: {ended.sentence}; {what}.", file=sys.stderr, flush=True)
        if not goes_on:
            break
    return LOST if isinstance(ended, Loss) and ended.passes else FAILED


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank ended as none should."""

    sentence: str
    passes: bool = True
    """Whether another try may fare better."""


def _run_once(main: Main, words: Sequence[str], ranks: int, output: Path) -> int | Loss:
    store = loopback_store()
    context = forks()
    logs = log_folder(output)
    processes = []
    for rank in range(ranks):
        variables = environment(rank, ranks, store.port)
        log = None if rank == 0 else logs / f"rank-{rank}.log" if logs else Path(os.devnull)
        process = context.Process(
            target=be_rank, args=(main, list(words), variables, log), name=f"rank {rank}"
        )
        process.start()
        processes.append(process)
    write_pids(logs, processes)
    # The first rank finishes its window and saves; the others obey it.
    with signals_to(lambda: processes[:1]):
        ended = _watch(processes)
    for process in processes:
        process.kill()
        process.join()
    return ended


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As torchrun would set it, with the store in the launcher."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _watch(processes: Sequence[Any]) -> int | Loss:
    """Wait for the first rank to end, or for any to be lost."""
    while True:
        # Looked at before any waiting: a rank may have ended before this is called.
        codes = [process.exitcode for process in processes]
        for rank, code in enumerate(codes):
            if code == FULL:
                advice = "lower data.max_length or the ranks of the adapters, or use more stages"
                return Loss(f"rank {rank} ran out of memory: {advice}", passes=False)
            if code is not None and (code < 0 or code in (LOST, CRASHED) or (rank > 0 and code != 0)):
                return Loss(f"rank {rank} {how_ended(code)}")
        if codes[0] is not None:
            for process in processes[1:]:
                process.join(GRACE)
            return int(codes[0])
        wait([process.sentinel for process, code in zip(processes, codes, strict=True) if code is None])


def be_rank(main: Main, words: list[str], variables: dict[str, str], log: Path | None) -> None:
    """In the new process: what `python -m weftune WORDS` does there."""
    os.environ.update(variables)
    sys.argv = ["weftune", *words]
    be_process(main, log, int(variables["LOCAL_WORLD_SIZE"]))
