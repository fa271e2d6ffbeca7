"""Conversion of GGUF files to ordinary model folders. A file is converted once, and the folder is kept in the
cache.

Transformers takes half a minute to read a GGUF file and loses a part of its tokenizer; the folder loads in a
second, with a complete tokenizer. The header of a file is checked first: its lengths and counts are 64-bit
numbers that readers trust, and one flipped bit can request a list of billions of values or a model of
terabytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from weftune.core.files import cache_folder, set_file_modes
from weftune.errors import BaseModelError, MissingPackage, UserError

FORMAT = 1
"""Version number of converted folders, which is part of every cache key. Increase it when a conversion writes
different files than before."""

CHECKSUMS = "checksums.json"
"""Name of the file with the checksums of all other files of a converted folder."""
PIECE_BYTES = 16 * 2**20

SINGLE_DIGITS = frozenset({"smollm", "starcoder"})
"""Values of the GGUF key `tokenizer.ggml.pre` for which every digit is a separate token. Transformers loses
this rule when it converts the tokenizer."""
BYTE_LEVEL = frozenset({"", "default", "gpt-2"})
"""Values of the GGUF key `tokenizer.ggml.pre` for which the pre-tokenizer has no other rule than splitting
into bytes."""

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Maps the number of a GGUF value type to bytes per value."""
INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
STRING, ARRAY = 8, 9
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_KEY_BYTES = 65_535
MAX_DIMENSIONS = 4
LENGTH_KEYS = ("context_length", "window")
"""Substrings of the names of those keys of a GGUF header whose values are lengths in tokens, not dimensions
of a tensor."""
MAX_LENGTH = 2**27


def convert_cached(file: Path) -> Path:
    """Return the model folder converted from a GGUF file. The folder is kept in the cache."""
    if not file.is_file():
        raise BaseModelError(f"There is no GGUF file {file}.")
    return convert_into(cache_folder() / "gguf" / f"{file.stem}-{fingerprint(file)}", file)


def fingerprint(file: Path) -> str:
    """Return a hash of a GGUF file's size, modification time and first MiB. Hashing the whole file would be
    too slow."""
    status = file.stat()
    with file.open("rb") as stream:
        start = hashlib.sha256(stream.read(1 << 20)).hexdigest()
    return hashlib.sha256(f"{FORMAT} {status.st_size} {status.st_mtime_ns} {start}".encode()).hexdigest()[:16]


def convert_into(folder: Path, file: Path) -> Path:
    """Convert the GGUF file `file` into the model folder `folder`, unless this exists and is intact. If
    several processes convert the file, the first one to rename its folder wins, and no process sees an
    incomplete folder."""
    bad = find_damaged_file(folder) if folder.is_dir() else ""
    if folder.is_dir() and not bad:
        return folder
    if bad:
        print(f"weftune: {folder / bad} is damaged; {file.name} is converted again.", file=sys.stderr)
        delete_gguf_cache(folder)
    unfinished = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        write_folder(file, unfinished)
        set_file_modes(unfinished)
        record = {path.name: file_checksums(path) for path in sorted(unfinished.iterdir())}
        (unfinished / CHECKSUMS).write_text(json.dumps(record))
        flush_to_disk(unfinished / CHECKSUMS)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def find_damaged_file(folder: Path) -> str:
    """Return the name of a file of a converted folder whose checksum does not match, or "" if all files are
    intact. All bytes are read, which also caches them for loading. A folder without checksums counts as
    damaged."""
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        return _find_damaged(folder, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    except OSError:
        return CHECKSUMS


@cache
def _find_damaged(folder: Path, file_states: tuple[tuple[str, int, int], ...]) -> str:
    """Return the name of a damaged file of a converted folder, or "" if all files are intact. The result is
    cached until `file_states`, the name, size and modification time of each file, changes."""
    try:
        record = json.loads((folder / CHECKSUMS).read_bytes())
        if not {"config.json", "model.safetensors"} <= record.keys():
            return CHECKSUMS
        bad = [name for name, sums in record.items() if file_checksums(folder / name) != sums]
        return bad[0] if bad else ""
    except (OSError, ValueError, AttributeError):
        return CHECKSUMS


def file_checksums(path: Path) -> list[int]:
    """Return the CRC32 checksum of each piece of PIECE_BYTES bytes of a file. Threads compute them in
    parallel."""

    def checksum(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(PIECE_BYTES))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(checksum, range(0, path.stat().st_size, PIECE_BYTES)))


def delete_gguf_cache(folder: Path) -> None:
    """Delete a converted folder. The folder is renamed first, so that no process finds it half deleted."""
    aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def write_folder(file: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise MissingPackage(f"Reading {file.name} needs the package gguf: pip install gguf") from None
    with wrap_read_errors(file), cache_reads(gguf):
        refuse_oversized_header(file)
        field = gguf.GGUFReader(file).fields.get("tokenizer.ggml.pre")
        pre_tokenizer = "" if field is None else str(field.contents())
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        restore_tokenizer_rule(tokenizer, pre_tokenizer, file)
        tokenizer.save_pretrained(folder)
        write_model(model, folder)
    for path in folder.iterdir():
        flush_to_disk(path)


@contextmanager
def wrap_read_errors(file: Path) -> Iterator[None]:
    """Within the context, replace any exception due to a damaged file, including a panic of the tokenizer's
    Rust code, by a BaseModelError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BaseModelError(f"The GGUF file {file} cannot be read: {reason}") from error


def refuse_oversized_header(file: Path) -> None:
    """Raise ValueError if the header of a GGUF file describes a larger model than the file's tensors."""
    sizes = [prod(shape) for shape in read_header(file).tensors.values()]
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # An output layer tied to the embedding is in the file only once.
    if sum(value.numel() for value in model.parameters()) > sum(sizes) + max(sizes, default=0):
        raise ValueError("its header describes a larger model than its tensors make")


@contextmanager
def cache_reads(gguf: Any) -> Iterator[None]:
    """Cache the parsed GGUF file and a model's tensor names within the context. Otherwise transformers parses
    the file for the tokenizer, the config and the weights, which takes seconds each time, and lists the
    tensor names again for every module."""
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map

    class PlainReader(reader):  # type: ignore[misc, valid-type]
        """A GGUF reader that keeps the file's data as a plain array, since a million slices of a memory map
        are slow."""

        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, np.asarray(value) if key == "data" else value)

    read = cache(PlainReader)
    gguf.GGUFReader = lambda path: read(os.fspath(path))
    gguf.get_tensor_name_map = cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's config and weights to a folder. `save_pretrained` refuses models read from GGUF
    files."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    # `named_parameters` yields a tied weight once, under the name that loading expects.
    weights = {name: narrow_weight(weight.detach()).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def restore_tokenizer_rule(tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str, file: Path) -> None:
    """Restore the pre-tokenizer rule of the GGUF file, which transformers drops. Raise BaseModelError if
    Weftune does not know the rule."""
    backend = tokenizer.backend_tokenizer
    if pre_tokenizer in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and pre_tokenizer not in BYTE_LEVEL:
        raise BaseModelError(
            f"The tokenizer of {file.name} splits text by the rule {pre_tokenizer!r}, which Weftune cannot "
            "restore; use the model's original folder or Hub id instead."
        )


def narrow_weight(weight: Tensor) -> Tensor:
    """Return the weight in the narrowest dtype that represents it exactly. Dequantised blocks (scale ·
    integer + minimum) need float32; weights that were stored with 16 bits get 16 bits again."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.to(weight.dtype), weight):
            return narrow
    return weight


def flush_to_disk(path: Path) -> None:
    """Flush a file to disk, so that a converted folder is complete after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> GgufHeader:
    if not path.stat().st_size:
        raise ValueError("it is empty (0 bytes); download or copy it again")
    with path.open("rb") as file:
        return GgufHeader(file)


class GgufHeader:
    """The checked header of a GGUF file: all lengths and tensors lie within the file, and the model's
    sizes in the header are at most those of its tensors."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the header. Raise ValueError with the reason if it is inconsistent."""
        self.integers: dict[str, int] = {}
        """Maps each metadata key of the file whose value is a single integer to that integer."""
        self.tensors: dict[str, tuple[int, ...]] = {}
        """Maps the name of each tensor to its shape."""
        self._file = file
        self._remaining_bytes = os.fstat(file.fileno()).st_size
        if self._read_bytes(4) != GGUF_MAGIC:
            raise ValueError("it does not begin as GGUF files do")
        if (version := self._read_number(4)) not in VERSIONS:
            raise ValueError(f"its version is {version}, and known are 2 and 3")
        tensors, keys = self._read_number(8), self._read_number(8)
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise ValueError(f"it claims {tensors:,} tensors and {keys:,} keys")
        for _ in range(keys):
            self._read_key()
        extents = [self._read_tensor() for _ in range(tensors)]
        if len(self.tensors) < tensors:
            raise ValueError("two of its tensors have the same name")
        alignment = self.integers.get("general.alignment", 32)
        if not 1 <= alignment <= 2**20:
            raise ValueError(f"its alignment is {alignment}")
        room = self._remaining_bytes - -file.tell() % alignment
        if any(start % alignment or start + size > room for start, size in extents):
            raise ValueError("not all of its tensors lie within the file")
        self._check_sizes()

    def _check_sizes(self) -> None:
        largest = max([len(self.tensors), *(size for shape in self.tensors.values() for size in shape)])
        for name, value in self.integers.items():
            if name.startswith(("general.", "tokenizer.", "quantize.", "split.")):
                continue
            limit = MAX_LENGTH if any(part in name for part in LENGTH_KEYS) else largest
            if not 0 <= value <= limit:
                raise ValueError(f"its {name} is {value:,}, which its tensors do not have")

    def _read_bytes(self, size: int) -> bytes:
        self._count_bytes(size)
        return self._file.read(size)

    def _count_bytes(self, size: int) -> None:
        if size > self._remaining_bytes:
            raise ValueError("it ends in the middle of its header; download or copy it again")
        self._remaining_bytes -= size

    def _read_number(self, size: int) -> int:
        return int.from_bytes(self._read_bytes(size), "little")

    def _read_name(self) -> str:
        size = self._read_number(8)
        if size > MAX_KEY_BYTES:
            raise ValueError(f"a name in its header claims {size:,} bytes")
        return self._read_bytes(size).decode()

    def _read_key(self) -> None:
        name, kind = self._read_name(), self._read_number(4)
        if kind in INTEGERS:
            value = self._read_bytes(VALUE_BYTES[kind])
            self.integers[name] = int.from_bytes(value, "little", signed=kind in (1, 3, 5, 11))
        else:
            self._skip_value(kind)

    def _skip_value(self, kind: int, nesting_level: int = 0) -> None:
        if kind == STRING:
            self._skip_bytes(self._read_number(8))
        elif kind == ARRAY and nesting_level < 4:
            inner, count = self._read_number(4), self._read_number(8)
            if inner in VALUE_BYTES:
                self._skip_bytes(VALUE_BYTES[inner] * count)
            elif 8 * count > self._remaining_bytes:
                raise ValueError(f"a list in its header claims {count:,} values")
            else:
                for _ in range(count):
                    self._skip_value(inner, nesting_level + 1)
        elif kind in VALUE_BYTES:
            self._skip_bytes(VALUE_BYTES[kind])
        else:
            raise ValueError(f"its header holds a value of the unknown type {kind}")

    def _skip_bytes(self, size: int) -> None:
        self._count_bytes(size)
        self._file.seek(size, os.SEEK_CUR)

    def _read_tensor(self) -> tuple[int, int]:
        """Read a tensor's header. Return the offset of the tensor's data in the file, and the size of the
        data in bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._read_name(), self._read_number(4)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name[:80]!r} claims {dimensions} dimensions")
        shape = tuple(self._read_number(8) for _ in range(dimensions))
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._read_number(4))]
        if not prod(shape) or prod(shape) % block:
            raise ValueError(f"its tensor {name[:80]!r} has the shape {list(shape)}")
        self.tensors[name] = shape
        return self._read_number(8), prod(shape) // block * size
