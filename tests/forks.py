"""Real `weftune` processes at the price of a fork: a server imports all that training needs, once, and forks.

`Forks` is the test's side. The server itself signals and reaps, so that a signal never meets a process number
that has been given to somebody else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Forks:
    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        # Torch's allocator on ARM takes a GiB of addresses ahead, which no limit of `memory` would count.
        environment["MIMALLOC_ARENA_RESERVE"] = "0"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )
        assert self._ask(verb="ready") is True

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._server.stdout.close()

    def start(self, *arguments: str | Path, cwd: Path, **limits: Any) -> None:
        """Run `weftune ARGUMENTS` in `cwd` and print to `cwd/log`.

        `memory`: add at most so many bytes of memory. `file_bytes`: let no file grow larger. `away`: print
        to this file, or into this command, in the place of the log, which keeps the errors.
        """
        self._ask(verb="start", arguments=[str(a) for a in arguments], cwd=str(cwd), limits=limits)

    def signal(self, number: signal.Signals) -> None:
        self._ask(verb="signal", number=int(number))

    def running(self) -> bool:
        return bool(self._ask(verb="running"))

    def wait(self) -> int:
        """The exit code, or minus the signal that ended it."""
        return int(self._ask(verb="wait"))

    def weftune(self, *arguments: str | Path, cwd: Path, **limits: Any) -> int:
        self.start(*arguments, cwd=cwd, **limits)
        return self.wait()

    def _ask(self, **question: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())


def serve() -> None:
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import plotly.graph_objects  # noqa: F401
    import torch  # noqa: F401
    from transformers import OPTForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    import weftune.trainer.trainer  # noqa: F401

    child, code = 0, 0
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = True
        match question["verb"]:
            case "start":
                child = os.fork()
                if child == 0:
                    be_weftune(question["arguments"], question["cwd"], **question["limits"])
            case "signal" if child:
                os.kill(child, question["number"])
            case "running" if child:
                ended, status = os.waitpid(child, os.WNOHANG)
                answer = ended == 0
                if ended:
                    child, code = 0, os.waitstatus_to_exitcode(status)
            case "running":
                answer = False
            case "wait":
                if child:
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    child = 0
                answer = code
        print(json.dumps(answer), flush=True)


def be_weftune(
    arguments: list[str],
    cwd: str,
    memory: int | None = None,
    file_bytes: int | None = None,
    away: str | list[str] | None = None,
) -> None:
    """In the forked child: what `python -m weftune ARGUMENTS` does, never to return."""
    os.chdir(cwd)
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
    if file_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    sys.argv = ["weftune", *arguments]
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


def limit_memory(more: int) -> None:
    """No more address space than is taken now and `more` bytes."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    serve()
