"""The benchmark of chunks says what they are worth in the simulator and in processes."""

import json
import sys

import pytest
import torch

from benchmarks import gpu_chunks, pipeline_chunks
from benchmarks.pipeline_chunks import ActivationCounter


@pytest.mark.slow
def test_simulated_chunks_leave_a_twelfth_of_four_stages_idle_at_most(monkeypatch, tmp_path, capsys):
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["pipeline_chunks", "--simulate", "--json", str(found)])
    pipeline_chunks.main()
    (case,) = (
        one for one in json.loads(found.read_text())["simulated"] if (one["stages"], one["samples"]) == (4, 6)
    )
    assert case["whole"] == pytest.approx(1 / 3)
    assert case["chunks"] < 0.12
    assert case["step"] < 0.8
    assert "33.3%" in capsys.readouterr().out


def test_the_counter_holds_what_autograd_keeps_and_shared_memory_once():
    counter = ActivationCounter()
    x = torch.randn(100, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
        y = torch.exp(x)
        z = y * y
    assert counter._held == y.untyped_storage().nbytes(), "exp keeps its output, which the product reads"
    counter.begin_window()
    z.sum().backward()
    counter.end_window()
    del y, z
    assert counter._held == 0
    assert counter.peaks == [100 * 4 * 4]


@pytest.mark.slow
def test_the_toy_measures_both_cases_and_predicts_the_activations_of_chunks(monkeypatch, tmp_path):
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["pipeline_chunks", "--toy", "--json", str(found)])
    pipeline_chunks.main()
    numbers = json.loads(found.read_text())
    whole, cut = numbers["cases"]
    assert whole["chunk_rows"] == pipeline_chunks.TOY.length >= cut["chunk_rows"]
    assert all(abs(error) < 0.15 for error in numbers["errors"])


def test_chunks_on_one_device_are_timed_beside_whole_samples(monkeypatch, capsys):
    words = ["gpu_chunks", "--toy", "--length", "64", "--chunks", "20", "--steps", "1", "--layers", "1"]
    monkeypatch.setattr(sys, "argv", words)
    gpu_chunks.main()
    told = capsys.readouterr().out
    assert "chunks of 20 rows" in told
    assert "of the time" in told
