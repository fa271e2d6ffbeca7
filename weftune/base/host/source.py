"""Sources from which the weights of a streamed stage (consecutive layers) are copied to the device: host
memory, or safetensors files.

Files are mapped read-only and read through the page cache. A mapped page that cannot be read kills the
process with a signal. Therefore pages are requested before they are accessed, in a way that returns an error
instead, and released afterwards.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weftune.base.config import open_safetensors
from weftune.base.host.pinned import allocate_host_bytes
from weftune.base.quant.linear import quant_paths
from weftune.base.weights import WeightFiles, refuse_other_shape, stored_names, view_part
from weftune.errors import BaseModelError, WeightsLost
from weftune.plan.layout.need import STAGING_BYTES

CHUNK_BYTES = STAGING_BYTES // 2
MADV_POPULATE_READ = 22
"""Flag of `madvise`, since Linux 5.14, that reads pages immediately and reports failures. Python's mmap does
not define it."""
STORED_AS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class MappedFile:
    """A read-only mapping of one file. The mapping's content stays the same if the file is replaced or
    deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._first_status = self._file_status()
        mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def tensors(self) -> dict[str, MappedTensor]:
        with open_safetensors(self.path):
            pass  # it refuses a header that does not fit the file
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        header = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = MappedTensor(self, start, stop, entry["dtype"], tuple(entry["shape"]))
        return found

    def read(self, start: int, stop: int, out: Tensor) -> None:
        if self._file_status() != self._first_status:
            raise WeightsLost(
                f"{self.path} has changed while weights are read from it; put the file back as it was and "
                "resume the run"
            )
        failed = self._advise_kernel(start, stop, MADV_POPULATE_READ)
        if failed not in (0, errno.EINVAL):  # an older system does not know this advice
            raise self._read_error(failed)
        out.copy_(self._bytes[start:stop])
        self._advise_kernel(start, stop, mmap.MADV_DONTNEED)

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the operating system to prefetch a range of bytes into the page cache."""
        self._advise_kernel(start, stop, mmap.MADV_WILLNEED)

    def drop_from_cache(self, size: int) -> None:
        """Drop the first `size` bytes of the file from the page cache, if the system supports that."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, size, os.POSIX_FADV_DONTNEED)

    def _file_status(self) -> tuple[int, int]:
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:  # a file on a server can disappear
            raise self._read_error(error.errno or 0) from None
        return status.st_size, status.st_mtime_ns

    def _read_error(self, error_number: int) -> WeightsLost:
        return WeightsLost(
            f"{self.path} can no longer be read ({os.strerror(error_number)}), and weights are read from it "
            "in every step; repair that and resume the run"
        )

    def _advise_kernel(self, start: int, stop: int, advice: int) -> int:
        """Call `madvise` on a range of bytes. Return the error number, or 0."""
        if sys.platform != "linux" or start >= stop:
            return 0
        first = start - start % mmap.PAGESIZE
        address = ctypes.c_void_p(self._bytes.data_ptr() + first)
        failed = _c_library().madvise(address, ctypes.c_size_t(stop - first), ctypes.c_int(advice))
        return ctypes.get_errno() if failed else 0


@cache
def _c_library() -> ctypes.CDLL:
    """Return the C library. Its `madvise` is called directly, since Python's own `madvise` holds the GIL
    while it waits for the disk."""
    return ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor in a mapped file, with the dtype, shape and offsets from the file's header."""

    file: MappedFile
    start: int
    stop: int
    """End of the range of the tensor's bytes in the file, which begins at `start`."""
    dtype: str
    shape: tuple[int, ...]


def map_weights(
    model: PreTrainedModel, files: WeightFiles | None, base: str
) -> dict[str, tuple[MappedTensor, ...]]:
    """Return a dict from each parameter of `model` to the tensors in files that it consists of, usually one.
    Raise BaseModelError if the tensors cannot be used as they are stored. `base` is the base's name in
    messages."""
    if quant_paths(model):
        raise _unusable_files_error(
            base, "quantised weights are made when they are loaded, and kept in memory"
        )
    names = None if files is None else stored_names(model, files)
    if files is None or names is None:
        raise _unusable_files_error(base, "they are in no safetensors files that name them as the model does")
    tensors_by_file: dict[str, dict[str, MappedTensor]] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        computed_in = STORED_AS.get(parameter.dtype, str(parameter.dtype))
        parts = []
        for part in names[name]:
            within = files.files[part]
            if within not in tensors_by_file:
                tensors_by_file[within] = MappedFile(files.path(part)).tensors
            stored = tensors_by_file[within][part]
            refuse_other_shape(name, torch.Size(stored.shape), view_part(parameter, names[name], part).shape)
            if stored.dtype != computed_in:
                raise _unusable_files_error(
                    base,
                    f"{name} is stored as {stored.dtype} and the run computes in {computed_in}; set the "
                    "base's dtype to that of its files",
                )
            parts.append(stored)
        found[name] = tuple(parts)
    return found


def _unusable_files_error(base: str, reason: str) -> BaseModelError:
    return BaseModelError(f"The weights of {base} cannot be read from their files in every step: {reason}.")


@dataclass(frozen=True, slots=True)
class HostStage:
    """The weights of a streamed stage (consecutive layers) in contiguous host memory, page-locked if the
    device is a GPU."""

    buffer: Tensor
    blocks = False
    """Whether the method `copy_to` waits for file reads, so that it should be called in a thread."""

    @property
    def size(self) -> int:
        return len(self.buffer)

    def copy_to(self, slot: Tensor) -> None:
        """Copy all bytes of the stage to `slot`, the stage's memory on the device, on the current CUDA
        stream."""
        # In chunks, between which the link can serve transfers of optimizer steps.
        for start in range(0, self.size, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, self.size)
            slot[start:stop].copy_(self.buffer[start:stop], non_blocking=True)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the stage's bytes from `start` to `stop` as a tensor on the host."""
        return self.buffer[start:stop]


class Staging:
    """Two page-locked buffers: one is filled while the other is copied to the device."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk = chunk_bytes
        on_gpu = device.type == "cuda"
        # Blocking: a thread that waits for the event sleeps, and other threads can use its core.
        self._buffers = [
            (buffer, torch.cuda.Event(blocking=True) if on_gpu else None)
            for buffer in allocate_host_bytes(2 * chunk_bytes, device).split(chunk_bytes)
        ]
        """Pairs of a buffer and, on a GPU, an event that is done when the buffer's last copy has finished."""

    def copy_chunk(self, fill: Callable[[Tensor], None], target: Tensor) -> None:
        """Fill a buffer by calling `fill`, and copy the buffer to `target`, a tensor on the device of at most
        one chunk."""
        buffer, sent = self._buffers[0]
        if sent is not None:
            sent.synchronize()
        chunk = buffer[: len(target)]
        fill(chunk)
        target.copy_(chunk, non_blocking=True)
        if sent is not None:
            sent.record()
        self._buffers.reverse()


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A parameter of a stage (consecutive layers), or a part of a parameter that is a separate tensor in the
    files. Its bytes begin at the offset `start` of the stage's bytes."""

    start: int
    tensor: MappedTensor

    @property
    def stop(self) -> int:
        return self.start + self.tensor.stop - self.tensor.start

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out`, a buffer for the bytes of the stage from `start` on, with the bytes of this parameter
        that belong there."""
        first, last = max(self.start, start), min(self.stop, start + len(out))
        if first < last:
            offset = self.tensor.start - self.start
            self.tensor.file.read(first + offset, last + offset, out[first - start : last - start])

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the operating system to prefetch this parameter's bytes within the given range of the stage."""
        offset = self.tensor.start - self.start
        self.tensor.file.prefetch(max(self.start, start) + offset, min(self.stop, stop) + offset)


@dataclass(frozen=True, slots=True)
class MappedStage:
    """The weights of a streamed stage (consecutive layers) in mapped files. The weights are copied to the
    device in chunks."""

    parts: tuple[SourcePart, ...]
    staging: Staging | None
    """Buffers through which the files are copied to a GPU. None on a CPU, where files are read directly into
    the stage's slot (its memory on the device)."""
    blocks = True

    @property
    def size(self) -> int:
        return self.parts[-1].stop

    def copy_to(self, slot: Tensor) -> None:
        # Another stage may be between its forward and its backward. For autograd all slots are one tensor,
        # which must not appear to change meanwhile.
        here = slot.data
        chunk = CHUNK_BYTES if self.staging is None else self.staging.chunk
        for start in range(0, self.size, chunk):
            stop = min(start + chunk, self.size)
            for part in self.parts:
                part.prefetch(stop, stop + chunk)
            fill = partial(self._read, start)
            if self.staging is None:
                fill(here[start:stop])
            else:
                self.staging.copy_chunk(fill, here[start:stop])

    def read(self, start: int, stop: int) -> Tensor:
        out = torch.zeros(stop - start, dtype=torch.uint8)
        self._read(start, out)
        return out

    def _read(self, start: int, out: Tensor) -> None:
        """Read the stage's bytes from `start` on into `out`. Gaps between parameters in `out` stay as they
        are."""
        for part in self.parts:
            part.read(start, out)


StageSource = HostStage | MappedStage
