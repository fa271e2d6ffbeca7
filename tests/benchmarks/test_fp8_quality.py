"""The benchmark of fp8's quality at a toy size: a tiny base instead of the demo one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import fp8_quality
from tests.base.quant.bases import plain_folder
from tests.families import tiny


def test_losses_of_every_job_stand_beside_those_on_the_plain_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = plain_folder(tmp_path / "model", tiny("llama", torch.float32)), tmp_path / "rows.jsonl"
    texts = (" ".join(f"w{4 + (row * 7 + at) % 80}" for at in range(9)) for row in range(20))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(fp8_quality, "JOBS", {"a": (str(rows), 4, 1e-2), "b": (str(rows), 2, 1e-3)})
    words = ["--model", str(folder), "--jobs", "a,b", "--steps", "3", "--formats", "fp8,nf4"]
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["fp8_quality", *words, "--json", str(file)])
    fp8_quality.main()
    found = json.loads(file.read_text())["jobs"]
    assert [(one["base"], one["job"]) for one in found] == [
        (base, job) for base in ("plain", "fp8", "nf4") for job in "ab"
    ]
    assert all(one["apart"] == 0 for one in found if one["base"] == "plain")
    assert all(0 < abs(one["apart"]) < 0.2 for one in found if one["base"] != "plain")
    assert all(one["served_apart"] == 0 for one in found if one["base"] == "plain")
    assert all(0 < abs(one["served_apart"]) < 0.2 for one in found if one["base"] != "plain")
    assert all(one["served"] != one["last"] for one in found if one["base"] != "plain")
    assert capsys.readouterr().out.count("from those of the plain base (bar 0.5%") == 2
