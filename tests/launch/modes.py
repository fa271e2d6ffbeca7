"""The four modes, on a model of four layers: one device, streamed, in stages, streamed by several workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launches import Launch, fresh
from tests.outputs import status
from weftune.cli.main import main


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    workers: int
    gpu_memory: str = ""
    """Of a pretended device that has no room for its part of the base and all that passes hold."""

    def start(
        self, place: Path, output: str, *more: str, runs: Callable[[], object] = main, **keys: Any
    ) -> Launch:
        words = ("--device", "cpu", "--gpu-memory", self.gpu_memory) if self.gpu_memory else ()
        return Launch(place, output, self.workers, *more, always=words, runs=runs, **keys)

    def assert_it_was(self, output: Path) -> None:
        """Whether the base was streamed where that was wanted, and only there."""
        assert ("The base is streamed" in " ".join(status(output)["notes"])) == bool(self.gpu_memory)

    def output(self, place: Path) -> Path:
        """A new one."""
        return place / fresh(place, self.name.replace(" ", "-"))


MODES = [
    Mode("one device", 1),
    Mode("streamed", 1, "960KiB"),
    Mode("pipeline", 2),
    Mode("streamed workers", 2, "870KiB"),
]


def modes(*slow: str) -> list[Any]:
    """Parameters of a test; those of these names are shown by other tests, and run where there is time."""
    marks = [pytest.mark.slow if mode.name in slow else () for mode in MODES]
    return [pytest.param(mode, marks=mark, id=mode.name) for mode, mark in zip(MODES, marks, strict=True)]
