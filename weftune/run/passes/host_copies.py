"""Copies of activations between the device and host memory, and a store in host memory for the tensors that
layers keep for their backward.

Shapes: T rows of a microbatch, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from weftune.base.host.pinned import host_vectors
from weftune.run.measure.timers import WaitTime, recorded_event

CHUNK_BYTES = 8 << 20
"""Maximum size in bytes of one copy to the host. Larger tensors are copied in chunks, so that other copies
can run in between."""


class HostCopies:
    """Copies of stages' inputs between device and host, on two streams used for nothing else. On the stream
    that loads stages, an input would wait for stages that are needed only later. On the stream that evicts
    stages, it would delay the reuse of a slot (the device memory of a stage). If a CPU acts as the device,
    each copy is made at once.

    Tensors are allocated and freed on the compute stream, after it has waited for their copy. So the tensors
    on the device at any time follow from the Program, not from how far the host runs ahead.
    """

    def __init__(self, device: torch.device, wait_time: WaitTime) -> None:
        self._device, self._wait_time = device, wait_time
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._copy_out_events: dict[Hashable, torch.cuda.Event] = {}
        self._copy_in_events: dict[Hashable, torch.cuda.Event] = {}

    def copy_out(self, key: Hashable, input_TD: Tensor, host_TD: Tensor) -> None:
        if not self._on_gpu:
            self._copy_and_time(host_TD, input_TD)
            return
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            # In chunks, so that copies of Steps to the host can run in between.
            rows = max(1, CHUNK_BYTES // input_TD[:1].nbytes)
            for given, host in zip(input_TD.split(rows), host_TD.split(rows), strict=True):
                host.copy_(given, non_blocking=True)
            self._copy_out_events[key] = recorded_event()

    def await_copy_out(self, key: Hashable) -> None:
        """Make the compute stream wait for the copy of the tensor with this key to the host, so that its
        device memory may be freed."""
        self._wait_for_copy(self._copy_out_events.pop(key, None))

    def copy_in(self, key: Hashable, host_TD: Tensor) -> Tensor:
        here_TD = torch.empty_like(host_TD, device=self._device)
        self._wait_time.copied_bytes += host_TD.nbytes
        if not self._on_gpu:
            self._copy_and_time(here_TD, host_TD)
            return here_TD
        # Its memory may have belonged to another tensor that compute has yet to read.
        self._in.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in):
            here_TD.copy_(host_TD, non_blocking=True)
            self._copy_in_events[key] = recorded_event()
        return here_TD

    def await_copy_in(self, key: Hashable) -> None:
        """Make the compute stream wait for the copy of the tensor with this key from the host, so that the
        tensor may be read."""
        self._wait_for_copy(self._copy_in_events.pop(key, None))

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        self._copy_out_events.clear()
        self._copy_in_events.clear()

    def _copy_and_time(self, target_TD: Tensor, source_TD: Tensor) -> None:
        began = time.perf_counter()
        target_TD.copy_(source_TD)
        self._wait_time.seconds += time.perf_counter() - began

    def _wait_for_copy(self, copied_event: torch.cuda.Event | None) -> None:
        if copied_event is not None:
            ready = recorded_event()
            torch.cuda.current_stream().wait_event(copied_event)
            self._wait_time.record_wait(ready, copied_event)


class HostStore:
    """A store in host memory for the vectors that decoder layers keep from the forward of a microbatch to its
    backward. Layers store vectors in order and request them in reverse order; the store serves one microbatch
    at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = HostCopies(device, WaitTime())
        self._host_buffers: dict[tuple[int, int], Tensor] = {}
        """Maps (layer, number of the vector) to allocated host memory, which is used again for later
        microbatches."""
        self._host_values: dict[tuple[int, int], Tensor] = {}
        """Maps (layer, number of the vector) to the vector's values in host memory, until they are requested
        back."""
        self._outgoing_vectors: dict[tuple[int, int], Tensor] = {}
        """Maps (layer, number of the vector) to vectors on the device whose copy to the host may not be
        complete. They must not be freed yet."""
        self._incoming_vectors: dict[tuple[int, int], Tensor] = {}
        """Maps (layer, number of the vector) to vectors on the device that are being copied from the host."""

    def store_vector(self, layer: int, vector: Tensor) -> Callable[[], Tensor]:
        """Start to copy a vector to the host. Return a function that copies the vector back and returns it on
        the device; the function may be called once. The next `free_copied` releases the vector's memory on
        the device; until then the vector must not be changed."""
        key = layer, sum(1 for owner, _ in self._host_values if owner == layer)
        if key not in self._host_buffers or self._host_buffers[key].nbytes < vector.nbytes:
            self._host_buffers.pop(key, None)
            [self._host_buffers[key]] = host_vectors([(vector.nbytes, torch.uint8)], self._device)
        self._host_values[key] = self._host_buffers[key][: vector.nbytes].view(vector.dtype)
        self._copies.copy_out(key, vector, self._host_values[key])
        self._outgoing_vectors[key] = vector

        def fetch() -> Tensor:
            self.request(layer)
            self._copies.await_copy_in(key)
            return self._incoming_vectors.pop(key)

        return fetch

    def free_copied(self) -> None:
        """Release the device memory of all stored vectors. Later work of the device waits until they have
        been copied to the host."""
        for key in self._outgoing_vectors:
            self._copies.await_copy_out(key)
        self._outgoing_vectors.clear()

    def request(self, layer: int, count: int | None = None) -> None:
        """Start to copy the stored vectors of a layer back to the device. If `count` is given, copy only the
        first `count` of them."""
        for key in [key for key in self._host_values if key[0] == layer][:count]:
            self.free_copied()
            self._incoming_vectors[key] = self._copies.copy_in(key, self._host_values.pop(key))

    def release(self) -> None:
        """Free the host memory of the store. No microbatch may still need it."""
        assert not self._host_values, "vectors still wait on the host"
        self._copies.finish()
        self._host_buffers.clear()

    def forget(self) -> None:
        """Drop the stored vectors of a microbatch whose backward will not run. The host memory is kept."""
        self._copies.finish()
        for tensors in (self._host_values, self._outgoing_vectors, self._incoming_vectors):
            tensors.clear()
