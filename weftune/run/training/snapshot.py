"""Snapshots of jobs' training states in host memory, from which they are written while training goes on.

A GPU copies a state by itself, on a stream of its own, into page-locked memory that is used again and again;
the next step of the job waits for the copy on the device, and nobody waits for it on the host. Snapshots take
a bounded number of bytes: who wants one more waits until another has been written.
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
from weftune.base.host.pinned import ALIGNMENT, host_bytes
from weftune.errors import BaseModelError
from weftune.run.training.state import Progress, Training

MOST_BYTES = 8 << 30
HOST_SHARE = 1 / 8
"""Bytes of snapshots at any time: so many, but not more than this share of the host's memory that is free.
On a CPU it is part of what no plan counts with (`CPU_SHARE` in run/measure/memory.py)."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job's training state after one of its steps."""

    job: str
    progress: Progress
    seed: int
    layout: VectorLayout
    vectors: Mapping[str, Tensor]
    """By the names that a checkpoint has for them: the master weights, the moments, the best weights, the
    mean."""
    memory: Tensor | None = None
    """The bytes that all of them lie in, if those are to be given back."""
    copied: torch.cuda.Event | None = None

    def tensors(self) -> Mapping[str, Tensor]:
        """The vectors, once the device has copied them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.vectors


def snapshot_of(training: Training, vectors: Mapping[str, Tensor] | None = None) -> Snapshot:
    """With these vectors; else with the job's own, not with copies if they are on the host: then nobody may
    change them before they are written."""
    vectors = vectors or {name: value.cpu() for name, value in vectors_of(training).items()}
    return Snapshot(training.job, copy(training.progress), training.member.seed, training.layout, vectors)


def vectors_of(training: Training) -> dict[str, Tensor]:
    """The vectors that a checkpoint holds. A job that was gathered from several workers to be exported has no
    moments."""
    found = {name: getattr(training.state, name) for name in ("master", *MOMENTS)}
    if training.best is not None:
        found["best"] = training.best
    if training.mean is not None and training.progress.averaged:
        found["mean"] = training.mean
    return {name: value for name, value in found.items() if len(value) == training.layout.size}


class Snapshots:
    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        """`device` is the one that trains."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.max_bytes = max_bytes or min(MOST_BYTES, int(psutil.virtual_memory().available * HOST_SHARE))
        self._used_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        """Page-locked memory that nobody uses, by its size: locking it takes longer than copying to it."""
        self._free_bytes = 0
        self._changed = threading.Condition()

    def take(self, training: Training) -> Snapshot:
        """Copy a job's state as it is when the device has done what it was asked for so far."""
        vectors = vectors_of(training)
        memory = self._take_memory(sum(map(_aligned, vectors.values())))
        copies, start = {}, 0
        for name, vector in vectors.items():
            copies[name] = memory[start : start + vector.nbytes].view(vector.dtype)
            start += _aligned(vector)
        copied = self._copy(vectors, copies)
        if training.master.is_cuda:
            training.copied = copied
        return replace(snapshot_of(training, copies), memory=memory, copied=copied)

    def give_back(self, snapshot: Snapshot) -> None:
        """Its memory may be used again."""
        assert snapshot.memory is not None
        with self._changed:
            self._used_bytes -= len(snapshot.memory)
            if self._stream is not None:
                self._put_free(snapshot.memory)
            self._changed.notify_all()

    def reserve(self, size: int) -> None:
        """Have page-locked memory of this size ready, if there is room for one more."""
        with self._changed:
            if self._stream is None or self._held_bytes + size > self.max_bytes:
                return
        memory = _host_memory(size, self._device)
        with self._changed:
            if self._held_bytes + size <= self.max_bytes:
                self._put_free(memory)

    def _copy(self, vectors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> torch.cuda.Event | None:
        if self._stream is None:
            for name, vector in vectors.items():
                copies[name].copy_(vector)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, vector in vectors.items():
                copies[name].copy_(vector, non_blocking=True)
                if vector.is_cuda:
                    # A job may leave, or find better weights, before the copy is made.
                    vector.record_stream(self._stream)
            # Whoever waits for it leaves the core to others.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return copied

    @property
    def _held_bytes(self) -> int:
        return self._used_bytes + self._free_bytes

    def _put_free(self, memory: Tensor) -> None:
        self._free.setdefault(len(memory), []).append(memory)
        self._free_bytes += len(memory)

    def _pop_free(self, size: int) -> Tensor:
        memory = self._free[size].pop()
        self._free_bytes -= size
        if not self._free[size]:
            del self._free[size]
        return memory

    def _take_memory(self, size: int) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: not self._used_bytes or self._used_bytes + size <= self.max_bytes)
            fitting = min((one for one in self._free if size <= one <= 2 * size), default=None)
            memory = None if fitting is None else self._pop_free(fitting)
            while memory is None and self._free and self._held_bytes + size > self.max_bytes:
                self._pop_free(next(iter(self._free)))
            self._used_bytes += size if memory is None else len(memory)
        return _host_memory(size, self._device) if memory is None else memory


def snapshot_bytes(training: Training, keeps_best: bool = False) -> int:
    """Of the largest snapshot of the job: with the mean if it may have one, and with its best weights if it
    `keeps_best`."""
    found = vectors_of(training)
    later = {"best": keeps_best, "mean": training.mean is not None}
    more = sum(1 for name, comes in later.items() if comes and name not in found)
    return sum(map(_aligned, found.values())) + more * _aligned(training.master)


def _aligned(vector: Tensor) -> int:
    return -(-vector.nbytes // ALIGNMENT) * ALIGNMENT


def _host_memory(size: int, device: torch.device) -> Tensor:
    """Page-locked for a GPU; ordinary where the system does not allow so much, and then copies wait."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with on_device:
            return host_bytes(size, device)
    except BaseModelError:
        return host_bytes(size, torch.device("cpu"))
