"""Kinds that start from the base's weights find them where the base is quantised, streamed too."""

from __future__ import annotations

import pytest
import yaml

from tests.launches import deep_folder
from tests.outputs import assert_same_results, status

JOBS = [
    {"name": "dora", "steps": 4, "adapter": {"kind": "dora", "rank": 3, "dropout": 0.2}},
    {"name": "ia3", "steps": 4, "adapter": {"kind": "ia3"}},
    {"name": "lora", "steps": 4, "adapter": {"rank": 3}},
]


@pytest.mark.slow
def test_on_a_quantised_base_streamed_from_host_memory_all_learn_the_same(tmp_path, forks):
    place = deep_folder(tmp_path, JOBS, "llama", learning_rate=2e-3)
    whole = yaml.safe_load((place / "jobs.yaml").read_text())
    whole["base"]["quantize"] = "nf4"
    (place / "jobs.yaml").write_text(yaml.safe_dump(whole))
    assert forks.weftune("train", "jobs.yaml", "--output", "resident", cwd=place) == 0
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", "streamed", "--gpu-memory", "500KiB")
    assert forks.weftune(*words, cwd=place) == 0
    assert "The base is streamed in" in " ".join(status(place / "streamed")["notes"])
    assert_same_results(place / "streamed", place / "resident")
