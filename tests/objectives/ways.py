"""The ways of running in which jobs of any objective end as in one process that nobody disturbs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from tests.forks import Forks
from tests.launches import Launch, Shares, fresh

Way = Callable[[Path, Forks], Path]
"""Trains the jobs of a folder, and returns the output."""


def kill_and_resume(place: Path, forks: Forks) -> Path:
    output = place / fresh(place, "killed")
    forks.start("train", "jobs.yaml", "--output", "killed", cwd=place)
    forks.wait_for_lines(output, 8)
    forks.signal(signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL
    assert forks.weftune("train", "jobs.yaml", "--output", "killed", "--resume", cwd=place) == 0
    return output


def launch(workers: int, replicas: int = 1) -> Way:
    def train(place: Path, _: Forks) -> Path:
        run = Launch(place, fresh(place, "launched"), workers, replicas=replicas)
        assert run.wait() == 0
        return run.output

    return train


def stream(place: Path, forks: Forks) -> Path:
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", fresh(place, "streamed"))
    assert forks.weftune(*words, "--gpu-memory", "960KiB", cwd=place) == 0
    return place / "streamed"


def share(place: Path, _: Forks) -> Path:
    assert Shares(place, fresh(place, "shares"), 2).wait() == 0
    return place / "shares"


WAYS: dict[str, Way] = {
    "killed and resumed": kill_and_resume,
    "a pipeline": launch(2),
    "replicas": launch(2, replicas=2),
    "replicas of a pipeline": launch(4, replicas=2),
    "a streamed base": stream,
    "shares": share,
}
