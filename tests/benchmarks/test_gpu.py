"""The same scripts where they belong: run with `pytest -m gpu`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from weftune.bench import gpu_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_small_step_on_the_gpu_is_measured_with_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    words = "--shape 1b --jobs 2 --batch 2x64 --warmup 1 --blocks 1 --steps 1 --baselines frozen,processes"
    monkeypatch.setattr(sys, "argv", ["gpu_step", *words.split(), "--json", str(file)])
    gpu_step.main()
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4
    weights = 2 * 1_100_000_000
    for row in rows:
        assert row["note"] == ""
        assert row["peak_bytes"] > weights
        assert 0 < row["rho"] < 1
