"""Forward and backward of microbatches through the stages of a base, with kernels launched one by one.

A pass over the last stage ends at the last hidden states. Head and losses start from these states as a leaf
tensor of autograd, whose gradient starts the backward of the pass.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import Program
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.rows import DeviceMicrobatch, InFlight, Membership, StageVisit, renumber_visits


class PlainPasses:
    """The part of an executor that runs passes of microbatches over stages without CUDA graphs. A forward is
    kept until its backward, or is recomputed from its input."""

    def __init__(self, adapted: AdaptedBase, stages: Mapping[int, Base]) -> None:
        self.adapted, self.stages = adapted, stages
        self.open_passes: dict[StageVisit, Any] = {}
        """Maps each pass of a microbatch over a stage that waits for its backward to a `Plain` object, or to
        a captured graph with the same methods."""

    @property
    def captures(self) -> int | None:
        """Number of CUDA graphs captured so far. None if passes are not captured."""
        return None

    @property
    def failed_captures(self) -> int:
        """Number of microbatch sizes for which the capture of a pass as a CUDA graph ran out of memory. 0 if
        passes are not captured."""
        return 0

    def begin_window(self, program: Program) -> None:
        if (layers := self.adapted.layers) is not None:
            layers.recompute = program.recompute
            if not program.recompute.offloaded_layers:
                layers.host.release()

    def begin_round(self) -> None:
        """Prepare for the next round (one global batch of every job). No microbatch may be in flight when
        this is called."""

    def forward(
        self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None, keeps_activations: bool
    ) -> Tensor:
        """Run the forward of a stage on the previous stage's output, and return this stage's output. If
        `keeps_activations`, the activations are kept until `backward`."""
        assert visit not in self.open_passes, "a pass is still open"
        passed = self._make_pass(visit, in_flight, input_TD)
        if not keeps_activations:
            return passed.forward_only()
        self.open_passes[visit] = passed
        return passed.forward()

    def backward(
        self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None, dh_TD: Tensor
    ) -> Tensor | None:
        """Run the backward of a stage: add to the gradients of all jobs in the microbatch, and return the
        gradient of the stage's input. `dh_TD` is the gradient of the stage's output. If the forward was not
        kept, it is recomputed first."""
        passed = self.open_passes.pop(visit, None)
        if passed is None:
            passed = self._make_pass(visit, in_flight, input_TD)
            passed.forward()
        passed.backward(dh_TD)
        return None if input_TD is None else passed.dinput_TD

    @torch.no_grad()
    def evaluate(self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None) -> Tensor:
        """Return the stage's output, computed without dropout and without gradients."""
        return self._make_pass(visit, in_flight, input_TD).forward(training=False)

    def renumber_microbatches(self, numbers: Mapping[int, int]) -> None:
        """Give the microbatches in flight the indices that they have in the next Program: `numbers` maps each
        old index to the new one."""
        self.open_passes = renumber_visits(self.open_passes, numbers)

    def abandon(self) -> None:
        """Drop all passes that wait for their backward. Also free memory that is not required, such as the
        memory of captured graphs."""
        self.open_passes.clear()
        if self.adapted.layers is not None:
            self.adapted.layers.host.forget()

    def _make_pass(self, visit: StageVisit, in_flight: InFlight, input_TD: Tensor | None) -> Plain:
        given = None if input_TD is None else input_TD.detach()
        adapted = self.adapted
        base = self.stages[visit.stage]
        tiled = adapted.layers is not None and adapted.layers.recompute.tile_rows > 0
        tiled &= in_flight.sample_keys is None
        membership = in_flight.membership(adapted, tiled)
        return Plain(
            base, adapted.banks, in_flight.device_microbatch, adapted.route, membership, given, tiled
        )


class Plain:
    """The pass of one microbatch over a base or one of its stages, without CUDA graphs."""

    def __init__(
        self,
        base: Base,
        banks: Banks,
        device_microbatch: DeviceMicrobatch,
        route: Route,
        membership: Membership,
        input_TD: Tensor | None = None,
        in_tiles: bool = False,
    ) -> None:
        """Create the pass without running it. `input_TD` is the previous stage's output, or None at the first
        stage. If `in_tiles`, the linears of the layers process one tile of rows at a time."""
        self._base, self._banks, self._laid, self._route = base, banks, device_microbatch, route
        self._membership, self._input_TD, self._in_tiles = membership, input_TD, in_tiles
        self._end: GradientEdge | None = None
        """Output node of the forward's autograd graph, at which the backward starts. None if no job has an
        adapter in this stage or an earlier one."""

    def forward(self, training: bool = True) -> Tensor:
        if training and self._input_TD is not None:
            self._input_TD.requires_grad_()
        with self._bind_adapters(training):
            h_TD = self._base.hidden(self._laid.microbatch, self._membership.pack, self._input_TD)
        self._end = get_gradient_edge(h_TD) if h_TD.requires_grad else None
        return h_TD

    @torch.no_grad()
    def forward_only(self) -> Tensor:
        """Run a forward that keeps nothing for a backward, and return its output."""
        return self.forward()

    def backward(self, dh_TD: Tensor) -> None:
        if self._end is None:
            return  # a first stage on which no job has an adapter
        # A layer that is recomputed must see the adapters of its own microbatch.
        with self._bind_adapters(training=True):
            torch.autograd.backward((self._end,), (dh_TD,))

    def _bind_adapters(self, training: bool) -> AbstractContextManager[None]:
        microbatch, rows = self._laid.microbatch, self._membership.rows
        return self._banks.bind(microbatch, self._route, training, rows, in_tiles=self._in_tiles)

    @property
    def dinput_TD(self) -> Tensor:
        """Gradient of the stage's input, available after `backward`."""
        assert self._input_TD is not None
        assert self._input_TD.grad is not None
        return self._input_TD.grad
