"""Chunk-based alignment of one job's global batch (MuxTune 3.5): its samples are packed and the packs cut
evenly.

A sample that is longer than a chunk continues in the next ones, which read the keys and values of its earlier
chunks; therefore chunks of one sample run in order, and their backwards in the opposite order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from weftune.plan.pack.instance import pack

FLOOR = 64
"""Smallest chunk size: smaller chunks leave a device idle, and read earlier keys and values too often."""


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """Tokens `start` to `stop` of one sample, which lie in one chunk."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    number: int
    pieces: tuple[ChunkPiece, ...]
    reads: tuple[int, ...]
    """Chunks whose keys and values it reads: the earlier chunks of its first sample."""

    @property
    def tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Alignment:
    """A global batch in chunks of one size, numbered in a valid execution order."""

    size: int
    chunks: tuple[Chunk, ...]

    @property
    def padding(self) -> int:
        """Number of rows that hold no token."""
        return sum(self.size - chunk.tokens for chunk in self.chunks)

    def allows(self, order: Sequence[int]) -> bool:
        """Return whether every chunk comes once, after all the chunks that it reads."""
        place = {number: index for index, number in enumerate(order)}
        complete = sorted(order) == list(range(len(self.chunks)))
        return complete and all(
            place[earlier] < place[chunk.number] for chunk in self.chunks for earlier in chunk.reads
        )


def chunk_size(lengths: Iterable[int], floor: int = FLOOR) -> int:
    """Return the greatest power of two that divides every length, but at least `floor`."""
    common = gcd(*lengths)
    return max(floor, common & -common)


def align(lengths: Sequence[int], capacity: int, size: int) -> Alignment:
    """Return the samples of these lengths in packs of at most `capacity`, each cut into chunks of `size`."""
    chunks: list[Chunk] = []
    for samples in pack(lengths, capacity):
        for pieces in _cut(samples, lengths, size):
            # The samples of a pack are contiguous, so only the first piece of a chunk can be a continuation.
            earlier = -(-pieces[0].start // size)
            number = len(chunks)
            chunks.append(Chunk(number, pieces, tuple(range(number - earlier, number))))
    return Alignment(size, tuple(chunks))


def _cut(samples: Sequence[int], lengths: Sequence[int], size: int) -> Iterator[tuple[ChunkPiece, ...]]:
    """Yield the pieces of each chunk of a pack; only the last chunk may be short."""
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
