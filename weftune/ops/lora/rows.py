"""The assignment of a microbatch's rows to programs of the tiled LoRA kernels, in device memory.

A slot is the index of a job in the kernels' tables. A run is a range of consecutive rows that belong to one
slot, or to none. Kernels that treat rows separately split runs into tiles; kernels that sum over rows split
runs into longer pieces.

The tensors' sizes and addresses never change. Another microbatch replaces their content by one copy, so that
a captured graph can be replayed for it.

Shapes: T rows of the microbatch, S slots, G tiles, Q pieces, M slots with several pieces, U runs after
cutting, V number of blocks + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from weftune.ops.dropout import to_signed

BLOCK = 128
"""Number of rows per program of the fused product: one instruction of two warp groups multiplies this many
rows."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """A range of rows of a microbatch, from `start` to `stop` − 1, that belongs to the job with the table
    index `slot`."""

    start: int
    stop: int
    slot: int
    key: int
    """Dropout key of the job in this step, which `ops.dropout.step_key` computes from the job's seed and
    step."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The assignment of a microbatch's rows to kernel programs. Its tensors must not change until the
    microbatch's backward is done."""

    tile: int
    piece: int
    max_runs: int
    """Maximum number of runs (ranges of consecutive rows of one job, or of none) for which the tensors have
    room."""
    buffer: Tensor
    tiles_G3: Tensor
    """Tiles (ranges of rows of one job), each as (start, stop, slot), where a slot is the job's table index.
    Tiles have at most `tile` rows and cover all rows. Slot −1 means that the rows have no adapter."""
    pieces_Q4: Tensor
    """Pieces (ranges of rows of one job over which a program sums), each as (start, stop, slot, alone), where
    a slot is the job's table index. Pieces have at most `piece` rows and cover all rows. First come the
    pieces of slots with several pieces, then those of slots with one piece (alone = 1), then those of rows
    without a slot (slot −1)."""
    sums_M3: Tensor
    """Entry (slot, first piece, index after the last piece) for each job, by its table index (slot), whose
    rows are split into several pieces."""
    runs_U3: Tensor
    """Ranges (start, stop, slot) of the rows of all jobs, in order, split at multiples of BLOCK rows. A slot
    is the job's table index."""
    edges_V: Tensor
    """For each block of BLOCK rows, the index of its first entry in `runs_U3`: block b has the entries
    edges[b] to edges[b + 1] − 1."""
    key_S: Tensor
    token_index_T: Tensor

    @staticmethod
    def empty(
        rows: int,
        slots: int,
        device: torch.device,
        tile: int = 64,
        piece: int = 1024,
        max_runs: int | None = None,
    ) -> Rows:
        """Return an assignment for microbatches of up to `rows` rows, all of which are padding at first.
        Kernels have programs for at most `max_runs` runs (ranges of consecutive rows of one job, or of none).
        By default, there may be one run of every job, and rows without a job before, between and after
        these."""
        max_runs = 2 * slots + 1 if max_runs is None else max_runs
        shapes = _row_shapes(rows, slots, tile, piece, max_runs)
        buffer = torch.empty(word_count(shapes), dtype=torch.int32, device=device)
        record = Rows(tile, piece, max_runs, buffer, *split_buffer(buffer, shapes))
        record.fill((), np.zeros(0, dtype=np.int32))
        return record

    @property
    def max_pieces(self) -> int:
        """Maximum total number of pieces (ranges of at most `piece` rows) of all jobs whose rows are split
        into several pieces."""
        return 2 * len(self.sums_M3)

    def fill(self, slot_rows: Sequence[SlotRows], token_index: np.ndarray) -> None:
        """Replace the content by the assignment of another microbatch, which may have fewer rows, in one
        asynchronous copy. `slot_rows` are the rows of each job, and `token_index` has for each row the
        counter from which dropout masks are computed."""
        rows, slots = len(self.token_index_T), len(self.key_S)
        assert len({seat.slot for seat in slot_rows}) == len(slot_rows), (
            "a slot holds one segment of a microbatch"
        )
        shapes = _row_shapes(rows, slots, self.tile, self.piece, self.max_runs)
        host = torch.zeros(len(self.buffer), dtype=torch.int32, pin_memory=self.buffer.is_cuda)
        tiles_G3, pieces_Q4, sums_M3, runs_U3, edges_V, key_S, token_index_T = (
            view.numpy() for view in split_buffer(host, shapes)
        )
        runs = _slot_runs(slot_rows, rows)
        assert len(runs) <= self.max_runs, "more runs of rows than there are programs for"
        tiles = [(*part, run.slot) for run in runs for part in _split_run(run, self.tile)]
        pieces, sums = _row_pieces(runs, self.piece)
        _put_entries(tiles_G3, tiles, (0, 0, -1))
        _put_entries(pieces_Q4, pieces, (0, 0, -1, 0))
        _put_entries(sums_M3, sums, (-1, 0, 0))
        cut = [(*part, run.slot) for run in runs if run.slot >= 0 for part in _cut_run(run)]
        _put_entries(runs_U3, cut, (0, 0, -1))
        edges_V[:] = np.searchsorted([start // BLOCK for start, _, _ in cut], np.arange(len(edges_V)))
        for seat in slot_rows:
            key_S[seat.slot] = to_signed(seat.key)
        token_index_T[: len(token_index)] = token_index
        self.buffer.copy_(host, non_blocking=True)


def _row_shapes(rows: int, slots: int, tile: int, piece: int, max_runs: int) -> list[tuple[int, ...]]:
    return [
        (rows // tile + max_runs, 3),
        (rows // piece + max_runs, 4),
        (max(1, rows // piece), 3),
        (-(-rows // BLOCK) + slots, 3),
        (-(-rows // BLOCK) + 1,),
        (slots,),
        (rows,),
    ]


def _slot_runs(slot_rows: Sequence[SlotRows], rows: int) -> list[SlotRows]:
    """Return runs (ranges of consecutive rows) that cover all rows in order. Rows without a job get the slot
    (table index) −1."""
    runs, row = [], 0
    for seat in sorted((seat for seat in slot_rows if seat.start < seat.stop), key=lambda seat: seat.start):
        assert row <= seat.start, "segments overlap"
        if row < seat.start:
            runs.append(SlotRows(row, seat.start, -1, 0))
        runs.append(seat)
        row = seat.stop
    assert row <= rows, "more rows than the capacity"
    if row < rows:
        runs.append(SlotRows(row, rows, -1, 0))
    return runs


def _split_run(run: SlotRows, max_rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + max_rows, run.stop)) for start in range(run.start, run.stop, max_rows)]


def _cut_run(run: SlotRows) -> list[tuple[int, int]]:
    """Split a range of rows at the multiples of BLOCK, and return (start, stop) of each part."""
    edges = [run.start, *range(run.start // BLOCK * BLOCK + BLOCK, run.stop, BLOCK), run.stop]
    return list(pairwise(edges))


def _row_pieces(
    runs: Sequence[SlotRows], max_rows: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Split the runs (ranges of rows of one job) into pieces of at most `max_rows` rows. Return the entries
    of `Rows.pieces_Q4` and of `Rows.sums_M3`."""
    split_pieces: list[tuple[int, ...]] = []
    single_pieces: list[tuple[int, ...]] = []
    unassigned_pieces: list[tuple[int, ...]] = []
    sums: list[tuple[int, ...]] = []
    for run in runs:
        parts = _split_run(run, max_rows)
        if run.slot < 0:
            unassigned_pieces += [(*part, -1, 0) for part in parts]
        elif len(parts) == 1:
            single_pieces += [(*part, run.slot, 1) for part in parts]
        else:
            sums.append((run.slot, len(split_pieces), len(split_pieces) + len(parts)))
            split_pieces += [(*part, run.slot, 0) for part in parts]
    return split_pieces + single_pieces + unassigned_pieces, sums


def _put_entries(
    target: np.ndarray, entries: Sequence[tuple[int, ...]], padding_entry: tuple[int, ...]
) -> None:
    target[:] = padding_entry
    if entries:
        target[: len(entries)] = entries


def word_count(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of 32-bit words of a buffer that holds arrays of the given shapes."""
    return sum(map(_padded_word_count, shapes))


def split_buffer(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return consecutive views with these shapes into a buffer of 32-bit words, which must have the size that
    `word_count` returns."""
    parts = buffer.split([_padded_word_count(shape) for shape in shapes])
    return tuple(part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True))


def _padded_word_count(shape: tuple[int, ...]) -> int:
    """Return the number of 32-bit words that a view takes in the buffer, rounded up to 16 bytes. All views
    are then aligned: Triton compiles a separate kernel for every combination of aligned arguments."""
    return -(-math.prod(shape) // 4) * 4
