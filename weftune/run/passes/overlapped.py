"""Passes that run half a layer at a time on shards of a base, so that the sums over shards of one microbatch
overlap with the computation of another.

A half layer is an attention or a feed-forward with its linears and their adapters. It has two autograd
graphs, since the sums over shards are not part of any graph. The first graph is equal on every shard: it adds
the summed output of the previous half layer to the residual, and normalises the result. The second graph
computes the half layer with the weights of this shard. Its output is summed over the shards in the forward,
and the gradient of its input in the backward. Each sum starts immediately, and the next action of the
microbatch waits for it.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weftune.core.shards import StartSum, WaitForSum
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.layers import Angle, Layers
from weftune.run.passes.rows import InFlight, Membership, StageVisit


@dataclass(slots=True)
class _StartedSum:
    """A tensor whose sum over the shards (workers that divide every layer) has been started."""

    values_TD: Tensor
    wait: WaitForSum

    def result(self) -> Tensor:
        self.wait()
        return self.values_TD


@dataclass(slots=True)
class _Graph:
    """An autograd graph between leaf tensors, its inputs, and its ends, the output nodes at which the
    backward begins."""

    leaves: tuple[Tensor, ...]
    ends: tuple[GradientEdge, ...]

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the backward of the graph, then release the graph. `gradients` are the gradients of the graph's
        ends (outputs). Return the gradients of its leaves (inputs)."""
        torch.autograd.backward(self.ends, gradients)
        found = []
        for leaf in self.leaves:
            assert leaf.grad is not None, "every leaf is used by the graph"
            found.append(leaf.grad)
        self.leaves = self.ends = ()
        return tuple(found)


@dataclass(slots=True)
class _OpenPass:
    """The state of a microbatch's pass that has begun with its first half layer (attention or feed-forward)
    and has not ended."""

    in_flight: InFlight
    membership: Membership
    embedding_end: GradientEdge | None
    """Output node of the autograd graph that computes the embeddings. None if no job trains an embedding."""
    angles: Sequence[Angle]
    residual_TD: Tensor
    """In the forward, the residual to which the result of `pending_sum` will be added. In the backward, the
    gradient of the residual."""
    pending_sum: _StartedSum | None = None
    """Sum over the shards that the last half layer (attention or feed-forward) has started. None before the
    first half layer and after the forward's end."""
    norm_graphs: list[_Graph] = field(default_factory=list)
    """For each half layer (attention or feed-forward), the autograd graph of the residual addition and the
    norm before it. The last graph is that of the model's final norm."""
    half_graphs: list[_Graph] = field(default_factory=list)
    """For each half layer (attention or feed-forward), the autograd graph from its normalised input to this
    shard's part of its output."""

    def finished_sum(self) -> Tensor:
        assert self.pending_sum is not None, "a sum is under way after every half layer"
        return self.pending_sum.result()


class OverlappedPasses:
    """The part of an executor that runs passes half a layer (an attention or a feed-forward) at a time, and
    keeps passes that have begun and not ended. Such passes are neither captured as CUDA graphs nor
    recomputed."""

    def __init__(self, adapted: AdaptedBase) -> None:
        self._adapted = adapted
        self._open_passes: dict[StageVisit, _OpenPass] = {}

    @property
    def is_possible(self) -> bool:
        """Whether passes can run half a layer at a time: the layers of the base are fused, and divided into
        shards that can start sums without waiting for them."""
        team = self._adapted.team
        return self._adapted.is_fused and team is not None and team.start_sum is not None

    def is_open(self, visit: StageVisit) -> bool:
        """Return whether this pass of a microbatch over a stage has begun with a half layer (attention or
        feed-forward) and has not ended."""
        return visit in self._open_passes

    def forget(self) -> None:
        """Drop all passes that have begun and not ended."""
        self._open_passes.clear()

    def forward_half(self, visit: StageVisit, in_flight: InFlight, index: int) -> None:
        """Compute half a layer (attention or feed-forward) and start the sum of its output over the shards.
        The call with `index` 0 also computes the embeddings."""
        if index == 0:
            self._open_passes[visit] = self._begin_pass(in_flight)
        open_pass, layer, is_feed_forward = (
            self._open_passes[visit],
            self._layers.fused_layers[index // 2],
            index % 2 == 1,
        )
        h_TD, leaves = self._add_residual(open_pass, index)
        skip_TD, n_TD = layer.normalise_half(is_feed_forward, h_TD)
        open_pass.norm_graphs.append(_Graph(leaves, (get_gradient_edge(skip_TD), get_gradient_edge(n_TD))))
        given_TD = n_TD.detach().requires_grad_()
        with self._apply_adapters(open_pass):
            y_TD = layer.run_half(
                is_feed_forward, given_TD, open_pass.angles[index // 2], open_pass.membership.pack
            )
        open_pass.half_graphs.append(_Graph((given_TD,), (get_gradient_edge(y_TD),)))
        open_pass.residual_TD = skip_TD.detach()
        open_pass.pending_sum = self._launch_sum(y_TD.detach().clone(memory_format=torch.contiguous_format))

    def end_forward(self, visit: StageVisit) -> Tensor:
        """End the forward of a pass that ran half layer by half layer, and return the last hidden states,
        after the final norm."""
        open_pass, norm = self._open_passes[visit], self._layers.final_norm
        assert norm is not None, "the only stage has the final norm"
        h_TD, leaves = self._add_residual(open_pass, len(open_pass.half_graphs))
        n_TD = norm(h_TD)
        open_pass.norm_graphs.append(_Graph(leaves, (get_gradient_edge(n_TD),)))
        open_pass.pending_sum = None
        return n_TD

    def begin_backward(self, visit: StageVisit, dn_TD: Tensor) -> None:
        """Begin the backward of a pass. `dn_TD` is the gradient of the last hidden states, after the final
        norm."""
        self._open_passes[visit].pending_sum = _StartedSum(dn_TD, lambda: None)

    def backward_half(self, visit: StageVisit, index: int) -> None:
        """Run the backward of half a layer (attention or feed-forward): add to the gradients of its adapters,
        and start the sum over the shards of the gradient of the half layer's input."""
        open_pass = self._open_passes[visit]
        open_pass.residual_TD, dy_TD = self._add_residual_backward(open_pass)
        with self._apply_adapters(open_pass):
            (dgiven_TD,) = open_pass.half_graphs.pop().backward((dy_TD,))
        assert len(open_pass.half_graphs) == index, "half layers run backwards in the reverse order"
        open_pass.pending_sum = self._launch_sum(dgiven_TD.contiguous())

    def end_backward(self, visit: StageVisit) -> None:
        """End the backward of a pass that ran half layer by half layer: add the gradients of trained
        embeddings to their jobs' gradients."""
        open_pass = self._open_passes.pop(visit)
        (dh_TD,) = self._add_residual_backward(open_pass)
        if open_pass.embedding_end is not None:
            with self._apply_adapters(open_pass):
                torch.autograd.backward((open_pass.embedding_end,), (dh_TD,))

    def _begin_pass(self, in_flight: InFlight) -> _OpenPass:
        membership = in_flight.membership(self._adapted)
        banks, microbatch = self._adapted.banks, in_flight.device_microbatch.microbatch
        with banks.bind(microbatch, self._adapted.route, True, membership.rows):
            h_TD, angles = self._layers.compute_inputs(microbatch, membership.pack)
        embedding_end = get_gradient_edge(h_TD) if h_TD.requires_grad else None
        return _OpenPass(in_flight, membership, embedding_end, angles, h_TD.detach())

    def _add_residual(self, open_pass: _OpenPass, index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Add the summed output of the previous half layer (attention or feed-forward) to the residual.
        Return the result, which is the input of the next norm, and the two summands as leaves of its autograd
        graph."""
        residual_TD = open_pass.residual_TD.detach().requires_grad_()
        if index == 0:
            return residual_TD, (residual_TD,)
        y_TD = open_pass.finished_sum().requires_grad_()
        before = index - 1
        h_TD = self._layers.fused_layers[before // 2].add_half_output(before % 2 == 1, residual_TD, y_TD)
        return h_TD, (residual_TD, y_TD)

    def _add_residual_backward(self, open_pass: _OpenPass) -> tuple[Tensor, ...]:
        """Run the backward of the last graph in `norm_graphs`. Return the gradients of the residual and of
        the summed output of the half layer (attention or feed-forward) before it."""
        joint, dn_TD = open_pass.norm_graphs.pop(), open_pass.finished_sum()
        ends_with_norm = len(joint.ends) == 1
        return joint.backward((dn_TD,) if ends_with_norm else (open_pass.residual_TD, dn_TD))

    def _launch_sum(self, values_TD: Tensor) -> _StartedSum:
        return _StartedSum(values_TD, self._start_sum(values_TD))

    @property
    def _start_sum(self) -> StartSum:
        team = self._adapted.team
        assert team is not None
        assert team.start_sum is not None, "a team that overlaps can start sums"
        return team.start_sum

    @property
    def _layers(self) -> Layers:
        assert self._adapted.layers is not None
        return self._adapted.layers

    def _apply_adapters(self, open_pass: _OpenPass) -> AbstractContextManager[None]:
        """Return a context in which forward and backward apply the adapters of the jobs in this
        microbatch."""
        adapted = self._adapted
        return adapted.banks.bind(
            open_pass.in_flight.device_microbatch.microbatch, adapted.route, True, open_pass.membership.rows
        )
