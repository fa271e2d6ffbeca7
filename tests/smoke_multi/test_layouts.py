"""Every layout over several GPUs trains all jobs to what one GPU makes of them, through the command line.

Run with `make smoke-multi-gpu` on a machine with at least two GPUs. A layout that needs more than there are
is skipped. Workers with a GPU each exchange tensors by NCCL. `make smoke-multi-gpu SMOKE_DEVICE=cpu` runs the
same commands in processes on a CPU, which exchange them by gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.folder import Rows, write_base, write_rows
from tests.launches import deep_folder
from tests.outputs import FOUR_JOBS
from tests.smoke.commands import assert_trained, jobs_file, weftune
from tests.smoke.conftest import TALL
from tests.test_shards import assert_equal
from weftune.bench.timing import bench_hardware
from weftune.run.workers.groups import NCCL_RULES

DEVICE = os.environ.get("WEFTUNE_SMOKE_DEVICE", "cuda")
GPUS = torch.cuda.device_count() if DEVICE == "cuda" else 0
pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(
        DEVICE == "cuda" and GPUS < 2,
        reason=f"several GPUs are needed, and this machine has {GPUS}; "
        "`make smoke-multi-gpu SMOKE_DEVICE=cpu` runs the same commands in processes on a CPU",
    ),
]
LAYOUTS = {
    "--pipeline 2": 2,
    "--replicas 2": 2,
    "--shards 2": 2,
    "--gpus 2": 2,
    "--pipeline 4": 4,
    "--shards 4": 4,
    "--pipeline 2 --replicas 2": 4,
    "--shards 2 --pipeline 2": 4,
    "--shards 2 --replicas 2": 4,
    "--gpus 2 --pipeline 2": 4,
    "--gpus 2 --shards 2": 4,
    "--shards 2 --pipeline 2 --replicas 2": 8,
}
"""Maps the flags of a layout to the number of its workers."""
BF16_STEPS = 40


def train(jobs: Path, output: Path, *flags: str, visible: str | None = None) -> str:
    """Train on these GPUs, or on all; return what was printed."""
    environment = {NCCL_RULES: "0", "NCCL_DEBUG": "INFO"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    words = ("train", jobs, "--output", output, "--device", DEVICE, *flags)
    return weftune(*words, environment=environment).said


def skip_without_gpus(workers: int) -> None:
    if DEVICE == "cuda" and workers > GPUS:
        pytest.skip(f"{workers} GPUs are needed, and this machine has {GPUS}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four jobs on a float64 base, whose `plain` is the output of one device."""
    folder = deep_folder(tmp_path_factory.mktemp("multi"), FOUR_JOBS, family="llama")
    train(folder / "jobs.yaml", folder / "plain", visible="0")
    return folder


@pytest.mark.parametrize("flags", LAYOUTS)
def test_losses_evaluations_and_adapters_equal_one_device(place: Path, tmp_path: Path, flags: str) -> None:
    skip_without_gpus(LAYOUTS[flags])
    said = train(place / "jobs.yaml", tmp_path / "output", *flags.split())
    assert_equal(tmp_path / "output", place / "plain")
    if "--gpus" not in flags:
        assert ("NCCL INFO" in said) == (DEVICE == "cuda")


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two jobs on a base in bfloat16, long enough that passes are captured as graphs."""
    folder = tmp_path_factory.mktemp("bf16")
    hardware = bench_hardware(toy=False)
    assert hardware is not None
    write_base(folder / "base", TALL, hardware)
    torch.cuda.empty_cache()
    write_rows(folder / "rows.jsonl", TALL, Rows(samples=32, shortest=32, longest=128))
    jobs = jobs_file(folder, folder / "base", folder / "rows.jsonl", steps=BF16_STEPS)
    train(jobs, folder / "plain", visible="0")
    return folder


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on GPUs only")
@pytest.mark.parametrize("flags", ["--pipeline 2", "--replicas 2", "--pipeline 2 --replicas 2", "--shards 2"])
def test_losses_in_bfloat16_are_those_of_one_gpu_up_to_rounding(
    bf16: Path, tmp_path: Path, flags: str
) -> None:
    skip_without_gpus(LAYOUTS[flags])
    train(bf16 / "jobs.yaml", tmp_path / "output", *flags.split())
    assert_trained(tmp_path / "output", bf16 / "plain", BF16_STEPS)
