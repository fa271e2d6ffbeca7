"""A sample of 65,536 tokens through `weftune train`, on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.folder import Rows, write_base, write_rows
from tests.smoke.commands import jobs_file, losses, weftune
from weftune.bench.sizes import SIZES
from weftune.bench.timing import bench_hardware

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

TOKENS = 1 << 16
SIZE = replace(SIZES["1b"], layers=4, vocabulary=4096, context=TOKENS)
STEPS = 2


def test_a_sample_of_64k_tokens_trains_in_tiles(tmp_path):
    hardware = bench_hardware(toy=False)
    assert hardware is not None
    write_base(tmp_path / "base", SIZE, hardware)
    torch.cuda.empty_cache()
    write_rows(tmp_path / "rows.jsonl", SIZE, Rows(samples=2, shortest=TOKENS, longest=TOKENS))
    data = {"path": str(tmp_path / "rows.jsonl"), "max_length": TOKENS}
    jobs = jobs_file(
        tmp_path, tmp_path / "base", tmp_path / "rows.jsonl", steps=STEPS, batch_size=1, data=data
    )
    weftune("train", jobs, "--output", tmp_path / "output")
    found = losses(tmp_path / "output")
    assert found
    assert all(len(own) == STEPS for own in found.values())
    promise = json.loads((tmp_path / "output" / "promise.json").read_text())
    assert promise["tile_rows"] == 8192
