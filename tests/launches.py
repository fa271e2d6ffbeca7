"""Whole pipelines, started as the command line starts them, inside the test's own process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.outputs import jobs_folder
from tests.run.models import deep
from tests.run.ranks import context
from weft.cli.main import main
from weft.launch import launch


def deep_folder(folder: Path, jobs: list[dict[str, Any]], family: str = "opt", **defaults: Any) -> Path:
    """As `jobs_folder`, with a model of four layers."""
    jobs_folder(folder, jobs, **defaults)
    deep(family, torch.float64).save_pretrained(folder / "model")
    return folder


def words(folder: Path, output: str, *more: str) -> list[str]:
    return ["train", str(folder / "jobs.yaml"), "--output", str(folder / output), *more]


class Launch:
    """`weft train --pipeline` in a thread, so that the test can meddle."""

    def __init__(self, folder: Path, output: str, ranks: int, *more: str, replicas: int = 1) -> None:
        """`ranks` are those of all replicas."""
        context()
        self.output = folder / output
        self.code: int | None = None
        copies = ("--replicas", str(replicas))
        first, again = words(folder, output, *copies, *more), words(folder, output, *copies, "--resume")
        os.environ["COLUMNS"] = "200"
        self._thread = threading.Thread(target=self._run, args=(first, again, ranks), daemon=True)
        self._thread.start()

    def _run(self, first: list[str], again: list[str], ranks: int) -> None:
        self.code = launch(main, first, again, ranks, self.output)

    def wait(self) -> int:
        self._thread.join()
        assert self.code is not None
        return self.code

    def wait_for_lines(self, count: int) -> None:
        metrics = self.output / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert self.code is None, f"the run has ended with {self.code}"
            assert time.monotonic() < deadline, "the run does not get there"
            time.sleep(0.001)

    def pids(self) -> list[int]:
        lines = (self.output / "ranks" / "pids").read_text().splitlines()
        return [int(line.split()[1]) for line in lines]

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids()[rank], number)


def fresh(folder: Path, output: str) -> str:
    shutil.rmtree(folder / output, ignore_errors=True)
    return output
