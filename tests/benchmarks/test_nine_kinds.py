"""The benchmark of all kinds in the same microbatches, whole, at a toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import nine_kinds
from tests import bench
from tests.base.folders import model_folder
from weftune.adapters.kinds import KINDS


def test_it_has_a_job_of_every_kind_of_ours() -> None:
    ours = {name for name, spec in KINDS.items() if spec.__module__.startswith("weftune.")}
    assert nine_kinds.ADAPTERS.keys() == ours


def test_losses_are_apart_by_the_largest_gap_of_a_step() -> None:
    assert nine_kinds.apart([1.0, 4.4, 0.5], [1.0, 4.0, 0.25]) == pytest.approx(0.25)


@pytest.mark.slow
def test_at_a_toy_size_every_kind_equals_its_solo_run_and_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rows, file = (
        model_folder(tmp_path / "model", "llama", torch.float32),
        tmp_path / "rows.jsonl",
        tmp_path / "found.json",
    )
    texts = (" ".join(f"w{token}" for token in tokens) for tokens, _ in bench.samples(12))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--model", str(model), "--rows", str(rows), "--steps", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["nine_kinds", *words])
    monkeypatch.setitem(nine_kinds.ADAPTERS, "vera", {"rank": 5})
    nine_kinds.main()
    found = json.loads(file.read_text())
    assert found["share"] == 1.0
    for one in found["kinds"]:
        assert one["solo"] <= nine_kinds.CLOSE
        assert (one["peft"] is None) == (one["kind"] in ("bottleneck", "diff"))
        assert (one["peft"] or 0.0) <= nine_kinds.CLOSE
    assert "differences of losses are all within 1e-05" in capsys.readouterr().out
