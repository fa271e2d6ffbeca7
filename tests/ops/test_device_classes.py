"""What each class of GPUs selects, and that it compiles for the class without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from weftune.base.quant.formats import supports_fp8
from weftune.core.device_class import CLASSES, OLDER, DeviceClass, class_for_capability, pretend_device_class
from weftune.ops.experts import ExpertSite
from weftune.ops.lora.experts import best_plan
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group, SlotTable, required_bands
from weftune.ops.lora.tiling import KernelLaunch, ProductPlan, candidate_plans, choose_tiling
from weftune.ops.triton import kernels_available_on

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDE, FUSED = (ProductPlan.wide, ProductPlan.wide_beside), (ProductPlan.fused, ProductPlan.fused_beside)
LARGE = {"sm_80", "sm_90", "sm_100"}
"""Classes with the shared memory for which blocks were tuned."""

by_class = pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.architecture)


def tiling_of(one: DeviceClass, rank: int = 16, widths: tuple[int, ...] = (4096,), rows: int = 8192):
    columns = tuple(pairwise(accumulate(widths, initial=0)))
    names = [f"site{part}" for part in range(len(widths))]
    group = Group(columns, SlotTable.empty(names, 8, CPU, bands=required_bands(rank)), rank, False)
    with pretend_device_class(one):
        return choose_tiling(Rows.empty(rows, 8, CPU), group, 4096, torch.bfloat16)


@by_class
def test_a_fused_product_is_selected_on_gpus_for_data_centres_with_copy_engines(one):
    table = SlotTable.empty(["site"], 8, CPU)
    weight_NK = torch.empty(4096, 4096, dtype=torch.bfloat16)
    with pretend_device_class(one):
        plans = candidate_plans(weight_NK, Group(((0, 4096),), table, 16, False), CUDA)
        experts = best_plan(ExpertSite(torch.empty(4, 64, 64, dtype=torch.bfloat16)))
    fuses = one.architecture in ("sm_90", "sm_100")
    assert plans == (FUSED if fuses else WIDE)
    assert experts is (ProductPlan.fused if fuses else ProductPlan.wide)


@by_class
def test_blocks_are_halved_where_shared_memory_is_small(one):
    large = one.architecture in LARGE
    found = tiling_of(one)
    assert found.down == KernelLaunch(128 if large else 64, warps=4, stages=4 if large else 2)
    assert found.da == KernelLaunch(128 if large else 64, warps=8, stages=3 if large else 2)
    assert found.up.columns == (128 if large else 64)
    assert tiling_of(one, rank=128).db.columns == (128 if large else 64)


@by_class
def test_a_fused_product_has_a_program_for_every_multiprocessor_of_the_class(one):
    assert tiling_of(one).y.programs == one.multiprocessors


@by_class
def test_a_base_in_fp8_is_multiplied_by_tensor_cores_from_ada_on(one):
    with pretend_device_class(one):
        assert supports_fp8(CUDA) == (one.capability >= (8, 9))


@by_class
def test_every_class_from_ampere_on_has_kernels(one):
    with pretend_device_class(one):
        assert kernels_available_on(CUDA, torch.bfloat16)
    with pretend_device_class(OLDER):
        assert not kernels_available_on(CUDA, torch.bfloat16)


def test_on_hopper_the_launches_are_those_that_were_measured_on_the_h200():
    found = tiling_of(class_for_capability((9, 0)), widths=(4096, 1024, 1024))
    kernels = found.down, found.up, found.ds_db, found.db, found.da
    shown = [(one.columns, one.warps, one.stages, one.parts_per_program) for one in kernels]
    assert shown == [(128, 4, 4, 3), (128, 4, 1, 1), (256, 4, 2, 1), (128, 4, 2, 1), (128, 8, 3, 3)]
    assert (found.y.columns, found.y.stages, found.y.programs) == (256, 3, 132)


def compiled(folder: Path, *words: str) -> list[dict[str, object]]:
    """The rows of the command. It is another process, since Triton is either an interpreter or a compiler."""
    pytest.importorskip("triton")
    file = folder / "rows.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
    asked = [sys.executable, "-m", "tests.ops.device_classes", "--json", str(file), *words]
    root = Path(__file__).parents[2]
    done = subprocess.run(asked, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def check(rows: list[dict[str, object]], classes: tuple[DeviceClass, ...]) -> None:
    assert {row["architecture"] for row in rows} == {one.architecture for one in classes}
    for row in rows:
        assert not row["failures"]
        assert row["shared"] <= row["limit"]
        assert row["registers"] <= 255


def test_a_sample_of_what_small_gpus_select_compiles_and_fits_them(tmp_path):
    rows = compiled(tmp_path, "--quick", "--sample", "2", "--processes", "1", "--class", "8.6")
    check(rows, (class_for_capability((8, 6)),))


@pytest.mark.slow
def test_all_that_each_class_selects_compiles_and_fits_it(tmp_path):
    check(compiled(tmp_path), CLASSES)
