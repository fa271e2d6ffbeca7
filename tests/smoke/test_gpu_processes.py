"""Several processes that share one GPU, through the command line.

Run with `make smoke-gpu`. Each command is a process of its own, as a user starts it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests import bench
from tests.smoke.commands import assert_trained, surroundings, weftune

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipeline", "2"),
        ("--pipeline", "auto"),
        ("--replicas", "2"),
        ("--pipeline", "2", "--replicas", "2"),
        ("--gpus", "all"),
    ],
    ids=" ".join,
)
def test_several_processes_on_one_gpu(stories, plain, tmp_path, flags):
    output = tmp_path / "output"
    weftune("train", stories, "--output", output, *flags)
    assert_trained(output, plain)
    if flags == ("--pipeline", "2"):
        assert_times_are_the_devices(output)


def assert_times_are_the_devices(output: Path) -> None:
    """Passes on a worker follow one another, and the device is not busy for longer than they took."""
    events = [
        one for one in json.loads((output / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"
    ]
    passes = [one for one in events if one["cat"] in ("Forward", "Backward")]
    for worker in (0, 1):
        own = sorted((one["ts"], one["ts"] + one["dur"]) for one in passes if one["tid"] == worker)
        assert own
        assert all(before[1] <= after[0] + 100 for before, after in pairwise(own))
    assert (output / "timelines.json").exists()


def test_torchrun_starts_the_stages(stories, plain, tmp_path):
    output = tmp_path / "output"
    words = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    asked = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "weftune", "train", str(stories)]
    ended = subprocess.run(
        [*asked, "--output", str(output)], env=surroundings(), capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_trained(output, plain)
