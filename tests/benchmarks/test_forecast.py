"""The forecast benchmarks at a toy size: they must run the first time where a GPU is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import cpu_forecast, gpu_forecast


@pytest.mark.slow
@pytest.mark.parametrize("script", [cpu_forecast, gpu_forecast])
def test_predicted_stands_beside_measured_and_the_bar_is_judged(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [script.__name__, "--toy", "--json", str(file)])
    script.main()
    found = json.loads(file.read_text())
    assert found["bar"] == script.BAR
    assert found["kept"] == (max(found["changed"]["seconds"], found["changed"]["peak"]) <= script.BAR)
    assert len({window["jobs"] for window in found["windows"]}) > 1, "jobs join and leave"
    assert found["windows"][0]["predicted_seconds"] > 0
    shown = capsys.readouterr().out
    assert "The first window, from the profile" in shown
    assert f"The bar is {script.BAR:.0%}" in shown
