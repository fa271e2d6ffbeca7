"""A base that a GPU does not hold, through the command line.

Run with `make smoke-gpu`. Each command is a process of its own, as a user starts it.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests import bench
from tests.smoke.commands import assert_trained, notes, weftune
from tests.smoke.conftest import TALL_STEPS

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]


CAP = "3GiB"
"""Too little for all of the base: some of the cap is kept for the allocator."""


def test_under_a_cap_the_base_is_streamed(tall, plain_tall, tmp_path):
    output = tmp_path / "output"
    said = weftune("train", tall, "--output", output, "--gpu-memory", CAP).said
    assert "The base is streamed in" in said
    assert "came from the host" in notes(output)
    assert_trained(output, plain_tall, TALL_STEPS)
    peak = json.loads((output / "status.json").read_text())["peak_bytes"]
    assert peak <= 3 << 30


def test_a_plan_under_a_cap_is_the_cut_of_the_run(tall, tmp_path):
    weftune("plan", tall, "--gpu-memory", CAP, "--cluster", "auto", "--json", tmp_path / "plan.json")
    assert "stream" in (tmp_path / "plan.json").read_text()


def test_a_pipeline_under_a_cap_streams_over_its_workers(tall, plain_tall, tmp_path):
    output = tmp_path / "output"
    weftune("train", tall, "--output", output, "--pipeline", "2", "--gpu-memory", "5GiB")
    assert_trained(output, plain_tall, TALL_STEPS)
    assert "streamed" in notes(output)
