"""Snapshots of jobs' training states in host memory, written to checkpoints while training continues.

A GPU copies a state asynchronously, on a separate stream, into page-locked memory that is reused. The job's
next step waits for the copy on the device; the host does not wait. The total size of snapshots is bounded: a
request that would exceed it waits until another snapshot has been written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from weftune.adapters.vector import VectorLayout
from weftune.base.host.pinned import ALIGNMENT, allocate_host_bytes
from weftune.errors import BaseModelError
from weftune.run.training.state import Progress, Training

MAX_BYTES = 8 << 30
HOST_FRACTION = 1 / 8
"""Fraction of the host's free memory that snapshots may use, up to `MAX_BYTES`. If training runs on a CPU,
snapshots use memory that plans leave free (`CPU_FRACTION` in run/measure/memory.py)."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a job's training state after one of its steps."""

    job: str
    progress: Progress
    seed: int
    layout: VectorLayout
    vectors: Mapping[str, Tensor]
    """Maps the name of each vector in a checkpoint to the vector: the master weights, the moments, the best
    weights, the mean of the last weights."""
    memory: Tensor | None = None
    """Host memory that holds all vectors and is returned to a pool after use. None if the vectors are not in
    a pool's memory."""
    copied_event: torch.cuda.Event | None = None

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the vectors by name. Waits until the device has copied them."""
        if self.copied_event is not None:
            self.copied_event.synchronize()
        return self.vectors


def make_snapshot(training: Training, vectors: Mapping[str, Tensor] | None = None) -> Snapshot:
    """Return a snapshot of these vectors, by default of all vectors that a checkpoint stores. Vectors on the
    host are not copied, so they must not change before they are written."""
    vectors = vectors or {name: value.cpu() for name, value in checkpoint_vectors(training).items()}
    return Snapshot(training.job, copy(training.progress), training.adapter.seed, training.layout, vectors)


def weights_snapshot(training: Training) -> Snapshot:
    """Return a snapshot with the master weights, and with the best weights if the job keeps them."""
    vectors = {"master": training.master, "best": training.best_weights}
    return make_snapshot(training, {name: one.cpu() for name, one in vectors.items() if one is not None})


def checkpoint_vectors(training: Training) -> dict[str, Tensor]:
    """Return a dict from name to vector of everything that a job's checkpoint stores. It has no moments if
    the job's state was assembled from several workers."""
    found = {name: getattr(training.state, name) for name in ("master", *MOMENTS)}
    if training.best_weights is not None:
        found["best"] = training.best_weights
    if training.mean_weights is not None and training.progress.averaged:
        found["mean"] = training.mean_weights
    return {name: value for name, value in found.items() if len(value) == training.layout.size}


class Snapshots:
    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        """Create an empty pool of host memory for snapshots. `device` is the device on which jobs train.
        `max_bytes` is the maximum size of the pool in bytes; None derives it from the host's free memory."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.max_bytes = max_bytes or min(MAX_BYTES, int(psutil.virtual_memory().available * HOST_FRACTION))
        self._used_bytes = 0
        self._free_memory: dict[int, list[Tensor]] = {}
        """Maps a size in bytes to unused blocks of page-locked memory of that size. The blocks are kept
        because page-locking is slow."""
        self._free_bytes = 0
        self._changed = threading.Condition()

    def take_snapshot(self, training: Training) -> Snapshot:
        """Return a snapshot of the job's state after all work that has been launched on the device so far."""
        vectors = checkpoint_vectors(training)
        memory = self._take_memory(sum(map(_aligned_bytes, vectors.values())))
        copies, start = {}, 0
        for name, vector in vectors.items():
            copies[name] = memory[start : start + vector.nbytes].view(vector.dtype)
            start += _aligned_bytes(vector)
        copied = self._copy_vectors(vectors, copies)
        if training.master.is_cuda:
            training.snapshot_copied_event = copied
        return replace(make_snapshot(training, copies), memory=memory, copied_event=copied)

    def release(self, snapshot: Snapshot) -> None:
        """Return the snapshot's memory to the pool."""
        assert snapshot.memory is not None
        with self._changed:
            self._used_bytes -= len(snapshot.memory)
            if self._stream is not None:
                self._add_free(snapshot.memory)
            self._changed.notify_all()

    def reserve(self, size: int) -> None:
        """Allocate page-locked memory of `size` bytes in advance, if `max_bytes` allows it. Do nothing on a
        CPU."""
        with self._changed:
            if self._stream is None or self._allocated_bytes + size > self.max_bytes:
                return
        memory = _host_memory(size, self._device)
        with self._changed:
            if self._allocated_bytes + size <= self.max_bytes:
                self._add_free(memory)

    def _copy_vectors(
        self, vectors: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            for name, vector in vectors.items():
                copies[name].copy_(vector)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, vector in vectors.items():
                copies[name].copy_(vector, non_blocking=True)
                if vector.is_cuda:
                    # A job may be detached, or find better weights, before the copy is made.
                    vector.record_stream(self._stream)
            # A thread that waits for it yields its core.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return copied

    @property
    def _allocated_bytes(self) -> int:
        return self._used_bytes + self._free_bytes

    def _add_free(self, memory: Tensor) -> None:
        self._free_memory.setdefault(len(memory), []).append(memory)
        self._free_bytes += len(memory)

    def _pop_free(self, size: int) -> Tensor:
        memory = self._free_memory[size].pop()
        self._free_bytes -= size
        if not self._free_memory[size]:
            del self._free_memory[size]
        return memory

    def _take_memory(self, size: int) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: not self._used_bytes or self._used_bytes + size <= self.max_bytes)
            fitting = min((one for one in self._free_memory if size <= one <= 2 * size), default=None)
            memory = None if fitting is None else self._pop_free(fitting)
            while memory is None and self._free_memory and self._allocated_bytes + size > self.max_bytes:
                self._pop_free(next(iter(self._free_memory)))
            self._used_bytes += size if memory is None else len(memory)
        return _host_memory(size, self._device) if memory is None else memory


def snapshot_bytes(training: Training, keeps_best: bool = False) -> int:
    """Return the maximum size in bytes of a snapshot of the job. It includes the mean of the weights if the
    job has one, and the best weights if the job has them or `keeps_best`."""
    found = checkpoint_vectors(training)
    later = {"best": keeps_best, "mean": training.mean_weights is not None}
    more = sum(1 for name, comes in later.items() if comes and name not in found)
    return sum(map(_aligned_bytes, found.values())) + more * _aligned_bytes(training.master)


def _aligned_bytes(vector: Tensor) -> int:
    return -(-vector.nbytes // ALIGNMENT) * ALIGNMENT


def _host_memory(size: int, device: torch.device) -> Tensor:
    """Return host memory for copies from `device`. For a GPU it is page-locked if the system permits that;
    otherwise copies to it block."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with on_device:
            return allocate_host_bytes(size, device)
    except BaseModelError:
        return allocate_host_bytes(size, torch.device("cpu"))
