"""Stores of tokenised samples on disk: written as a stream, verified by checksum, read as memory maps.

A store is a folder that gets its final name only when it is complete, so several processes may build the same
one at once: the first to finish wins and the others use its result.
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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from weftune.core.files import sync_folder
from weftune.errors import OutputError

ARRAYS = {
    "tokens": "<i4",
    "mask": "|b1",
    "lengths": "<i4",
    "supervised": "<i4",
    "rows": "<u8",
    "desirable": "|b1",
}
"""Maps the name of each array of a store of samples, which is also the name of its file, to the dtype of its
values. `tokens` and `mask` concatenate those of all samples; all other arrays have one value per sample."""
META = "store.json"
CHUNK_BYTES = 2**20
STALE_AFTER_SECONDS = 24 * 3600


@dataclass(slots=True)
class Tally:
    """Counts of the rows of one table by outcome, such as skipped or truncated."""

    rows: int = 0
    skipped: int = 0
    truncated: int = 0
    split: int = 0
    parted: int = 0
    endless: int = 0
    merged: int = 0
    control: int = 0
    untold: int = 0
    parted_prompts: int = 0
    reasons: list[str] = field(default_factory=list)
    """Locations and reasons of the first skipped rows."""
    explained: int = 0
    """Number of the skipped rows that the sentences in `reasons` explain."""

    def add(self, other_tally: Tally) -> None:
        """Add the counts of `other_tally` to the counts of this object. The reasons are not added; the caller
        merges them."""
        for one in fields(self):
            if one.type == "int":
                setattr(self, one.name, getattr(self, one.name) + getattr(other_tally, one.name))

    def notes(self, label: str | None, max_tokens: int) -> list[str]:
        """Return a sentence for the user for each outcome that occurred, such as skipped or truncated rows.
        `label` is the name of the table, given if there are several tables."""
        count = f"of {self.rows} rows" + (f" of {label}" if label is not None else "")
        notes = []
        if self.skipped:
            more = f"; and {self.skipped - self.explained} more" if self.skipped > self.explained else ""
            notes.append(f"{self.skipped} {count} were skipped: {'; '.join(self.reasons)}{more}.")
        if self.truncated:
            notes.append(f"{self.truncated} {count} were truncated to {max_tokens} tokens.")
        if self.split:
            notes.append(
                f"In {self.split} {count} each assistant turn became its own sample, because the chat "
                "template prints earlier turns differently once the conversation continues."
            )
        if self.parted:
            notes.append(
                f"In {self.parted} {count} the chat template's generation prompt is not what it prints "
                "before a finished turn; the turn is supervised from where they part."
            )
        if self.endless:
            notes.append(
                f"In {self.endless} {count} the chat template ends an assistant turn without an end-of-turn "
                "token, so the model does not learn to stop with one."
            )
        if self.merged:
            notes.append(
                f"In {self.merged} {count} one token holds the end of the prompt and the beginning of an "
                "answer; it is supervised, but at inference the prompt ends with other tokens."
            )
        if self.parted_prompts:
            notes.append(
                f"In {self.parted_prompts} {count} the end of the prompt has other tokens once an answer "
                "follows; the answers are supervised from where they part."
            )
        if self.control:
            notes.append(f"{self.control} {count} contain the text of a control token, which stays text.")
        if self.untold:
            notes.append(f"{self.untold} {count} have tools, but the chat template does not print tools.")
        return notes


@dataclass(frozen=True, slots=True)
class SampleStore:
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int32]
    supervised: NDArray[np.int32]
    rows: NDArray[np.uint64]
    tally: Tally
    key: str = ""
    """Hash of everything that determines the samples. It is the name of the store's folder."""
    desirable: NDArray[np.bool_] | None = None
    """For each sample, whether its answer is desirable. None if answers have no labels."""


def open_store(folder: Path) -> SampleStore | None:
    """Return the store of tokenised samples in `folder`. None if it does not exist or any byte differs from
    what was written."""
    try:
        meta = json.loads((folder / META).read_bytes())
        body = meta["body"]
        if meta["checksum"] != zlib.crc32(_encode_body(body)):
            return None
        for name in ARRAYS:
            if _checksum(folder / name) != body["checksums"][name]:
                return None
        arrays = {name: _map_array(folder / name, kind) for name, kind in ARRAYS.items()}
        return SampleStore(tally=Tally(**body["tally"]), key=folder.name, **arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _encode_body(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _map_array(path: Path, kind: str) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=kind)
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            value = zlib.crc32(piece, value)
    return value


class StoreWriter:
    """A writer that appends tokenised samples to the files of a store in a temporary folder. `commit` renames
    the folder to its final name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial_folder = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(ARRAYS, 0)

    def __enter__(self) -> StoreWriter:
        with _wrap_disk_errors(self._folder.parent):
            self._partial_folder.parent.mkdir(parents=True, exist_ok=True)
            for old in self._folder.parent.glob(f".{self._folder.name}.*"):
                with contextlib.suppress(OSError):  # left behind by a builder that was killed
                    if time.time() - old.stat().st_mtime > STALE_AFTER_SECONDS:
                        shutil.rmtree(old, ignore_errors=True)
            self._partial_folder.mkdir()
            for name in ARRAYS:
                self._files[name] = (self._partial_folder / name).open("wb", buffering=CHUNK_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._partial_folder, ignore_errors=True)

    def extend(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Append samples to the store. `arrays` maps the name of each of the store's arrays to the values to
        append."""
        for name, dtype in ARRAYS.items():
            data = np.asarray(arrays[name], dtype=dtype).tobytes()
            self._checksums[name] = zlib.crc32(data, self._checksums[name])
            with _wrap_disk_errors(self._folder.parent):
                self._files[name].write(data)

    def commit(self, tally: Tally) -> None:
        body = {"checksums": self._checksums, "tally": asdict(tally)}
        with _wrap_disk_errors(self._folder.parent):
            for file in self._files.values():
                _flush_to_disk(file)
                file.close()
            with (self._partial_folder / META).open("wb") as file:
                file.write(json.dumps({"body": body, "checksum": zlib.crc32(_encode_body(body))}).encode())
                _flush_to_disk(file)
            sync_folder(self._partial_folder)
            self._move_into_place()
            sync_folder(self._folder.parent)

    def _move_into_place(self) -> None:
        for _ in range(3):
            try:
                os.rename(self._partial_folder, self._folder)
                return
            except OSError:
                if open_store(self._folder) is not None:
                    return  # another builder was faster, and its store is whole
                # Rename the broken store first, so that no process sees a half-deleted one.
                aside = self._folder.parent / f".{self._folder.name}.{uuid.uuid4().hex}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._folder, aside)
                shutil.rmtree(aside, ignore_errors=True)
        os.rename(self._partial_folder, self._folder)


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _wrap_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise OutputError(f"the cache folder {folder} cannot be written: {problem.strerror}") from problem
