"""Four jobs on one device have the losses that they had before the rebuilding.

Every other way of running (streamed, in stages, in replicas, streamed by workers, in shares) is compared with
this same run in the tests of its own: tests/test_streaming*.py, test_pipeline.py, test_replicas.py,
test_shares.py.
"""

import json
from pathlib import Path

import pytest

from tests.outputs import numbers

FILE = Path(__file__).parent / "losses.json"
"""Job → [step, "loss" or "eval_loss", the number], in float64."""


def test_the_losses_are_those_that_were_recorded(trained_deep):
    for job, recorded in json.loads(FILE.read_text()).items():
        found = numbers(trained_deep / "undisturbed", job)
        assert [line[:2] for line in found] == [(step, what) for step, what, _ in recorded]
        assert [line[2] for line in found] == pytest.approx([line[2] for line in recorded], rel=1e-9)
