"""The whole service as `weftune serve` starts it: HTTP, preparation, training and chat, on a tiny base."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import torch

from tests.base.folders import CHATML, word_tokenizer
from tests.families import tiny
from tests.service.api.running import free_port, openai_client
from tests.service.forked import ForkedCommand
from weftune.service.client import ServiceClient
from weftune.service.keys import KeyFile
from weftune.service.settings import KEYS

SECONDS = 120.0


METRIC = """
def word_count(completion, expected, row):
    return 0.25 * len(completion.split())
"""


class Whole:
    """A running service, started by the command line with these options more; with `forked` all of its
    processes are forks."""

    def __init__(self, folder: Path, *options: str, forked: bool = False) -> None:
        self.folder, self.port, self.options, self.forked = folder, free_port(), options, forked
        tiny("llama", torch.float32).save_pretrained(folder / "model")
        word_tokenizer(CHATML).save_pretrained(folder / "model")
        self.key = KeyFile(folder / "store" / KEYS).create("acme")
        self.log = folder / "log"
        (folder / "scores.py").write_text(METRIC)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["serve", "--base", self.folder / "model", "--store", self.folder / "store"]
        words += ["--port", self.port, "--device", "cpu", "--expect", "4xrank8x64"]
        words += ["--metric", f"{self.folder / 'scores.py'}:word_count", *self.options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WEFTUNE_CACHE": str(self.folder / "cache")}
        self.log.unlink(missing_ok=True)
        self.process: Any
        with self.log.open("ab") as output:
            if self.forked:
                self.process = ForkedCommand([*map(str, words)], output, environment)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "weftune", *map(str, words)],
                    stdout=output,
                    stderr=output,
                    env=environment,
                )
        self.until(self.is_ready)
        assert self.log.read_text().count("ready to train") == 1

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(ServiceClient(self.url, self.key).request("GET", "/readyz")["status"] == "ok")
        except Exception:
            return False

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.2)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        """End the service, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def client(self) -> openai.OpenAI:
        return openai_client(self.url, self.key, timeout=60)


def rows(count: int = 16) -> bytes:
    turns = ('{"role": "user", "content": "w%d w50"}', '{"role": "assistant", "content": "w%d w60"}')
    return "".join(
        f'{{"messages": [{turns[0] % (10 + n)}, {turns[1] % (20 + n)}]}}\n' for n in range(count)
    ).encode()
