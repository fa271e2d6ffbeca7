"""Safetensors files that are mapped read-only and read through the page cache.

A mapped page that cannot be read kills the process with a signal. Therefore pages are requested before they
are touched, in a way that returns an error instead, and released afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weftune.base.quant.linear import quant_paths
from weftune.base.safe_files import open_safetensors
from weftune.base.weights import WeightFiles, part_of, refuse_other_shape, stored_names
from weftune.errors import BaseModelError

MADV_POPULATE_READ = 22
"""Advice of Linux 5.14 and later: read pages in, and report a failure. Python's mmap has no name for it."""
STORED_AS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the header of its file describes it."""

    start: int
    stop: int
    """Range of its bytes, counted from the start of the file."""
    dtype: str
    shape: tuple[int, ...]


class MappedFile:
    """All bytes of one file. They stay the same if the file is replaced or deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._made = self._looks()
        mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        with open_safetensors(self.path):
            pass  # it refuses a header that does not fit the file
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        header = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        return {name: _stored(entry, 8 + length) for name, entry in header.items()}

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self._refuse_changed()
        failed = self._advise(start, stop, MADV_POPULATE_READ)
        if failed not in (0, errno.EINVAL):  # an older system does not know this advice
            raise self._unreadable(failed)
        out.copy_(self._bytes[start:stop])
        self._advise(start, stop, mmap.MADV_DONTNEED)

    def expect(self, start: int, stop: int) -> None:
        """Make the system read these bytes ahead."""
        self._advise(start, stop, mmap.MADV_WILLNEED)

    def leave_cache(self, size: int) -> None:
        """Drop the first `size` bytes from the page cache, as if memory were short, where supported."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, size, os.POSIX_FADV_DONTNEED)

    def _looks(self) -> tuple[int, int]:
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:  # a file on a server can disappear
            raise self._unreadable(error.errno or 0) from None
        return status.st_size, status.st_mtime_ns

    def _refuse_changed(self) -> None:
        if self._looks() != self._made:
            raise BaseModelError(
                f"{self.path} has changed while weights are read from it; put the file back as it was and go "
                "on with --resume."
            )

    def _unreadable(self, number: int) -> BaseModelError:
        return BaseModelError(
            f"{self.path} can no longer be read ({os.strerror(number)}), and weights are read from it in "
            "every step; mend that and go on with --resume."
        )

    def _advise(self, start: int, stop: int, advice: int) -> int:
        """Give advice about a range of bytes, and return the number of the error, or 0."""
        if sys.platform != "linux" or start >= stop:
            return 0
        first = start - start % mmap.PAGESIZE
        address = ctypes.c_void_p(self._bytes.data_ptr() + first)
        failed = _system().madvise(address, ctypes.c_size_t(stop - first), ctypes.c_int(advice))
        return ctypes.get_errno() if failed else 0


@cache
def _system() -> ctypes.CDLL:
    """Return the C library: Python's own `madvise` would make every thread wait for the disk."""
    return ctypes.CDLL(None, use_errno=True)


def _stored(entry: Mapping[str, Any], data: int) -> Stored:
    start, stop = entry["data_offsets"]
    return Stored(data + start, data + stop, entry["dtype"], tuple(entry["shape"]))


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """The bytes of a parameter in its file."""

    file: MappedFile
    start: int
    stop: int

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Read the bytes of the parameter from `start` to `stop`."""
        self.file.read(self.start + start, self.start + stop, out)

    def expect(self, start: int, stop: int) -> None:
        self.file.expect(self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class MappedWeights:
    tensors: Mapping[str, tuple[MappedTensor, ...]]
    """Name of a parameter in the model → the tensor in files, or all of them if it is stored in parts."""

    @property
    def files(self) -> list[MappedFile]:
        return list(dict.fromkeys(part.file for parts in self.tensors.values() for part in parts))


def map_weights(model: PreTrainedModel, files: WeightFiles | None, base: str) -> MappedWeights:
    """Return where the parameters of `model`, the base of that name, are stored. Raise BaseModelError if they
    cannot be used as they are stored."""
    if quant_paths(model):
        raise _not_as_they_are(base, "quantised weights are made when they are loaded, and kept in memory")
    names = None if files is None else stored_names(model, files)
    if files is None or names is None:
        raise _not_as_they_are(base, "they are in no safetensors files that name them as the model does")
    mapped: dict[str, MappedFile] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted = STORED_AS.get(parameter.dtype, str(parameter.dtype))
        parts = []
        for part in names[name]:
            within = files.files[part]
            if within not in mapped:
                mapped[within] = MappedFile(files.path(part))
            stored = mapped[within].tensors[part]
            refuse_other_shape(name, torch.Size(stored.shape), part_of(parameter, names[name], part).shape)
            if stored.dtype != wanted:
                raise _not_as_they_are(
                    base,
                    f"{name} is stored as {stored.dtype} and the run computes in {wanted}; set the base's "
                    "dtype to that of its files",
                )
            parts.append(MappedTensor(mapped[within], stored.start, stored.stop))
        found[name] = tuple(parts)
    return MappedWeights(found)


def _not_as_they_are(base: str, reason: str) -> BaseModelError:
    return BaseModelError(f"The weights of {base} cannot be read from their files in every step: {reason}.")
