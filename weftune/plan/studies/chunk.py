"""Chunk-based alignment of one job's global batch (MuxTune 3.5): pack its samples, cut the packs evenly.

A sample that is longer than a chunk goes on in the next ones, which read the keys and values of its earlier
chunks; so chunks of one sample run in order, and their backwards in the opposite one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from weftune.plan.pack.pack import pack

FLOOR = 64
"""Smaller chunks leave a device idle, and read earlier keys and values too often."""


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """The tokens of one sample, from `start` to `stop`, that lie in one chunk."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    number: int
    pieces: tuple[ChunkPiece, ...]
    reads: tuple[int, ...]
    """The chunks whose keys and values it reads: those in which its first sample began and went on."""

    @property
    def tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Alignment:
    """A global batch in chunks of one size, numbered in an order in which they may run."""

    size: int
    chunks: tuple[Chunk, ...]

    @property
    def padding(self) -> int:
        """Rows that hold no token."""
        return sum(self.size - chunk.tokens for chunk in self.chunks)

    def allows(self, order: Sequence[int]) -> bool:
        """Whether every chunk comes once, after all that it reads."""
        place = {number: index for index, number in enumerate(order)}
        complete = sorted(order) == list(range(len(self.chunks)))
        return complete and all(
            place[earlier] < place[chunk.number] for chunk in self.chunks for earlier in chunk.reads
        )


def chunk_size(lengths: Iterable[int], floor: int = FLOOR) -> int:
    """The greatest power of two that divides every length, but at least `floor`."""
    common = gcd(*lengths)
    return max(floor, common & -common)


def align(lengths: Sequence[int], capacity: int, size: int) -> Alignment:
    """The samples of these lengths in packs of at most `capacity`, each cut into chunks of `size`."""
    chunks: list[Chunk] = []
    for samples in pack(lengths, capacity):
        for pieces in _cut(samples, lengths, size):
            # The samples of a pack lie end to end, so only the first piece of a chunk can be a continuation.
            earlier = -(-pieces[0].start // size)
            number = len(chunks)
            chunks.append(Chunk(number, pieces, tuple(range(number - earlier, number))))
    return Alignment(size, tuple(chunks))


def _cut(samples: Sequence[int], lengths: Sequence[int], size: int) -> Iterator[tuple[ChunkPiece, ...]]:
    """The pieces of each chunk of a pack; only the last chunk may be short."""
    pieces: list[ChunkPiece] = []
    room = size
    for sample in samples:
        start = 0
        while start < lengths[sample]:
            stop = min(start + room, lengths[sample])
            pieces.append(ChunkPiece(sample, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield tuple(pieces)
                pieces, room = [], size
    if pieces:
        yield tuple(pieces)
