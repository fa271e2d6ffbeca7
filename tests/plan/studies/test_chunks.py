"""Chunks hold every token once, say which earlier chunks they read, and make legal programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.outlooks import ground, outline
from weftune.plan.pack.instance import pack
from weftune.plan.program.check import check
from weftune.plan.program.program import Backward, IllegalProgram
from weftune.plan.studies.chunks import (
    Chunk,
    ChunkPiece,
    chunk_size,
    chunk_units,
    chunked_forecast,
    chunked_program,
    cut_into_chunks,
)
from weftune.plan.studies.placement import cut_stages


def padding(chunks, size):
    """Number of rows that hold no token."""
    return sum(size - chunk.tokens for chunk in chunks)


def allows(chunks, order):
    """Whether every chunk comes once, after all the chunks that it reads."""
    index = {number: at for at, number in enumerate(order)}
    complete = sorted(order) == list(range(len(chunks)))
    return complete and all(
        index[earlier] < index[chunk.number] for chunk in chunks for earlier in chunk.read_chunks
    )


def test_the_size_is_the_greatest_power_of_two_in_all_lengths_but_no_less_than_the_floor():
    assert chunk_size([256, 128, 384]) == 128
    assert chunk_size([64, 128, 256]) == 64
    assert chunk_size([48, 32]) == 64
    assert chunk_size([48, 32], floor=4) == 16
    assert chunk_size([173, 64]) == 64


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5), st.integers(0, 12))
def test_nothing_larger_divides_all_lengths(lengths, power):
    lengths = [length << power for length in lengths]
    size = chunk_size(lengths, floor=1)
    assert all(length % size == 0 for length in lengths)
    assert any(length % (2 * size) for length in lengths)


def test_a_long_sample_goes_on_in_the_next_chunks_which_read_the_earlier_ones():
    found = cut_into_chunks([10, 3, 2], capacity=13, size=4)
    assert found == (
        Chunk(0, (ChunkPiece(0, 0, 4),), ()),
        Chunk(1, (ChunkPiece(0, 4, 8),), (0,)),
        Chunk(2, (ChunkPiece(0, 8, 10), ChunkPiece(1, 0, 2)), (0, 1)),
        Chunk(3, (ChunkPiece(1, 2, 3),), (2,)),
        Chunk(4, (ChunkPiece(2, 0, 2),), ()),
    )
    assert padding(found, 4) == 3 + 2


def test_chunks_of_one_sample_must_run_in_order_and_others_need_not():
    found = cut_into_chunks([8, 4, 4], capacity=8, size=4)
    assert allows(found, [0, 1, 2, 3])
    assert allows(found, [3, 0, 2, 1])
    assert not allows(found, [1, 0, 2, 3])
    assert not allows(found, [0, 1, 2])
    assert not allows(found, [0, 1, 2, 2])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=30), st.sampled_from([4, 16, 64]), st.integers(300, 600))
def test_every_token_is_in_one_chunk_and_only_the_end_of_a_pack_is_padded(lengths, size, capacity):
    found = cut_into_chunks(lengths, capacity, size)
    assert [chunk.number for chunk in found] == list(range(len(found)))
    held = {}
    for chunk in found:
        assert 0 < chunk.tokens <= size
        for piece in chunk.pieces:
            held.setdefault(piece.sample, []).append((piece.start, piece.stop, chunk))
    for sample, length in enumerate(lengths):
        reached = 0
        for start, stop, chunk in held[sample]:
            assert start == reached
            reached = stop
            before = {other.number for begin, _, other in held[sample] if begin < start}
            assert before <= set(chunk.read_chunks)
        assert reached == length
    assert all(earlier < chunk.number for chunk in found for earlier in chunk.read_chunks)
    assert allows(found, range(len(found)))
    assert padding(found, size) < size * max(1, len(pack(lengths, capacity)))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_no_chunk_reads_one_that_holds_nothing_of_its_samples(lengths):
    found = cut_into_chunks(lengths, 300, 64)
    for chunk in found:
        first = chunk.pieces[0].sample
        for earlier in chunk.read_chunks:
            assert first in {piece.sample for piece in found[earlier].pieces}


def test_a_sample_longer_than_the_capacity_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError):
        cut_into_chunks([10], capacity=8, size=4)


PIPE = ground("2xH100")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=5), min_size=1, max_size=2),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([64, 128, 256]),
    st.booleans(),
)
def test_every_token_is_trained_once_in_a_legal_program(jobs, size, together):
    made = [
        replace(outline(f"job{number}", 10), batches=tuple(map(tuple, batches)))
        for number, batches in enumerate(jobs)
    ]
    names = tuple(job.name for job in made)
    groups = (names,) if together else tuple((name,) for name in names)
    units = chunk_units(made, groups, size, 512)
    program = chunked_program(units, size, cut_stages(PIPE, made, 512))
    check(program)
    assert program.chunk_rows == size
    assert sum(one.tokens for one in program.microbatches) == sum(
        sum(batch) for batches in jobs for batch in batches
    )
    assert all(one.rows % size == 0 for one in program.microbatches)
    slices = [one for unit in units for chunk in unit.chunks for one in chunk]
    whole = sum(length**2 for batches in jobs for batch in batches for length in batch)
    assert sum(one.squares for one in slices) == whole, "attention costs what it costs for whole samples"


def test_chunks_that_run_back_in_the_wrong_order_are_illegal():
    job = replace(outline("a", 10), batches=((256,),))
    units = chunk_units([job], (("a",),), 64, 512)
    program = chunked_program(units, 64, cut_stages(PIPE, [job], 512))
    first = program.devices[-1]
    swapped = [one for one in first if isinstance(one, Backward)]
    turned = iter(reversed(swapped))
    wrong = tuple(next(turned) if isinstance(one, Backward) else one for one in first)
    with pytest.raises(IllegalProgram, match="comes before what it sends is computed"):
        check(replace(program, devices=(*program.devices[:-1], wrong)))


def test_one_chunk_to_a_microbatch_costs_what_whole_samples_cost():
    """Samples of one chunk each: nothing is cut, so squares and tokens are those of whole samples."""
    job = replace(outline("a", 10), batches=((512,) * 8,))
    layout = cut_stages(PIPE, [job], 512)
    found = chunked_forecast([job], (("a",),), 512, layout)
    assert found.microbatches == 8
    halves = chunked_forecast([job], (("a",),), 256, layout)
    assert halves.microbatches == 16
    assert halves.busy_seconds > found.busy_seconds, "a pass more costs its launches"
