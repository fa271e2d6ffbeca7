"""Real `weftune` processes at the price of a fork, from a server that has imported what training needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.run.processes import context


class Forks:
    """One process at a time."""

    def __init__(self) -> None:
        self._process: Any = None

    def start(self, *arguments: str | Path, cwd: Path, **limits: Any) -> None:
        """Run `weftune ARGUMENTS` in `cwd` and print to `cwd/log`.

        `memory`: add at most so many bytes of memory. `file_bytes`: let no file grow larger. `away`: print
        to this file, or into this command, in the place of the log, which keeps the errors. `installed`:
        import Weftune anew, with the packages of this folder beside it. `environment`: more variables.
        """
        words = [str(argument) for argument in arguments]
        self._process = context().Process(target=be_weftune, args=(words, str(cwd)), kwargs=limits)
        self._process.start()

    def signal(self, number: signal.Signals) -> None:
        if self.running():
            os.kill(self._process.pid, number)

    def running(self) -> bool:
        return self._process.exitcode is None

    def wait(self) -> int:
        """The exit code, or minus the signal that ended it."""
        self._process.join()
        return int(self._process.exitcode)

    def wait_for_lines(self, output: Path, count: int) -> None:
        """Wait until the run in `output` has written so many lines of metrics."""
        metrics = output / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
            assert self.running(), "the run has ended"
            time.sleep(0.005)

    def weftune(self, *arguments: str | Path, cwd: Path, **limits: Any) -> int:
        self.start(*arguments, cwd=cwd, **limits)
        return self.wait()


def be_weftune(
    arguments: list[str],
    cwd: str,
    memory: int | None = None,
    file_bytes: int | None = None,
    away: str | list[str] | None = None,
    installed: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """In the forked child: what `python -m weftune ARGUMENTS` does, never to return."""
    import torch

    os.chdir(cwd)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **(environment or {})}
    torch.set_num_threads(1)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if isinstance(away, str):
        os.dup2(os.open(away, os.O_WRONLY), 1)
    elif away is not None:
        reader = subprocess.Popen(away, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert reader.stdin is not None
        os.dup2(reader.stdin.fileno(), 1)
        reader.stdin.close()
    if {"--pipeline", "--gpus"} & set(arguments):
        fork_server()
    if file_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    sys.argv = ["weftune", *arguments]
    if installed is not None:
        sys.path.insert(0, str(installed))
        for name in [name for name in sys.modules if name.partition(".")[0] == "weftune"]:
            del sys.modules[name]
    if memory is not None:
        limit_memory(memory)
    from weftune.cli.main import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_server() -> None:
    """Make this process's own server, from which it will fork its workers, a fork, too."""
    from multiprocessing import forkserver, util

    def forked(_: object, words: list[str], kept: list[int]) -> int:
        child = os.fork()
        if child:
            return child
        try:
            # A test's process prints where pytest looks, and tells of its crashes there.
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            faulthandler.disable()
            # Its lock is held in here, and some forked processes start servers of their own.
            forkserver._forkserver.__init__()  # type: ignore[misc]
            drop_inherited_files(kept)
            exec(words[-1])
        finally:
            os._exit(0)

    before, util.spawnv_passfds = util.spawnv_passfds, forked  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload([])
    forkserver.ensure_running()
    util.spawnv_passfds = before  # type: ignore[attr-defined]


def drop_inherited_files(kept: Sequence[int] = ()) -> None:
    """Let go of all files and sockets of the process from which this one was forked."""
    # Their numbers stay taken: what was inherited with them may close them later.
    null = os.open(os.devnull, os.O_RDWR)
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle > 2 and handle not in (*kept, null):
            os.dup2(null, handle, inheritable=False)


class PipedFork:
    """A fork in the place of the interpreter that `weftune.core.limited.start_server` would start."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        requests, own_requests = os.pipe()
        own_answers, answers = os.pipe()
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            self._serve(module, environment, requests, answers)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(own_requests, "wb"), os.fdopen(own_answers, "rb")

    def _serve(self, module: str, environment: Mapping[str, str], requests: int, answers: int) -> None:
        try:
            faulthandler.disable()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for handle, name in enumerate(("stdin", "stdout", "stderr")):
                os.dup2((requests, answers, os.open(os.devnull, os.O_WRONLY))[handle], handle)
                setattr(sys, name, os.fdopen(handle, "w" if handle else "r", closefd=False))
            drop_inherited_files()
            os.environ |= environment
            import_module(module).serve()
        finally:
            os._exit(0)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def limit_memory(more: int) -> None:
    """No more address space than is taken now and `more` bytes."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
