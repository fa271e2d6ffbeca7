"""How rows are dealt out to programs, and the dropout keys that travel with them."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from weftune.ops.lora.rows import BLOCK, Rows, SlotRows, split_buffer, word_count


def test_tiles_and_pieces_cover_every_row_once():
    rows = Rows.empty(200, slots=4, device=torch.device("cpu"), tile=16, piece=32)
    rows.fill([SlotRows(3, 100, 2, 5), SlotRows(100, 103, 0, 6), SlotRows(110, 150, 3, 7)], np.arange(150))
    covered = torch.zeros(200, dtype=torch.int64)
    owner = torch.full((200,), -2)
    for start, stop, slot in rows.tiles_G3.tolist():
        assert 0 <= stop - start <= 16
        covered[start:stop] += 1
        owner[start:stop] = slot
    assert (covered == 1).all()
    seen = torch.full((200,), -2)
    for start, stop, slot, alone in rows.pieces_Q4.tolist():
        assert 0 <= stop - start <= 32
        assert (seen[start:stop] == -2).all()
        seen[start:stop] = slot
        assert alone == int(slot == 0)
    assert torch.equal(seen, owner)
    assert owner[3:100].eq(2).all()
    assert owner[150:].eq(-1).all()
    pieces = rows.pieces_Q4[:, 2].tolist()
    sums = [entry for entry in rows.sums_M3.tolist() if entry[0] >= 0]
    assert [(slot, pieces[first:end]) for slot, first, end in sums] == [(2, [2] * 4), (3, [3] * 2)]
    assert max(end for _, _, end in sums) <= rows.max_pieces
    assert rows.key_S.tolist() == [6, 0, 5, 7]
    assert rows.token_index_T.tolist() == [*range(150), *([0] * 50)]


def test_runs_cover_the_rows_of_jobs_and_every_block_knows_its_own():
    rows = Rows.empty(600, slots=4, device=torch.device("cpu"))
    seats = [
        SlotRows(3, 100, 2, 5),
        SlotRows(100, 103, 0, 6),
        SlotRows(110, 128, 3, 7),
        SlotRows(384, 590, 1, 8),
    ]
    rows.fill(seats, np.arange(590))
    owner = torch.full((600,), -1)
    for seat in seats:
        owner[seat.start : seat.stop] = seat.slot
    seen = torch.full((600,), -1)
    edges = rows.edges_V.tolist()
    assert edges == [0, 3, 3, 3, 4, 5]
    for block, (first, end) in enumerate(pairwise(edges)):
        for start, stop, slot in rows.runs_U3[first:end].tolist():
            assert block * BLOCK <= start < stop <= (block + 1) * BLOCK
            assert (seen[start:stop] == -1).all()
            seen[start:stop] = slot
    assert torch.equal(seen, owner)


def test_the_worst_segmentation_fits_its_records():
    rows = Rows.empty(257, slots=8, device=torch.device("cpu"), tile=16, piece=32)
    rows.fill([SlotRows(1 + 32 * s, 32 * s + 32 - s % 2, s, s) for s in range(8)], np.arange(257))
    rows.fill([SlotRows(33 * s, 33 * s + 33, s, s) for s in range(7)], np.arange(257))
    assert rows.sums_M3[:, 0].tolist()[:7] == list(range(7))
    rows = Rows.empty(300, slots=8, device=torch.device("cpu"))
    rows.fill(
        [SlotRows(s, s + 1, s, s) for s in range(6)] + [SlotRows(6, 200, 6, 0), SlotRows(200, 300, 7, 0)],
        np.arange(300),
    )
    assert rows.edges_V[-1] == len(rows.runs_U3) - 1


def test_overlapping_segments_are_a_bug():
    rows = Rows.empty(64, slots=2, device=torch.device("cpu"))
    with pytest.raises(AssertionError, match="overlap"):
        rows.fill([SlotRows(0, 20, 0, 0), SlotRows(10, 30, 1, 0)], np.arange(30))


def test_what_no_job_uses_is_marked_as_nobodys():
    rows = Rows.empty(10, slots=2, device=torch.device("cpu"), tile=4, piece=4)
    rows.fill([SlotRows(2, 8, 1, 2**32 - 1)], np.arange(8))
    assert rows.tiles_G3.tolist() == [[0, 2, -1], [2, 6, 1], [6, 8, 1], [8, 10, -1]] + [[0, 0, -1]] * 3
    assert rows.pieces_Q4.tolist() == [
        *([2, 6, 1, 0], [6, 8, 1, 0], [0, 2, -1, 0], [8, 10, -1, 0]),
        *([[0, 0, -1, 0]] * 3),
    ]
    assert rows.sums_M3.tolist() == [[1, 0, 2], [-1, 0, 0]]
    assert rows.runs_U3.tolist() == [[2, 8, 1], [0, 0, -1], [0, 0, -1]]
    assert rows.edges_V.tolist() == [0, 1]
    assert rows.key_S.tolist() == [0, -1]
    assert rows.max_pieces == 4


def test_a_microbatch_that_fills_the_capacity_leaves_nobodys_rows_out_and_one_beyond_is_a_bug():
    rows = Rows.empty(8, slots=2, device=torch.device("cpu"), tile=8, piece=8)
    assert rows.tiles_G3.tolist() == [[0, 8, -1]] + [[0, 0, -1]] * 5
    assert rows.sums_M3.tolist() == [[-1, 0, 0]]
    rows.fill(
        [
            SlotRows(4, 8, 0, 1),
            SlotRows(0, 4, 1, 2),
        ],
        np.arange(8),
    )
    assert rows.tiles_G3.tolist() == [[0, 4, 1], [4, 8, 0]] + [[0, 0, -1]] * 4
    assert rows.pieces_Q4.tolist() == [[0, 4, 1, 1], [4, 8, 0, 1]] + [[0, 0, -1, 0]] * 4
    with pytest.raises(AssertionError, match="more rows than the capacity"):
        rows.fill([SlotRows(0, 9, 0, 1)], np.arange(8))
    with pytest.raises(AssertionError, match="a slot holds one segment"):
        rows.fill([SlotRows(0, 2, 0, 1), SlotRows(2, 4, 0, 1)], np.arange(8))
    rows.fill([SlotRows(3, 3, 0, 7)], np.arange(0))
    assert (rows.tiles_G3[0].tolist(), rows.key_S.tolist()) == ([0, 8, -1], [7, 0])


def test_tiles_have_64_rows_and_pieces_1024_where_nobody_says_otherwise():
    rows = Rows.empty(2100, slots=1, device=torch.device("cpu"))
    rows.fill([SlotRows(0, 2100, 0, 1)], np.arange(2100))
    assert (rows.tile, rows.piece) == (64, 1024)
    assert rows.pieces_Q4.tolist()[:3] == [[0, 1024, 0, 0], [1024, 2048, 0, 0], [2048, 2100, 0, 0]]
    assert rows.tiles_G3.tolist()[:2] == [[0, 64, 0], [64, 128, 0]]
    assert [len(one) for one in (rows.tiles_G3, rows.pieces_Q4, rows.sums_M3)] == [35, 5, 2]
    assert [len(one) for one in (rows.runs_U3, rows.edges_V)] == [18, 18]
    assert Rows.empty(10, slots=1, device=torch.device("cpu")).sums_M3.tolist() == [[-1, 0, 0]]


def test_a_segment_without_rows_has_no_run_and_no_sum():
    rows = Rows.empty(8, slots=2, device=torch.device("cpu"), tile=8, piece=8)
    rows.fill([SlotRows(3, 3, 0, 7), SlotRows(4, 6, 1, 9)], np.arange(8))
    assert rows.runs_U3.tolist() == [[4, 6, 1], [0, 0, -1], [0, 0, -1]]
    assert rows.sums_M3.tolist() == [[-1, 0, 0]]
    assert rows.pieces_Q4.tolist()[:3] == [[4, 6, 1, 1], [0, 4, -1, 0], [6, 8, -1, 0]]
    assert rows.edges_V.tolist() == [0, 1]


def test_every_part_of_a_buffer_begins_at_a_multiple_of_16_bytes_and_takes_no_more_than_that():
    assert [word_count([(count,)]) for count in (0, 1, 3, 4, 5, 8, 9)] == [0, 4, 4, 4, 8, 8, 12]
    shapes = [(1, 3), (5,), (2, 2), (7,)]
    assert word_count(shapes) == 4 + 8 + 4 + 8
    parts = split_buffer(torch.arange(word_count(shapes), dtype=torch.int32), shapes)
    assert [tuple(part.shape) for part in parts] == shapes
    assert [part.flatten()[0].item() for part in parts] == [0, 4, 12, 16]
