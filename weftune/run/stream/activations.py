"""Storage of stages' inputs from their forward to their backward: they are kept on the device, or offloaded
to host memory and fetched back in time.

Shapes: G stages with kept inputs, R rows of a round (one global batch of every job), T rows of a microbatch,
D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from weftune.base.host.pinned import host_vectors
from weftune.base.host.streamed import StreamedBase
from weftune.plan.program.program import Payload
from weftune.run.measure.timers import WaitTime
from weftune.run.passes.host_copies import HostCopies
from weftune.run.passes.rows import StageVisit, renumber_visits


class KeptActivations:
    """A store that keeps the inputs of this worker's stages on the device from forward to backward. Tensors
    for another worker's stage are kept until they are sent."""

    def __init__(self, own_stages: Collection[int]) -> None:
        """Create an empty store. `own_stages` are the indices of this worker's stages."""
        self._own = frozenset(own_stages)
        self._inputs: dict[StageVisit, Tensor] = {}
        self._gradients: dict[StageVisit, Tensor] = {}
        self._outgoing_tensors: dict[tuple[StageVisit, Payload], Tensor] = {}

    def reserve(self, rows: int) -> None:
        """Allocate memory for rounds (one global batch of every job) of up to `rows` rows. No microbatch may
        be in flight. On the device no allocation is needed."""

    def store_input(self, visit: StageVisit, input_TD: Tensor, has_backward: bool = True) -> None:
        """Store the previous stage's output, which is the input of this pass of a microbatch over a stage.
        `has_backward` says whether a backward of the microbatch will follow."""
        if visit.stage in self._own:
            self._inputs[visit] = input_TD
        else:
            self._outgoing_tensors[visit, "activation"] = input_TD

    def read(self, visit: StageVisit) -> Tensor:
        """Return the input of this pass of a microbatch over a stage. The compute stream waits until the
        input can be read."""
        return self._inputs[visit]

    def end_forward(self, visit: StageVisit) -> None:
        """Record that this forward of a microbatch over a stage is finished, and that its backward is still
        to come."""

    def prefetch_input(self, visit: StageVisit) -> None:
        """Start to fetch the input of the worker's next backward, if it is offloaded to host memory, so that
        it arrives on the device in time."""

    def drop(self, visit: StageVisit) -> None:
        """Drop the input of this pass of a microbatch over a stage, because its backward is finished or it
        has none."""
        del self._inputs[visit]

    def store_gradient(self, visit: StageVisit, dh_TD: Tensor) -> None:
        """Store the gradient of a stage's output, which the following stage has computed. The stage's
        backward starts from this gradient."""
        if visit.stage in self._own:
            self._gradients[visit] = dh_TD
        else:
            self._outgoing_tensors[visit, "gradient"] = dh_TD

    def take_gradient(self, visit: StageVisit) -> Tensor:
        return self._gradients.pop(visit)

    def take_outgoing(self, visit: StageVisit, payload: Payload) -> Tensor | None:
        """Remove and return the tensor to send to another worker, or return None if it was never computed."""
        return self._outgoing_tensors.pop((visit, payload), None)

    def renumber_microbatches(self, numbers: Mapping[int, int]) -> None:
        """Give the microbatches in flight the indices that they have in the next Program: `numbers` maps each
        old index to the new one."""
        self._inputs = renumber_visits(self._inputs, numbers)
        self._gradients = renumber_visits(self._gradients, numbers)

    def forget(self) -> None:
        """Drop all stored tensors of unfinished microbatches, except those computed for other workers, which
        are still sent."""
        self._inputs.clear()
        self._gradients.clear()


class OffloadedActivations:
    """A store that keeps inputs of stages on the device only around the passes that read them, and in host
    memory in between.

    An input is copied to the host as soon as it is computed, so that the copy can run during the whole
    forward of the stage. After this forward, the input is dropped from the device. It is fetched back while
    its microbatch runs its backward over the following stage, one pass before it is read. At the last stage
    the backward follows the forward at once, so inputs of the last stage stay on the device.
    """

    def __init__(self, base: StreamedBase, wait_time: WaitTime) -> None:
        whole, part = base.whole, base.part
        self._kept = KeptActivations(part.own_stages)
        self._offloaded = part.offloaded_stages
        self.width, self._dtype, self._device = whole.shape.hidden, whole.dtype, whole.device
        self._copies = HostCopies(self._device, wait_time)
        self._offloaded_visits: set[StageVisit] = set()
        """Passes of microbatches over stages whose inputs are in host memory, or being copied there, and have
        not been fetched back."""
        self._rows: dict[int, slice] = {}
        """Maps each microbatch to its range of rows in the host memory of a stage. The range is the same for
        every stage."""
        self._host_GRD = torch.empty(0)
        self._allocate(part.layout.offloaded_rows)

    @property
    def reserved_rows(self) -> int:
        """Number of rows of a round (one global batch of every job) for which host memory is allocated."""
        return self._host_GRD.shape[1]

    def reserve(self, rows: int) -> None:
        assert not self._rows, "inputs still wait on the host"
        if rows > self.reserved_rows:
            self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        """Allocate host memory for the inputs of rounds (one global batch of every job) of up to `rows` rows.
        The old memory is freed first, so that both need not fit at once."""
        self._copies.finish()
        self._host_GRD = torch.empty(0)
        shape = (len(self._offloaded), rows, self.width)
        [room] = host_vectors([(math.prod(shape), self._dtype)], self._device)
        self._host_GRD = room.view(shape)

    def store_input(self, visit: StageVisit, input_TD: Tensor, has_backward: bool = True) -> None:
        self._kept.store_input(visit, input_TD)
        if has_backward and visit.stage in self._offloaded:
            self._offloaded_visits.add(visit)
            if visit.microbatch not in self._rows:
                start, count = max((taken.stop for taken in self._rows.values()), default=0), len(input_TD)
                assert start + count <= self.reserved_rows, "the round has more rows than were reserved"
                self._rows[visit.microbatch] = slice(start, start + count)
            self._copies.copy_out(visit, input_TD, self._host_TD(visit))

    def _host_TD(self, visit: StageVisit) -> Tensor:
        """Return the host buffer that is reserved for the input of this pass of a microbatch through a
        stage."""
        return self._host_GRD[self._offloaded.index(visit.stage), self._rows[visit.microbatch]]

    def read(self, visit: StageVisit) -> Tensor:
        self._copies.await_copy_in(visit)
        return self._kept.read(visit)

    def end_forward(self, visit: StageVisit) -> None:
        if visit in self._offloaded_visits:
            self._copies.await_copy_out(visit)
            self._kept.drop(visit)

    def prefetch_input(self, visit: StageVisit) -> None:
        if visit in self._offloaded_visits:
            self._offloaded_visits.remove(visit)
            self._kept.store_input(visit, self._copies.copy_in(visit, self._host_TD(visit)))

    def drop(self, visit: StageVisit) -> None:
        self._kept.drop(visit)
        if self._offloaded and visit.stage == self._offloaded[0]:
            self._rows.pop(visit.microbatch, None)

    def store_gradient(self, visit: StageVisit, dh_TD: Tensor) -> None:
        self._kept.store_gradient(visit, dh_TD)

    def take_gradient(self, visit: StageVisit) -> Tensor:
        return self._kept.take_gradient(visit)

    def take_outgoing(self, visit: StageVisit, payload: Payload) -> Tensor | None:
        return self._kept.take_outgoing(visit, payload)

    def renumber_microbatches(self, numbers: Mapping[int, int]) -> None:
        assert not numbers, "a streamed base has no microbatch in flight between two windows"

    def forget(self) -> None:
        self._copies.finish()
        self._kept.forget()
        self._offloaded_visits.clear()
        self._rows.clear()
