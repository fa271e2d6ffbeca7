"""Chunks hold every token once, and say which earlier chunks they read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.plan.pack.instance import pack
from weftune.plan.studies.chunk import Chunk, ChunkPiece, align, chunk_size


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
    found = align([10, 3, 2], capacity=13, size=4)
    assert found.chunks == (
        Chunk(0, (ChunkPiece(0, 0, 4),), ()),
        Chunk(1, (ChunkPiece(0, 4, 8),), (0,)),
        Chunk(2, (ChunkPiece(0, 8, 10), ChunkPiece(1, 0, 2)), (0, 1)),
        Chunk(3, (ChunkPiece(1, 2, 3),), (2,)),
        Chunk(4, (ChunkPiece(2, 0, 2),), ()),
    )
    assert found.padding == 3 + 2


def test_chunks_of_one_sample_must_run_in_order_and_others_need_not():
    found = align([8, 4, 4], capacity=8, size=4)
    assert found.allows([0, 1, 2, 3])
    assert found.allows([3, 0, 2, 1])
    assert not found.allows([1, 0, 2, 3])
    assert not found.allows([0, 1, 2])
    assert not found.allows([0, 1, 2, 2])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=30), st.sampled_from([4, 16, 64]), st.integers(300, 600))
def test_every_token_is_in_one_chunk_and_only_the_end_of_a_pack_is_padded(lengths, size, capacity):
    found = align(lengths, capacity, size)
    assert [chunk.number for chunk in found.chunks] == list(range(len(found.chunks)))
    held = {}
    for chunk in found.chunks:
        assert 0 < chunk.tokens <= size
        for piece in chunk.pieces:
            held.setdefault(piece.sample, []).append((piece.start, piece.stop, chunk))
    for sample, length in enumerate(lengths):
        reached = 0
        for start, stop, chunk in held[sample]:
            assert start == reached
            reached = stop
            before = {other.number for begin, _, other in held[sample] if begin < start}
            assert before <= set(chunk.reads)
        assert reached == length
    assert all(earlier < chunk.number for chunk in found.chunks for earlier in chunk.reads)
    assert found.allows(range(len(found.chunks)))
    assert found.padding < size * max(1, len(pack(lengths, capacity)))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_no_chunk_reads_one_that_holds_nothing_of_its_samples(lengths):
    found = align(lengths, 300, 64)
    for chunk in found.chunks:
        first = chunk.pieces[0].sample
        for earlier in chunk.reads:
            assert first in {piece.sample for piece in found.chunks[earlier].pieces}


def test_a_sample_longer_than_the_capacity_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError):
        align([10], capacity=8, size=4)
