"""Pipelines and runs in shares, started as the command line starts them, inside the test's own process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import typer

from tests.outputs import jobs_folder
from tests.run.models import deep
from tests.run.processes import context
from weftune.cli.main import main
from weftune.cli.train import train
from weftune.launch.workers import launch


def deep_folder(folder: Path, jobs: list[dict[str, Any]], family: str = "opt", **defaults: Any) -> Path:
    """As `jobs_folder`, with a model of four layers."""
    jobs_folder(folder, jobs, **defaults)
    deep(family, torch.float64).save_pretrained(folder / "model")
    return folder


def copied(folder: Path, place: Path) -> Path:
    """`place`, with all that is in the folder."""
    return shutil.copytree(folder, place, dirs_exist_ok=True)


def words(folder: Path, output: str, *more: str) -> list[str]:
    return ["train", str(folder / "jobs.yaml"), "--output", str(folder / output), *more]


class Started:
    """A run of several processes whose launcher is a thread here, so that the test can meddle."""

    def __init__(self, output: Path, run: Callable[[], int]) -> None:
        context()
        self.output = output
        self.code: int | None = None
        os.environ["COLUMNS"] = "200"
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], int]) -> None:
        self.code = run()

    def wait(self) -> int:
        self._thread.join()
        assert self.code is not None
        return self.code

    def lines(self) -> int:
        """Of metrics, so far."""
        return _count_lines(self.output / "metrics.jsonl")

    def wait_for_lines(self, count: int) -> None:
        self.wait_until(lambda: self.lines() >= count)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert self.code is None, f"the run has ended with {self.code}"
            assert time.monotonic() < deadline, "the run does not get there"
            time.sleep(0.005)

    def pids(self) -> list[int]:
        lines = (self.output / "ranks" / "pids").read_text().splitlines()
        return [int(line.split()[1]) for line in lines]

    def signal(self, worker: int, number: signal.Signals) -> None:
        os.kill(self.pids()[worker], number)


class Launch(Started):
    """`weftune train --pipeline`."""

    def __init__(
        self,
        folder: Path,
        output: str,
        workers: int,
        *more: str,
        replicas: int = 1,
        always: Sequence[str] = (),
        runs: Callable[[], object] = main,
    ) -> None:
        """`workers` are those of all replicas; `always` are words that are said after a loss, too; `runs` is
        what every worker runs."""
        kept = ("--replicas", str(replicas), *always)
        first, again = words(folder, output, *kept, *more), words(folder, output, *kept, "--resume")
        where = folder / output
        super().__init__(where, lambda: launch(runs, first, again, workers, where))


class Shares(Started):
    """`weftune train --device cpu --gpus N`, with more options such as `pipeline="2"`."""

    def __init__(
        self,
        folder: Path,
        output: str,
        count: int,
        *,
        resume: bool = False,
        restart: Sequence[str] = (),
        **more: Any,
    ) -> None:
        where = folder / output
        more |= {"resume": resume, "restart": list(restart)}
        super().__init__(where, lambda: _train(folder / "jobs.yaml", where, count, **more))

    def interrupt(self) -> None:
        """As Ctrl-C would, every share; one that has just ended hears nothing."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def lines(self) -> int:
        return sum(map(_count_lines, share_metrics(self.output)))


def share_metrics(output: Path) -> list[Path]:
    return sorted(output.glob(".shares/*/metrics.jsonl"))


def dealt(output: Path) -> list[list[str]]:
    """Who trained together the last time that jobs were divided."""
    return [share["jobs"] for share in json.loads((output / "shares.json").read_text())["shares"]]


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _train(jobs: Path, output: Path, count: int, **more: Any) -> int:
    try:
        train(jobs, output=output, device="cpu", gpus=str(count), **more)
    except typer.Exit as end:
        return end.exit_code
    return 0


def fresh(folder: Path, output: str) -> str:
    shutil.rmtree(folder / output, ignore_errors=True)
    return output
