"""The benchmark of first windows at a toy size: plan and run are asked with equal options, and compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import first_window
from tests.base.folders import model_folder


@pytest.mark.slow
def test_the_predicts_of_plan_and_run_stand_beside_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folder(tmp_path / "model", "llama", torch.float32)
    file = tmp_path / "found.json"
    words = ["--base", str(tmp_path / "model"), "--cases", "1", "--modes", "one device", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["first_window", *words])
    first_window.main()
    (case,) = json.loads(file.read_text())["cases"]
    assert case["same"]
    assert case["planned_seconds"] == case["predicted_seconds"] > 0
    assert "Plan and run predict the same in 1 of 1 cases." in capsys.readouterr().out
