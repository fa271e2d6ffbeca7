"""Writing of safetensors files directly from the tensors' memory. Nothing large is copied, and other threads
run while a piece is hashed or written."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Piece = bytes | memoryview
PIECE_BYTES = 8 << 20
LARGE_BYTES = 1 << 20
"""Minimum size, in bytes, of a piece of a file that is written without being copied."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
"""Maps each dtype to its name in the safetensors format."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write and sync a file of contiguous host tensors, with the same bytes that safetensors would write."""
    _write_pieces(path, _file_pieces(tensors, metadata))


def write_hashed_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and sync a file like `write_tensors` and return its SHA-256."""
    digest = hashlib.sha256()

    def hash_pieces() -> Iterator[Piece]:
        for piece in _file_pieces(tensors, None):
            digest.update(piece)
            yield piece

    _write_pieces(path, hash_pieces())
    return digest.hexdigest()


def _write_pieces(path: Path, pieces: Iterator[Piece]) -> None:
    with open(path, "wb", buffering=0) as file:
        for piece in _join_small_pieces(pieces):
            _write_whole_piece(file, piece)
        os.fsync(file.fileno())


def _write_whole_piece(file: io.FileIO, piece: Piece) -> None:
    remaining = memoryview(piece)
    while len(remaining):
        remaining = remaining[file.write(remaining) :]


def _join_small_pieces(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join small pieces of a file before they are written. Joining saves time, because a thread releases the
    interpreter lock at every write, and acquiring it again takes longer than copying a matrix of an
    adapter."""
    small: list[Piece] = []
    size = 0
    for piece in pieces:
        if size + len(piece) > PIECE_BYTES:
            yield b"".join(small)
            small, size = [], 0
        if len(piece) >= LARGE_BYTES and not small:
            yield piece
        else:
            small.append(piece)
            size += len(piece)
    yield b"".join(small)


def _file_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[Piece]:
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    yield _build_header(ordered, metadata)
    for _, tensor in ordered:
        content = _tensor_bytes(tensor)
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor without a copy. NumPy is used where possible, since calls into torch
    release the interpreter lock, and an adapter has hundreds of tensors."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    array = (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy()
    return array.reshape(-1).view(np.uint8).data


def _build_header(sorted_tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    """Return the header of a safetensors file: its length in eight bytes, then the tensors' offsets, padded
    to eight bytes."""
    for name, tensor in sorted_tensors:
        assert tensor.is_contiguous(), f"{name} is not contiguous"
    listed = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted_tensors)
    return _cached_header(listed, tuple((metadata or {}).items()))


@lru_cache(maxsize=16)
def _cached_header(
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], metadata: tuple[tuple[str, str], ...]
) -> bytes:
    """Return the header of a safetensors file. Headers are cached, since the adapters of many jobs have equal
    headers."""
    listed: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + math.prod(shape) * dtype.itemsize
        listed[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
