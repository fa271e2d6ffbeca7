"""Conversion of GGUF files to ordinary model folders, once, in the cache.

Transformers takes half a minute to read a GGUF file and loses some of its tokenizer; the folder loads in a
second and has been repaired.
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
from pathlib import Path
from typing import Any

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

from weftune.base.gguf_check import read_header
from weftune.core.files import cache_folder, ordinary_modes
from weftune.errors import BaseModelError, MissingPackage, UserError

FORMAT = 1
"""Part of every cache key. Increase it when a conversion writes different files than before."""

CHECKSUMS = "checksums.json"
"""File in a converted folder with the checksums of every other file, so that a flipped bit on disk is
found."""
PIECE_BYTES = 16 * 2**20

SINGLE_DIGITS = frozenset({"smollm", "starcoder"})
"""The `tokenizer.ggml.pre` names whose digits are tokens of their own; transformers drops that rule."""
PLAIN_BYTES = frozenset({"", "default", "gpt-2"})
"""The `tokenizer.ggml.pre` names that need no rule besides splitting into bytes."""


def converted(file: Path) -> Path:
    """Return the model folder made from `file`, from the cache if it was made before."""
    if not file.is_file():
        raise BaseModelError(f"There is no GGUF file {file}.")
    return converted_into(cache_folder() / "gguf" / f"{file.stem}-{fingerprint(file)}", file)


def fingerprint(file: Path) -> str:
    """Return a value that changes when the file does. Only its start is read: a GGUF file can have 100 GB."""
    status = file.stat()
    with file.open("rb") as stream:
        start = hashlib.sha256(stream.read(1 << 20)).hexdigest()
    return hashlib.sha256(f"{FORMAT} {status.st_size} {status.st_mtime_ns} {start}".encode()).hexdigest()[:16]


def converted_into(folder: Path, file: Path) -> Path:
    """Make `folder` from `file` unless it exists and is intact. Of several processes the first to rename
    wins, and none sees an incomplete folder."""
    bad = damaged(folder) if folder.is_dir() else ""
    if folder.is_dir() and not bad:
        return folder
    if bad:
        print(f"weftune: {folder / bad} is damaged; {file.name} is converted again.", file=sys.stderr)
        discard(folder)
    unfinished = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        write_folder(file, unfinished)
        ordinary_modes(unfinished)
        write_checksums(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


# -- checksums ------------------------------------------------------------------------------------------


def write_checksums(folder: Path) -> None:
    record = {path.name: file_checksums(path) for path in sorted(folder.iterdir())}
    path = folder / CHECKSUMS
    path.write_text(json.dumps(record))
    flush(path)


def damaged(folder: Path) -> str:
    """Return the name of a file of a converted folder whose checksum does not match; "" if all match.

    Every byte is read, which also brings the files into memory for the load that follows. A folder without
    checksums is not trusted.
    """
    try:
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        return _damaged(folder, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    except OSError:
        return CHECKSUMS


@cache
def _damaged(folder: Path, seen: tuple[tuple[str, int, int], ...]) -> str:
    """Compute `damaged` once per process, as long as no file changes."""
    try:
        record = json.loads((folder / CHECKSUMS).read_bytes())
        if not {"config.json", "model.safetensors"} <= record.keys():
            return CHECKSUMS
        bad = [name for name, sums in record.items() if file_checksums(folder / name) != sums]
        return bad[0] if bad else ""
    except (OSError, ValueError, AttributeError):
        return CHECKSUMS


def file_checksums(path: Path) -> list[int]:
    """Return the CRC32 of every piece, computed on several threads: zlib releases the interpreter lock."""

    def checksum(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(PIECE_BYTES))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(checksum, range(0, path.stat().st_size, PIECE_BYTES)))


def discard(folder: Path) -> None:
    """Rename the folder before deleting it, so that no process finds it half deleted."""
    aside = folder.parent / f".{folder.name}-{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def write_folder(file: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise MissingPackage(f"Reading {file.name} needs the package gguf: pip install gguf") from None
    with readable(file), read_once(gguf):
        refuse_larger(file)
        pre_tokenizer = gguf_text(gguf.GGUFReader(file), "tokenizer.ggml.pre")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        mend_tokenizer(tokenizer, pre_tokenizer, file)
        tokenizer.save_pretrained(folder)
        write_model(model, folder)
    for path in folder.iterdir():
        flush(path)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn any exception raised by a damaged file into one BaseModelError; a tokenizer's panic is not even an
    Exception."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BaseModelError(f"The GGUF file {file} cannot be read: {reason}") from error


def refuse_larger(file: Path) -> None:
    """Raise for a file whose header describes a larger model than its tensors form."""
    header = read_header(file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # An output layer tied to the embedding is in the file only once.
    if sum(value.numel() for value in model.parameters()) > header.elements + header.largest:
        raise ValueError("its header describes a larger model than its tensors make")


@contextmanager
def read_once(gguf: Any) -> Iterator[None]:
    """Parse a GGUF file once inside, and list the names of a model's tensors once.

    transformers parses the file for the tokenizer, the config and the weights, which takes seconds each time,
    and lists the names again for every module.
    """
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map

    class PlainReader(reader):  # type: ignore[misc, valid-type]
        """A reader of a plain array: each of a million slices of a memory map would be a slow object."""

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
    """Write the model as `save_pretrained` would, which refuses a model that was read from a GGUF file."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    # `named_parameters` yields a tied weight once, under the name that loading expects.
    weights = {name: narrowed(weight.detach()).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gguf_text(reader: object, key: str) -> str:
    field = reader.fields.get(key)  # type: ignore[attr-defined]
    return "" if field is None else str(field.contents())


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str, file: Path) -> None:
    """Restore the splitting rule that the GGUF names and transformers did not restore."""
    backend = tokenizer.backend_tokenizer
    if pre_tokenizer in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and pre_tokenizer not in PLAIN_BYTES:
        raise BaseModelError(
            f"The tokenizer of {file.name} splits text by the rule {pre_tokenizer!r}, which Weftune cannot "
            "restore; use the model's original folder or Hub id instead."
        )


def narrowed(weight: Tensor) -> Tensor:
    """Return the weight in the narrowest type that keeps every bit of it.

    Dequantised blocks (scale · integer + minimum) need float32; weights that had 16 bits before they went
    into the file get 16 bits again.
    """
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.to(weight.dtype), weight):
            return narrow
    return weight


def flush(path: Path) -> None:
    """Flush a file to disk: a folder that survives a power cut must not hold files that did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
