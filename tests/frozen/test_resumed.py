"""A run that was interrupted before the rebuilding goes on, with today's tree, to the losses it had then."""

import json
import shutil
from pathlib import Path

import pytest

from tests.frozen import runs
from tests.outputs import assert_whole, lines, numbers, states

INTERRUPTED = Path(__file__).parent / "run_1e26299"
"""The output of `runs.interrupt` as commit 1e26299 wrote it; the older of each job's two checkpoints and the
report were left out."""
LOSSES = Path(__file__).parent / "run_1e26299.json"
"""Job → [step, "loss" or "eval_loss", the number] of the same run after that commit had resumed it."""


def test_a_checkpoint_of_an_earlier_release_is_resumed_to_the_same_losses(tmp_path):
    output = tmp_path / "out"
    shutil.copytree(INTERRUPTED, output)
    assert set(states(output).values()) == {"paused"}
    before = lines(output)
    runs.resume(output)
    assert lines(output)[: len(before)] == before, "no finished step was made again"
    assert_whole(output)
    for job, recorded in json.loads(LOSSES.read_text()).items():
        found = numbers(output, job)
        assert [line[:2] for line in found] == [(step, what) for step, what, _ in recorded]
        assert [line[2] for line in found] == pytest.approx([line[2] for line in recorded], rel=1e-9)
