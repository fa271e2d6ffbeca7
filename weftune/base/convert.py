"""GGUF files become ordinary model folders, once, in the cache.

Reading a GGUF takes transformers half a minute, and some of its tokenizer is lost on the way; the folder
loads in a second and has been mended.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from weftune.errors import BaseModelError, MissingPackage
from weftune.paths import cache_folder

FORMAT = 1
"""Part of every cache key: raise it when a conversion gives other files than before."""

SINGLE_DIGITS = frozenset({"smollm", "starcoder"})
"""The `tokenizer.ggml.pre` names whose digits are tokens of their own; transformers drops that rule."""
PLAIN_BYTES = frozenset({"", "default", "gpt-2"})
"""The names that need no rule besides splitting into bytes."""


def converted(file: Path) -> Path:
    """The model folder made from `file`, from the cache if it was made before."""
    if not file.is_file():
        raise BaseModelError(f"There is no GGUF file {file}.")
    return converted_into(cache_folder() / "gguf" / f"{file.stem}-{fingerprint(file)}", file)


def fingerprint(file: Path) -> str:
    """Changes when the file does. Its start is read and not all of it: a GGUF can be 100 GB."""
    status = file.stat()
    with file.open("rb") as stream:
        start = hashlib.sha256(stream.read(1 << 20)).hexdigest()
    return hashlib.sha256(f"{FORMAT} {status.st_size} {status.st_mtime_ns} {start}".encode()).hexdigest()[:16]


def converted_into(folder: Path, file: Path) -> Path:
    """Make `folder` from `file` unless it is there. Whoever renames first wins; nobody sees half a folder."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        write_folder(file, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_folder(file: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise MissingPackage(f"Reading {file.name} needs the package gguf: pip install gguf") from None
    try:
        with read_once(gguf):
            pre_tokenizer = gguf_text(gguf.GGUFReader(file), "tokenizer.ggml.pre")
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32
            )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise BaseModelError(f"The GGUF file {file} cannot be read: {error}") from error
    mend_tokenizer(tokenizer, pre_tokenizer, file)
    tokenizer.save_pretrained(folder)
    write_model(model, folder)
    for path in folder.iterdir():
        flush(path)


@contextmanager
def read_once(gguf: ModuleType) -> Iterator[None]:
    """Parse a GGUF file once while this lasts, and list the names of a model's tensors once.

    transformers parses the file for the tokenizer, the config and the weights, which takes seconds each time,
    and lists the names anew for every module.
    """
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map

    class PlainReader(reader):  # type: ignore[misc, valid-type]
        """Slices a plain array: of a memory map each of a million slices is a slow object of its own."""

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
    """As `save_pretrained` would, which refuses a model that came out of a GGUF."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    # `named_parameters` gives a tied weight once, under the name that loading expects.
    weights = {name: narrowed(weight.detach()).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gguf_text(reader: object, key: str) -> str:
    field = reader.fields.get(key)  # type: ignore[attr-defined]
    return "" if field is None else str(field.contents())


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str, file: Path) -> None:
    """Put back the splitting rule that the GGUF names and transformers did not restore."""
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
    """The weight in the narrowest type that keeps every bit of it.

    Dequantised blocks (scale · integer + minimum) need float32; what was 16 bits wide before it went into
    the file goes back to 16.
    """
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.to(weight.dtype), weight):
            return narrow
    return weight


def flush(path: Path) -> None:
    """A folder that survives a power cut must not hold files that did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
