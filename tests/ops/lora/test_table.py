"""What the tiled kernels read of a group of sites, and who may be seated there."""

from __future__ import annotations

import zlib

import pytest
import torch

from weftune.ops.lora.table import BAND, Group, LowRank, SlotTable, required_bands

CPU = torch.device("cpu")
SITES = ("model.q", "model.up", "k")


def entry(rank: int = 4, scale: float = 2.0, dropout: float = 0.0) -> LowRank:
    a_RK, b_RN = torch.zeros(rank, 8), torch.zeros(rank, 16)
    return LowRank(a_RK, b_RN, torch.zeros(rank, 8), torch.zeros(rank, 16), scale, dropout)


def test_an_empty_table_seats_nobody_and_knows_its_sites():
    table = SlotTable.empty(SITES, slots=5, device=CPU)
    assert table.rank_PS.tolist() == [[0] * 5] * 3
    assert table.threshold_PS.tolist() == [[-(2**31)] * 5] * 3
    assert [crc & 0xFFFFFFFF for crc in table.crc_P[:-1].tolist()] == [zlib.crc32(s.encode()) for s in SITES]
    assert (table.address_PS4.shape, table.factor_PS2.shape) == ((3, 5, 4), (3, 5, 2))
    assert (table.address_PS4.dtype, table.factor_PS2.dtype) == (torch.int64, torch.float32)
    assert not table.address_PS4.any()
    assert table.is_aligned


def test_a_job_is_seated_at_its_sites_and_nowhere_else():
    table = SlotTable.empty(SITES, slots=3, device=CPU)
    first, last = entry(4, 2.0, 0.5), entry(6, 0.5)
    table.write(1, [first, None, last])
    assert table.rank_PS.tolist() == [[0, 4, 0], [0, 0, 0], [0, 6, 0]]
    for part, one in ((0, first), (2, last)):
        tensors = (one.a_RK, one.b_RN, one.da_RK, one.db_RN)
        assert table.address_PS4[part, 1].tolist() == [tensor.data_ptr() for tensor in tensors]
    assert table.factor_PS2[:, 1].tolist() == [[4.0, 2.0], [0.0, 0.0], [0.5, 0.5]]
    assert table.threshold_PS[:, 1].tolist() == [0, -(2**31), -(2**31)]
    assert not table.address_PS4[:, (0, 2)].any()
    table.write(2, [entry(1), entry(2), entry(3)])
    table.write(1, [None] * 3)
    assert table.rank_PS.tolist() == [[0, 0, 1], [0, 0, 2], [0, 0, 3]]


def test_a_rank_above_a_band_is_seated_in_several_parts_of_whole_rows():
    table = SlotTable.empty(SITES[:2], slots=2, device=CPU, bands=3)
    large, small = entry(2 * BAND + 5, 2.0, 0.5), entry(4)
    table.write(1, [large, small])
    assert table.rank_PS[:, 1].tolist() == [BAND, 4, BAND, 0, 5, 0]
    for band in range(3):
        tensors = (large.a_RK, large.b_RN, large.da_RK, large.db_RN)
        here = [tensor[band * BAND :].data_ptr() for tensor in tensors]
        assert table.address_PS4[2 * band, 1].tolist() == here
        assert table.factor_PS2[2 * band, 1].tolist() == [4.0, 2.0]
        assert table.threshold_PS[2 * band, 1] == 0
    assert table.crc_P[:-1].tolist() == table.crc_P[:2].tolist() * 3
    table.write(1, [entry(BAND), None])
    assert table.rank_PS[:, 1].tolist() == [BAND, 0, 0, 0, 0, 0]
    table.write(1, [None] * 2)
    assert not table.rank_PS.any()
    with pytest.raises(AssertionError):
        table.write(0, [entry(3 * BAND + 1), None])


def test_experts_of_several_bands_are_seated_each_where_its_rows_begin():
    table = SlotTable.empty(SITES[:1], slots=6, device=CPU, bands=2)
    a, b = torch.zeros(3, BAND + 8, 8), torch.zeros(3, BAND + 8, 16)
    stacked = LowRank(a, b, torch.zeros_like(a), torch.zeros_like(b), 2.0, 0.0)
    table.set_experts(3, stacked)
    table.copy_to_device()
    assert table.rank_PS.tolist() == [[0, 0, 0, BAND, BAND, BAND], [0, 0, 0, 8, 8, 8]]
    for band, expert in ((0, 0), (0, 2), (1, 0), (1, 2)):
        here = [matrix[expert, band * BAND :].data_ptr() for matrix in stacked.matrices]
        assert table.address_PS4[band, 3 + expert].tolist() == here


@pytest.mark.parametrize(("rank", "bands"), [(1, 1), (BAND, 1), (BAND + 1, 2), (2 * BAND, 2), (300, 3)])
def test_bands_have_room_for_all_ranks(rank, bands):
    assert required_bands(rank) == bands


def test_addresses_are_those_of_whole_tensors_with_gradients_in_float32():
    sound = entry()
    shifted = LowRank(torch.zeros(33)[1:].view(4, 8), sound.b_RN, sound.da_RK, sound.db_RN, 1.0, 0.0)
    SlotTable.empty(SITES[:1], 1, CPU, aligned=False).write(0, [shifted])
    with pytest.raises(AssertionError):
        SlotTable.empty(SITES[:1], 1, CPU).write(0, [shifted])
    strided = LowRank(torch.zeros(8, 4).T, sound.b_RN, sound.da_RK, sound.db_RN, 1.0, 0.0)
    half = LowRank(sound.a_RK, sound.b_RN, sound.da_RK.bfloat16(), sound.db_RN, 1.0, 0.0)
    for wrong in (strided, half):
        with pytest.raises(AssertionError):
            _ = wrong.addresses
    weights = LowRank(sound.a_RK.bfloat16(), sound.b_RN.bfloat16(), sound.da_RK, sound.db_RN, 1.0, 0.0)
    assert len(weights.addresses) == 4


def test_a_group_seats_whom_its_kernels_can_serve():
    group = Group(((0, 16), (16, 32)), SlotTable.empty(SITES[:2], 2, CPU), rank=4, has_dropout=False)
    group.write(0, [entry(4), None])
    assert group.table.rank_PS.tolist() == [[4, 0], [0, 0]]
    for wrong in (entry(5), entry(4, dropout=0.1)):
        with pytest.raises(AssertionError):
            group.write(1, [None, wrong])
    Group(group.columns, group.table, rank=4, has_dropout=True).write(1, [None, entry(4, dropout=0.1)])
    assert group.table.rank_PS.tolist() == [[4, 0], [0, 4]]
