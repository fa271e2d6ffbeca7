"""How the tiled route is launched: the blocks that were measured, and which plans a case allows.

Written down as numbers: a launch that changes by mistake computes the same, only slower, and on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch

from weftune.core import device_class
from weftune.core.device_class import class_for_capability, pretend_device_class
from weftune.ops.lora.rows import Rows
from weftune.ops.lora.table import Group, SlotTable, required_bands
from weftune.ops.lora.tiling import (
    KernelLaunch,
    ProductPlan,
    SiteCall,
    candidate_plans,
    choose_tiling,
    parts_per_program,
    product_blocks,
    rank_block,
    supported_plans,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HALF = torch.bfloat16
ROOMY, NARROW = 163_840, 163_839
"""Bytes of shared memory: as much as the blocks were measured with, and one less."""


def group_of(rank=8, widths=(4096,), drops=False, first=0):
    columns = tuple(pairwise(accumulate(widths, initial=first)))
    names = [f"site{part}" for part in widths]
    return Group(columns, SlotTable.empty(names, 2, CPU, bands=required_bands(rank)), rank, drops)


def tiled(rows=64, features=4096, dtype=HALF, programs=132, shared=ROOMY, piece=1024, **group):
    """The tiling of a GPU with so many multiprocessors and so much shared memory."""
    with pretend_device_class(
        replace(class_for_capability((9, 0)), shared_memory=shared, multiprocessors=programs)
    ):
        return choose_tiling(Rows.empty(rows, 2, CPU, piece=piece), group_of(**group), features, dtype)


def shown(chosen):
    """(columns, warps, stages) of every kernel."""
    kernels = (chosen.down, chosen.up, chosen.ds_db, chosen.db, chosen.da)
    return [(one.columns, one.warps, one.stages) for one in kernels]


MANY = (64, 8, 2)
OF_128 = [(64, 4, 4), (128, 8, 1), (64, 8, 2), (128, 8, 3), (128, 8, 3)]
IN_16_BITS = {
    "rank 1": (dict(rank=1), [(128, 4, 4), (128, 4, 1), (256, 4, 4), (128, 4, 2), (128, 8, 3)]),
    "rank 16": (dict(rank=16), [(128, 4, 4), (128, 4, 1), (256, 4, 4), (128, 4, 2), (128, 8, 3)]),
    "rank 17": (dict(rank=17), [(128, 4, 4), (128, 4, 1), (256, 4, 3), (128, 4, 2), (128, 8, 3)]),
    "rank 32": (dict(rank=32), [(128, 4, 4), (128, 4, 1), (256, 4, 3), (128, 4, 2), (128, 8, 3)]),
    "rank 64": (dict(rank=64), [(128, 4, 4), (128, 4, 1), (128, 4, 4), (128, 8, 3), (128, 8, 3)]),
    "rank 65": (dict(rank=65), OF_128),
    "rank 256, in bands": (dict(rank=256), OF_128),
    "masks": (
        dict(rank=8, drops=True),
        [(128, 4, 3), (128, 4, 1), (256, 4, 4), (128, 4, 2), (128, 8, 3)],
    ),
    "masks of two parts": (
        dict(rank=8, drops=True, widths=(512, 512)),
        [(64, 4, 3), (128, 4, 1), (256, 4, 4), (128, 4, 2), (128, 8, 3)],
    ),
    "two parts": (
        dict(rank=8, widths=(512, 512)),
        [(128, 4, 4), (128, 4, 1), (256, 4, 4), (128, 4, 2), (128, 8, 3)],
    ),
    "four parts of rank 16": (
        dict(rank=16, widths=(512,) * 4),
        [(128, 4, 4), (128, 4, 1), (256, 4, 4), (128, 4, 2), (128, 8, 3)],
    ),
    "five parts of rank 16": (
        dict(rank=16, widths=(512,) * 5),
        [MANY, (128, 4, 1), (256, 4, 4), (128, 4, 2), (64, 8, 2)],
    ),
    "two parts of rank 128": (
        dict(rank=128, widths=(512, 512)),
        [(64, 8, 3), *OF_128[1:4], (64, 8, 3)],
    ),
    "three parts of rank 128": (dict(rank=128, widths=(512,) * 3), OF_128),
}


@pytest.mark.parametrize("name", IN_16_BITS)
def test_the_blocks_in_16_bits_are_those_that_were_measured(name):
    group, wanted = IN_16_BITS[name]
    chosen = tiled(**group)
    assert shown(chosen) == wanted
    assert chosen.reads_dy_once == (group["rank"] <= 64)
    assert chosen.down.rows == chosen.da.rows == 64
    few = group["rank"] <= 64
    assert chosen.ds == (
        replace(chosen.down, parts_per_program=1) if few else KernelLaunch(64, warps=4, stages=4)
    )


@pytest.mark.parametrize("name", IN_16_BITS)
def test_a_gpu_with_little_shared_memory_takes_half_the_columns_and_looks_less_far_ahead(name):
    group, roomy = IN_16_BITS[name]
    lean = [(columns // 2, warps, min(2, stages)) for columns, warps, stages in roomy]
    assert shown(tiled(shared=NARROW, **group)) == lean


@pytest.mark.parametrize("shared", [ROOMY, NARROW])
@pytest.mark.parametrize("rank", [1, 64, 65])
@pytest.mark.parametrize("rows", [64, 1 << 17])
def test_the_blocks_in_32_bits_are_small_on_every_gpu(shared, rank, rows):
    chosen = tiled(rows=rows, dtype=torch.float32, shared=shared, rank=rank)
    assert shown(chosen) == [(32, 8, 1)] * 5
    assert {one.rows for one in (chosen.down, chosen.up, chosen.ds_db, chosen.db, chosen.da)} == {32}
    assert chosen.reads_dy_once == (rank <= 64)


SHARES = [
    (dict(features=128), 1, 8),
    (dict(features=511), 1, 8),
    (dict(features=512), 1, 8),
    (dict(features=1024), 2, 8),
    (dict(features=4096), 8, 8),
    (dict(features=6144), 8, 8),
    (dict(features=1 << 20), 128, 8),
    (dict(features=1 << 20, rows=65), 64, 8),
    (dict(features=1 << 20, rows=128), 64, 8),
    (dict(features=1 << 20, rows=192), 32, 8),
    (dict(features=4096, rows=8192), 1, 1),
    (dict(features=4096, rows=2048), 4, 4),
    (dict(features=1 << 20, drops=True), 512, 8),
    (dict(features=1 << 20, rows=128, drops=True), 256, 8),
    (dict(features=4096, rows=8192, drops=True), 4, 1),
    (dict(widths=(4096, 1024, 2048)), 8, 2),
    (dict(widths=(1 << 20,)), 8, 128),
    (dict(widths=(1 << 20, 1 << 20)), 8, 64),
    (dict(widths=(1 << 20, 1 << 20, 1 << 20)), 8, 32),
    (dict(widths=(1 << 20, 1 << 20), rows=128), 8, 32),
]


@pytest.mark.parametrize(("case", "split", "ds_split"), SHARES)
def test_a_sum_is_shared_by_as_many_programs_as_keep_the_memory_busy(case, split, ds_split):
    chosen = tiled(**case)
    assert (chosen.down_splits, chosen.ds_splits) == (split, ds_split)


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        (dict(rows=12 * 1024, widths=(11 * 256,)), 4),
        (dict(rows=12 * 1024, widths=(11 * 256 + 1,)), 2),
        (dict(rows=12 * 1024 + 1, widths=(11 * 256,)), 2),
        (dict(rows=1024, widths=(60 * 256, 72 * 256)), 4),
        (dict(rows=1024, widths=(60 * 256, 72 * 256 + 1)), 2),
        (dict(rows=1024, widths=(60 * 256 + 1, 72 * 256)), 2),
        (dict(rows=2048, widths=(66 * 256,)), 4),
        (dict(rows=2048, widths=(67 * 256,), piece=2048), 4),
        (dict(rows=2048, widths=(67 * 256,)), 2),
    ],
)
def test_programs_that_share_a_multiprocessor_load_less_ahead(case, stages):
    chosen = tiled(**case)
    assert (chosen.ds_db.columns, chosen.ds_db.warps, chosen.ds_db.stages) == (256, 4, stages)


PRODUCTS = [
    (dict(rows=8192, widths=(4096,)), 256),
    (dict(rows=128, widths=(4096,)), 128),
    (dict(rows=128, widths=(1152,), programs=1), 256),
    (dict(rows=4480, widths=(1152,), programs=4), 128),
    (dict(rows=8192, widths=(256, 3840)), 256),
    (dict(rows=8192, widths=(3840, 128, 128)), 128),
    (dict(rows=8192, widths=(4000, 96)), 128),
    (dict(rows=128, widths=(32768, 256, 768)), 256),
    (dict(rows=128, widths=(256, 512, 32768)), 256),
    (dict(rows=128, widths=(256, 32768, 512)), 256),
    (dict(rows=128, widths=(16640, 256, 256)), 256),
    (dict(rows=128, widths=(256, 256, 16384)), 128),
    (dict(rows=128, widths=(256, 16384, 256)), 128),
]


@pytest.mark.parametrize(("case", "columns"), PRODUCTS)
def test_the_columns_of_a_product_are_those_whose_rounds_take_the_least_time(case, columns):
    blocks = tiled(**case).y
    assert blocks.columns == columns
    assert (blocks.inner_size, blocks.stages, blocks.group, blocks.warps) == (
        64,
        3 if columns == 256 else 4,
        8,
        8,
    )
    assert blocks.programs == case.get("programs", 132)


BACKWARDS = [
    (8192, 4096, 256, 128),
    (8192, 4352, 256, 121),
    (128, 64, 128, 1),
    (128, 4096, 128, 32),
    (129, 4096, 128, 64),
    (128, 132 * 128, 128, 132),
    (256, 67 * 256, 128, 90),
    (256, 133 * 256, 128, 107),
]


@pytest.mark.parametrize(("rows", "features", "columns", "programs"), BACKWARDS)
def test_the_product_of_the_backward_takes_no_more_programs_than_its_rounds_need(
    rows, features, columns, programs
):
    blocks = tiled(rows=rows, features=features).dx
    assert (blocks.columns, blocks.programs) == (columns, programs)


@pytest.mark.parametrize(("dtype", "inner"), [(torch.bfloat16, 64), (torch.float32, 32)])
@pytest.mark.parametrize(("columns", "stages"), [(256, 3), (128, 4)])
def test_the_blocks_of_a_product_fit_its_shared_memory(dtype, inner, columns, stages):
    blocks = product_blocks(columns, dtype, 5)
    assert (blocks.columns, blocks.inner_size, blocks.stages, blocks.programs) == (columns, inner, stages, 5)


def test_without_a_gpu_three_programs_take_turns_and_nothing_limits_the_shared_memory():
    chosen = choose_tiling(Rows.empty(1000, 2, CPU), group_of(), 512, HALF)
    assert (chosen.y.programs, chosen.dx.programs) == (3, 3)
    assert chosen.up.columns == 128


@pytest.mark.parametrize(
    ("rank", "block"),
    [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (256, 128)],
)
def test_ranks_go_up_to_a_power_of_two_that_a_tensor_core_takes(rank, block):
    assert rank_block(rank) == block


@pytest.mark.parametrize(
    ("rank", "parts", "together"),
    [(1, 16, 16), (1, 17, 1), (64, 4, 4), (64, 5, 1), (128, 2, 2), (128, 3, 1), (256, 2, 2)],
)
def test_parts_whose_ranks_fit_the_registers_share_programs(rank, parts, together):
    assert parts_per_program(group_of(rank, (64,) * parts)) == together


def test_a_call_counts_its_parts_ranks_slots_and_blocks():
    group, rows = group_of(17, (100, 128, 129)), Rows.empty(64, 5, CPU)
    use = SiteCall(group, rows, True, choose_tiling(rows, group, 64, HALF))
    assert (use.parts, use.ranks, use.slots) == (3, 32, 5)
    assert use.columns == (0, 100, 100, 228, 228, 357)
    assert use.blocks(64) == [2, 2, 3]
    assert use.blocks(128) == [1, 1, 2]
    assert use.plan is ProductPlan.wide
    assert (use.sites, use.bands, use.has_large_ranks) == (3, 1, False)


@pytest.mark.parametrize(
    ("rank", "bands", "ranks", "large"),
    [(64, 1, 64, False), (65, 1, 128, True), (128, 1, 128, True), (129, 2, 128, True), (300, 3, 128, True)],
)
def test_a_rank_above_a_band_is_several_parts_of_a_site(rank, bands, ranks, large):
    group, rows = group_of(rank, (100, 128)), Rows.empty(64, 5, CPU)
    use = SiteCall(group, rows, True, choose_tiling(rows, group, 64, HALF))
    assert (use.sites, use.bands, use.parts, use.ranks) == (2, bands, 2 * bands, ranks)
    assert use.has_large_ranks == large
    assert (
        use.tiling.down.parts_per_program,
        use.tiling.da.parts_per_program,
        use.tiling.ds.parts_per_program,
    ) == (2, 2, 1)
    assert use.tiling.reads_dy_once == (rank <= 64)


def test_an_order_says_whether_it_fuses_and_what_is_made_beside():
    assert [plan for plan in ProductPlan if plan.is_fused] == [ProductPlan.fused, ProductPlan.fused_beside]
    assert [plan for plan in ProductPlan if plan.uses_side_stream] == [
        ProductPlan.wide_beside,
        ProductPlan.fused_beside,
    ]


WIDE, FUSED = (ProductPlan.wide, ProductPlan.wide_beside), (ProductPlan.fused, ProductPlan.fused_beside)


@pytest.fixture
def card(monkeypatch):
    """A GPU made for data centres, as torch describes it; its properties may be changed."""
    one = SimpleNamespace(capability=(9, 0), shared_memory_per_block_optin=232_448, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: one.capability)
    device_class._pretended_class.cache_clear()
    yield one
    device_class._pretended_class.cache_clear()


def weight(outputs=128, features=128, apart=136, dtype=HALF, shift=0):
    """Rows that lie further apart than they are wide."""
    return torch.empty(outputs * apart + shift, dtype=dtype)[shift:].view(outputs, apart)[:, :features]


ALLOWED = {
    "a plain case": (weight(), group_of()),
    "rank 64": (weight(), group_of(rank=64)),
    "rank 65": (weight(), group_of(rank=65)),
    "rank 256": (weight(), group_of(rank=256)),
    "parts": (weight(384, 64), group_of(widths=(128, 256))),
    "a part behind 256": (weight(384), group_of(widths=(256, 128))),
    "float16": (weight(dtype=torch.float16), group_of()),
}
REFUSED = {
    "float32": (weight(dtype=torch.float32), group_of()),
    "a part behind 64": (weight(), group_of(widths=(64, 64))),
    "a part behind 127": (weight(), group_of(widths=(127, 1))),
    "a part behind 129": (weight(136), group_of(widths=(129, 7))),
    "rows that are not whole 16 bytes apart": (weight(apart=132), group_of()),
    "a transposed weight": (torch.empty(128, 128, dtype=HALF).T, group_of()),
    "outputs that are no eights": (weight(132), group_of()),
    "inputs that are no eights": (weight(features=132), group_of()),
    "an address that is no multiple of 16": (weight(shift=4), group_of()),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_product_of_our_own_is_allowed_where_the_copy_engines_take_it(name, card):
    assert supported_plans(*ALLOWED[name], CUDA) == (*WIDE, *FUSED)
    assert candidate_plans(*ALLOWED[name], CUDA) == FUSED


@pytest.mark.parametrize("name", REFUSED)
def test_elsewhere_the_librarys_product_is_taken(name, card):
    assert supported_plans(*REFUSED[name], CUDA) == WIDE
    assert candidate_plans(*REFUSED[name], CUDA) == WIDE


@pytest.mark.parametrize(
    ("device", "capability", "shared", "plans"),
    [
        (CUDA, (9, 0), 232_448, FUSED),
        (CUDA, (10, 0), 300_000, FUSED),
        (CUDA, (8, 9), 232_448, WIDE),
        (CUDA, (12, 0), 232_447, WIDE),
        (CPU, (9, 0), 232_448, WIDE),
    ],
)
def test_copy_engines_and_room_are_those_of_gpus_for_data_centres(device, capability, shared, plans, card):
    card.capability, card.shared_memory_per_block_optin = capability, shared
    assert candidate_plans(weight(), group_of(), device) == plans


def test_what_is_lean_keeps_all_but_its_blocks():
    roomy, lean = (tiled(shared=shared, rank=16) for shared in (ROOMY, NARROW))
    kernels = ("down", "up", "ds", "ds_db", "db", "da")
    same = replace(lean, **{name: getattr(roomy, name) for name in (*kernels, "down_splits", "ds_splits")})
    assert same == replace(roomy, down_splits=roomy.down_splits)
    assert {getattr(lean, name).rows for name in kernels} == {64}
