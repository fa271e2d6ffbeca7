"""A check of the header of a GGUF file before anything is made from it.

Lengths and counts in the header are 64-bit numbers, and readers trust them: one flipped bit requests a list
of billions of values or a model of terabytes. Here every length must end within the file, every tensor must
lie in it, and no size of the model may exceed what its tensors have.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Number of a type → bytes per value."""
INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
STRING, ARRAY = 8, 9
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_KEY_BYTES = 65_535
MAX_DIMENSIONS = 4
LENGTHS = ("context_length", "window")
"""Parts of the names of sizes that no tensor has."""
MAX_LENGTH = 2**27


@dataclass(slots=True)
class Header:
    integers: dict[str, int] = field(default_factory=dict)
    """Key → value, for every key whose value is one integer."""
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a tensor → its shape."""

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape in self.tensors.values())

    @property
    def largest(self) -> int:
        return max((prod(shape) for shape in self.tensors.values()), default=0)


def read_header(path: Path) -> Header:
    """Return the header. Raise ValueError with the reason if it cannot be true."""
    if not path.stat().st_size:
        raise ValueError("it is empty (0 bytes); download or copy it again")
    with path.open("rb") as file:
        header = _GgufWalk(file).header()
    _check_sizes(header)
    return header


class _GgufWalk:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin as GGUF files do")
        if (version := self._number(4)) not in VERSIONS:
            raise ValueError(f"its version is {version}, and known are 2 and 3")
        tensors, keys = self._number(8), self._number(8)
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise ValueError(f"it claims {tensors:,} tensors and {keys:,} keys")
        header = Header()
        for _ in range(keys):
            self._key(header)
        places = [self._tensor(header) for _ in range(tensors)]
        if len(header.tensors) < tensors:
            raise ValueError("two of its tensors have the same name")
        self._check_places(places, header.integers.get("general.alignment", 32))
        return header

    def _take(self, size: int) -> bytes:
        self._spend(size)
        return self._file.read(size)

    def _spend(self, size: int) -> None:
        if size > self._left:
            raise ValueError("it ends in the middle of its header; download or copy it again")
        self._left -= size

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, most: int) -> str:
        size = self._number(8)
        if size > most:
            raise ValueError(f"a name in its header claims {size:,} bytes")
        return self._take(size).decode()

    def _key(self, header: Header) -> None:
        name, kind = self._text(MAX_KEY_BYTES), self._number(4)
        if kind in INTEGERS:
            header.integers[name] = int.from_bytes(
                self._take(SIZES[kind]), "little", signed=kind in (1, 3, 5, 11)
            )
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int, within: int = 0) -> None:
        if kind == STRING:
            self._skip(self._number(8))
        elif kind == ARRAY and within < 4:
            inner, count = self._number(4), self._number(8)
            if inner in SIZES:
                self._skip(SIZES[inner] * count)
            elif 8 * count > self._left:
                raise ValueError(f"a list in its header claims {count:,} values")
            else:
                for _ in range(count):
                    self._skip_value(inner, within + 1)
        elif kind in SIZES:
            self._skip(SIZES[kind])
        else:
            raise ValueError(f"its header holds a value of the unknown type {kind}")

    def _skip(self, size: int) -> None:
        self._spend(size)
        self._file.seek(size, os.SEEK_CUR)

    def _tensor(self, header: Header) -> tuple[int, int]:
        """Read the header of a tensor; return where the tensor begins and its number of bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._text(MAX_KEY_BYTES), self._number(4)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name[:80]!r} claims {dimensions} dimensions")
        shape = tuple(self._number(8) for _ in range(dimensions))
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._number(4))]
        if not prod(shape) or prod(shape) % block:
            raise ValueError(f"its tensor {name[:80]!r} has the shape {list(shape)}")
        header.tensors[name] = shape
        return self._number(8), prod(shape) // block * size

    def _check_places(self, places: list[tuple[int, int]], alignment: int) -> None:
        if not 1 <= alignment <= 2**20:
            raise ValueError(f"its alignment is {alignment}")
        room = self._left - -self._file.tell() % alignment
        if any(start % alignment or start + size > room for start, size in places):
            raise ValueError("not all of its tensors lie within the file")


def _check_sizes(header: Header) -> None:
    most = max([len(header.tensors), *(size for shape in header.tensors.values() for size in shape)])
    for name, value in header.integers.items():
        if name.startswith(("general.", "tokenizer.", "quantize.", "split.")):
            continue
        limit = MAX_LENGTH if any(part in name for part in LENGTHS) else most
        if not 0 <= value <= limit:
            raise ValueError(f"its {name} is {value:,}, which its tensors do not have")
