"""Safetensors files, written piece by piece from where the tensors lie. Nothing is copied, and other threads
run while a piece is hashed or written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

Piece = bytes | memoryview
PIECE_BYTES = 8 << 20
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The names that the format has for them."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write and sync a file of contiguous tensors on the host, byte for byte as safetensors would."""
    _write(path, _pieces(tensors, metadata))


def write_hashed_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The same; returns the file's SHA-256."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[Piece]:
        for piece in _pieces(tensors, None):
            digest.update(piece)
            yield piece

    _write(path, hashed())
    return digest.hexdigest()


def _write(path: Path, pieces: Iterator[Piece]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[Piece]:
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    yield _header(ordered, metadata)
    for _, tensor in ordered:
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    """Its own length in eight bytes, then where each tensor lies behind it, padded to eight bytes."""
    listed: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in ordered:
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        stop = start + tensor.nbytes
        listed[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
