"""The processes of a pipeline on this machine: start them, watch them, and start them again when one is lost.

Ranks are told who they are by the environment, in torchrun's words, so that it does not matter who started
them. They are forked from a server that has imported what training needs: a restart costs no imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import typer

from weft.errors import UserError
from weft.jobs.files import replace_file
from weft.jobs.store import RANKS
from weft.run.boxes import PeerLost
from weft.run.commands import Staff
from weft.run.heartbeat import LOST, Heartbeat
from weft.run.network import bind_interface
from weft.run.stage_executor import RankFull
from weft.run.wires import Place, Wires, connect, own_gpus, store_here
from weft.run.worker import serve

RESTARTS = 3
"""How often all ranks are started again after one was lost."""
CRASHED = 70
"""The exit code of a rank that met a bug of ours."""
FULL = 71
"""The exit code of a rank that ran out of memory, as it would again."""
FAILED = 1
GRACE = 15.0
"""Seconds that the other ranks have to end after the first."""
PIDS = "pids"
"""The file beside the logs that says which process is which rank."""
PRELOADED = ["weft.launch", "weft.trainer", "weft.cli.main", "peft", "datasets", "plotly.graph_objects"]


# -- one rank -------------------------------------------------------------------------------------------


@contextmanager
def joined(place: Place, device: str | None) -> Iterator[Staff | None]:
    """Meet the other ranks. The first gets them as its staff; any other has obeyed when this is entered."""
    if place.rank > 0:
        # Only the first rank hears of an interruption; the others end when it says so.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
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
        print(f"weft: {lost}", file=sys.stderr, flush=True)
        os._exit(LOST)
    except RankFull as full:
        print(f"weft: {full}", file=sys.stderr, flush=True)
        os._exit(FULL)
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


def _connected(place: Place, device: str | None) -> tuple[Wires, torch.device]:
    from weft.base.load import device_named

    found = device_named(device)
    if own_gpus(place, found):
        found = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(found)
    return connect(place, found), found


# -- all ranks ------------------------------------------------------------------------------------------


Main = Callable[[], None]
"""What a rank runs, with its command line in `sys.argv`."""


def launch(main: Main, first: Sequence[str], again: Sequence[str], ranks: int, output: Path) -> int:
    """Run `weft FIRST` in `ranks` processes, and `weft AGAIN` after a loss. The first rank's exit code."""
    for attempt in range(RESTARTS + 1):
        ended = _run_once(main, first if attempt == 0 else again, ranks, output)
        if isinstance(ended, int):
            return ended
        goes_on = ended.passes and attempt < RESTARTS
        again_text = f"starting all ranks again from the last checkpoints ({attempt + 1} of {RESTARTS})"
        what = again_text if goes_on else "giving up; go on with --resume"
        print(f"weft: {ended.sentence}; {what}.", file=sys.stderr, flush=True)
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
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    logs = _log_folder(output)
    processes = []
    for rank in range(ranks):
        variables = environment(rank, ranks, store.port)
        log = None if rank == 0 else logs / f"rank-{rank}.log" if logs else Path(os.devnull)
        process = context.Process(
            target=be_rank, args=(main, list(words), variables, log), name=f"rank {rank}"
        )
        process.start()
        processes.append(process)
    if logs:
        pids = "".join(f"{rank} {one.pid}\n" for rank, one in enumerate(processes))
        replace_file(logs / PIDS, pids.encode())
    with _signals_to(processes[0]):
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
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _log_folder(output: Path) -> Path | None:
    """None where nothing can be written; the first rank will say so better."""
    try:
        (output / RANKS).mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return (output / RANKS).absolute()


def _watch(processes: Sequence[Any]) -> int | Loss:
    """Wait for the first rank to end, or for any to be lost."""
    first = processes[0]
    while True:
        wait([process.sentinel for process in processes if process.exitcode is None])
        for rank, process in enumerate(processes):
            code = process.exitcode
            if code == FULL:
                advice = "lower data.max_length or the ranks of the adapters, or use more stages"
                return Loss(f"rank {rank} ran out of memory: {advice}", passes=False)
            if code is not None and (code < 0 or code in (LOST, CRASHED) or (rank > 0 and code != 0)):
                return Loss(f"rank {rank} {_how(code)}")
        if first.exitcode is not None:
            for process in processes[1:]:
                process.join(GRACE)
            return int(first.exitcode)


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "lost another rank" if code == LOST else f"ended with code {code}"


@contextmanager
def _signals_to(process: Any) -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM on to the first rank, which finishes its window and saves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hand_on(number: int, _: FrameType | None) -> None:
        if process.exitcode is None:
            os.kill(process.pid, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def be_rank(main: Main, words: list[str], variables: dict[str, str], log: Path | None) -> None:
    """In the new process: what `python -m weft WORDS` does there."""
    # Out of the terminal's foreground: Ctrl-C reaches the launcher alone, which hands it on.
    os.setpgrp()
    os.environ.update(variables)
    if log is not None:
        _write_to(log)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(variables["LOCAL_WORLD_SIZE"])))
    sys.argv = ["weft", *words]
    code = _exit_code(main)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the transport may still hold a connection to a rank that has gone.
    os._exit(code)


def _exit_code(main: Main) -> int:
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return CRASHED
    return 0


def _write_to(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
