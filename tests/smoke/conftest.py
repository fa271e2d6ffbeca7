"""Runs that several tests look at: each is made once for a file of tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.folder import Rows, write_base, write_rows
from tests import bench
from tests.smoke.commands import jobs_file, weftune
from weftune.bench.sizes import SIZES
from weftune.bench.timing import bench_hardware

TALL = replace(SIZES["1b"], layers=16, vocabulary=4096)
"""A base of 1.4 GB."""
TALL_STEPS = 6


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """A jobs file for stories15M, two jobs with held-out rows."""
    folder = tmp_path_factory.mktemp("stories")
    said = [
        {"prompt": f"There were {n} cats.", "completion": f" The {n} cats had {2 * n} red hats. " * 4}
        for n in range(2, 66)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    return jobs_file(folder, bench.STORIES, folder / "rows.jsonl", eval={"fraction": 0.1}, keep="best")


@pytest.fixture(scope="session")
def tall(tmp_path_factory) -> Path:
    """A jobs file for a base that a cap of 3 GiB does not hold."""
    folder = tmp_path_factory.mktemp("tall")
    hardware = bench_hardware(toy=False)
    assert hardware is not None
    write_base(folder / "base", TALL, hardware)
    torch.cuda.empty_cache()
    write_rows(folder / "rows.jsonl", TALL, Rows(samples=32, shortest=32, longest=128))
    return jobs_file(folder, folder / "base", folder / "rows.jsonl", steps=TALL_STEPS)


@pytest.fixture(scope="session")
def plain(stories, tmp_path_factory) -> Path:
    """What an ordinary run leaves."""
    output = tmp_path_factory.mktemp("plain") / "output"
    weftune("train", stories, "--output", output, "--device", "cuda")
    return output


@pytest.fixture(scope="session")
def plain_tall(tall, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("plain-tall") / "output"
    weftune("train", tall, "--output", output)
    return output
