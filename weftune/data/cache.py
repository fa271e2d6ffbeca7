"""Tokenised samples on disk: written as a stream, checked by checksum, read as memory maps.

A store is a folder that appears under its final name only when it is complete, so several processes may build
the same one at once: the first to finish wins and the others use its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from weftune.data.tally import Tally
from weftune.errors import OutputError

ARRAYS = {"tokens": "<i4", "mask": "|b1", "lengths": "<i4", "supervised": "<i4", "rows": "<u8"}
"""Maps each file to its dtype: tokens and mask end to end; length, supervised tokens and row hash per
sample."""
META = "store.json"
PIECE = 2**20
FORGOTTEN_AFTER = 24 * 3600


@dataclass(frozen=True, slots=True)
class SampleStore:
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int32]
    supervised: NDArray[np.int32]
    rows: NDArray[np.uint64]
    tally: Tally


def open_store(folder: Path) -> SampleStore | None:
    """Return the store, or None if it does not exist or any byte differs from what was written."""
    try:
        meta = json.loads((folder / META).read_bytes())
        body = meta["body"]
        if meta["checksum"] != zlib.crc32(_body(body)):
            return None
        for name in ARRAYS:
            if _checksum(folder / name) != body["checksums"][name]:
                return None
        arrays = {name: _map(folder / name, kind) for name, kind in ARRAYS.items()}
        return SampleStore(tally=Tally(**body["tally"]), **arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _body(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _map(path: Path, kind: str) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return value


class StoreWriter:
    """Append samples to a folder with a temporary name; `commit` renames it to its final name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(ARRAYS, 0)

    def __enter__(self) -> StoreWriter:
        with _disk(self._folder.parent):
            self._making.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._folder)
            self._making.mkdir()
            for name in ARRAYS:
                self._files[name] = (self._making / name).open("wb", buffering=PIECE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._making, ignore_errors=True)

    def add(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_], row: int) -> None:
        self._append("tokens", tokens)
        self._append("mask", mask)
        self._append("lengths", len(tokens))
        self._append("supervised", int(mask[1:].sum()))
        self._append("rows", row)

    def extend(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Append many samples at once. Maps each file name to the values to append."""
        for name in ARRAYS:
            self._append(name, arrays[name])

    def _append(self, name: str, values: Any) -> None:
        data = np.asarray(values, dtype=ARRAYS[name]).tobytes()
        self._checksums[name] = zlib.crc32(data, self._checksums[name])
        with _disk(self._folder.parent):
            self._files[name].write(data)

    def commit(self, tally: Tally) -> None:
        body = {"checksums": self._checksums, "tally": asdict(tally)}
        with _disk(self._folder.parent):
            for file in self._files.values():
                _settle(file)
                file.close()
            with (self._making / META).open("wb") as file:
                file.write(json.dumps({"body": body, "checksum": zlib.crc32(_body(body))}).encode())
                _settle(file)
            _settle_folder(self._making)
            self._publish()
            _settle_folder(self._folder.parent)

    def _publish(self) -> None:
        for _ in range(3):
            try:
                os.rename(self._making, self._folder)
                return
            except OSError:
                if open_store(self._folder) is not None:
                    return  # another builder was faster, and its store is whole
                _discard(self._folder)
        os.rename(self._making, self._folder)


def _discard(folder: Path) -> None:
    """Remove a store by renaming it first, so that no process sees a half-deleted store."""
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove old temporary folders that killed builders of this store left behind."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > FORGOTTEN_AFTER:
                shutil.rmtree(left, ignore_errors=True)


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _settle_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(f"the cache folder {folder} cannot be written: {problem.strerror}") from problem
