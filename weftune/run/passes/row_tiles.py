"""Decoder layers of long microbatches, computed in tiles of rows: only attention sees all rows at once.

A layer has two parts that treat rows separately: the front, which ends with queries, keys and values, and the
rest, which begins with the output of attention. Both run tile by tile, each tile with its own autograd graph,
and the backward goes through the graphs of the rest, of attention and of the front. A recomputed layer keeps
only its input, and optionally the output of its attention, on the device or in host memory.

Shapes: T rows of the microbatch, D hidden width, H query heads, G key and value heads, E width of a head, N
values of attention per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from weftune.run.passes.host_copies import HostStore

ROW_MULTIPLE = 128
"""Number of rows of which every tile has a multiple, except the last tile of a microbatch."""

Fetch = Callable[[], Tensor]
"""Function that returns a tensor kept from the forward, on the device. If the tensor was kept in host memory,
the function copies it back."""
Qkv = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, E], keys [T, G, E] and values [T, G, E] of attention."""


@dataclass(frozen=True, slots=True)
class TiledParts:
    """The functions that compute the parts of a decoder layer for one microbatch, before, in and after
    attention."""

    project_qkv: Callable[[Tensor, slice], tuple[Tensor, Qkv]]
    """Function of the hidden states h of a tile (a range of rows) and the slice of these rows. It returns the
    residual, which is h itself, and queries, keys and values."""
    attend: Callable[[Qkv], Tensor]
    """Function that computes attention from queries, keys and values. It returns the output [T, H, E] for all
    rows of the microbatch."""
    finish_layer: Callable[[Tensor, Tensor, bool], Tensor]
    """Function of the residual and the output of attention for a tile (a range of rows), which returns the
    layer's output. If the third argument is True, only the autograd graph of the output is needed, and its
    values may be arbitrary."""
    tile_adapters: Callable[[slice], AbstractContextManager[None]]
    """Function that returns a context in which the adapters are applied to the given slice of the
    microbatch's rows."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The choice of which tensors a layer keeps from its forward to its backward."""

    layer: int
    keeps_all: bool = False
    """Whether the layer keeps all activations, so that nothing is recomputed in the backward."""
    keeps_attention: bool = False
    """Whether the layer keeps the output of attention, so that attention is not recomputed in the
    backward."""
    host: HostStore | None = None
    """Store in host memory for the layer's input and the output of attention. None keeps both on the
    device."""

    def store_tensor(self, tensor: Tensor) -> Fetch:
        """Keep a tensor on the device or in host memory, together with the whole storage of which it is a
        view. Return a function that returns the tensor; it may be called once."""
        if self.host is None:
            return lambda: tensor
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        fetch = self.host.store_vector(self.layer, tensor.new_empty(0).set_(tensor.untyped_storage()))
        return lambda: fetch().as_strided(*layout)


def row_tiles(rows: int, tile_rows: int) -> list[slice]:
    """Return slices of about equal length, with at most `tile_rows` rows each, that together cover all
    rows."""
    count = -(-rows // tile_rows)
    size = -(-rows // count)
    if tile_rows >= ROW_MULTIPLE:
        size = min(tile_rows, -(-size // ROW_MULTIPLE) * ROW_MULTIPLE)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def tiled_layer(
    h_TD: Tensor, anchor: Tensor, parts: TiledParts, tiles: Sequence[slice], keep: Keep
) -> Tensor:
    """Return the output of a layer, computed tile by tile (one range of rows after another). `anchor` is a
    scalar that requires a gradient and never gets one: it makes autograd record the layer."""
    if not torch.is_grad_enabled():
        return _LayerPass(parts, tiles, keep).output(h_TD)
    output: Tensor = _TiledLayer.apply(h_TD, anchor, _LayerPass(parts, tiles, keep))
    return output


class _TiledLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, anchor: Tensor, layer_pass: _LayerPass) -> Tensor:
        ctx.layer_pass = layer_pass
        return layer_pass.forward(h_TD)

    @staticmethod
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layer_pass.backward(dout_TD), None, None


@dataclass(slots=True)
class _FrontGraph:
    """The autograd graph of the part of a layer before attention, for one tile (a range of rows)."""

    rows: slice
    h_TD: Tensor
    """Layer input in the rows of the tile, a leaf tensor of autograd."""
    outputs: tuple[GradientEdge, ...]
    """Output nodes of the autograd graph: the residual and attention's queries, keys and values. The tensors
    themselves are not kept."""


@dataclass(slots=True)
class _RestGraph:
    """The autograd graph of the part of a layer after attention, for one tile (a range of rows)."""

    rows: slice
    h_TD: Tensor
    attention_THE: Tensor
    """Output of attention for the rows of the tile. This tensor and `h_TD` are the leaf tensors of the
    autograd graph."""
    output_TD: Tensor


class _LayerPass:
    """The pass of one microbatch through one layer, from its forward to its backward."""

    def __init__(self, parts: TiledParts, tiles: Sequence[slice], keep: Keep) -> None:
        self._parts, self._tiles, self._keep = parts, tiles, keep
        self._input: Fetch | None = None
        self._attention: _KeptAttention | None = None
        self._front_graphs: list[_FrontGraph] = []
        self._kept_rest_graphs: list[_RestGraph] = []

    def output(self, h_TD: Tensor) -> Tensor:
        """Return the output of the layer, computed tile by tile, without keeping anything for a backward."""
        attention_THE = self._parts.attend(self._run_fronts(h_TD))
        return self._collect_outputs(h_TD, self._rest_graphs(h_TD, attention_THE))

    def forward(self, h_TD: Tensor) -> Tensor:
        """Return the output of the layer, computed tile by tile with autograd disabled, and keep the tensors
        that the backward needs."""
        keep, h_TD = self._keep, h_TD.detach()
        if keep.host is not None:
            keep.host.free_copied()
        self._input = keep.store_tensor(h_TD)
        if keep.keeps_all:
            with torch.enable_grad():
                qkv = self._run_fronts(h_TD, self._front_graphs)
                self._attention, attention_THE = _KeptAttention.compute(self._parts.attend, qkv, keep)
                self._attention.saved.qkv = qkv
                self._kept_rest_graphs = list(self._rest_graphs(h_TD, attention_THE))
            return self._collect_outputs(h_TD, self._kept_rest_graphs)
        if not keep.keeps_attention:
            return self.output(h_TD)
        qkv = self._run_fronts(h_TD)
        self._attention, attention_THE = _KeptAttention.compute(self._parts.attend, qkv, keep)
        del qkv
        return self._collect_outputs(h_TD, self._rest_graphs(h_TD, attention_THE))

    def backward(self, dout_TD: Tensor) -> Tensor:
        """Run the backward of the layer: add to the gradients of the adapters, and return the gradient of the
        layer's input."""
        assert self._input is not None
        h_TD, keep = self._input(), self._keep
        if keep.host is not None:
            keep.host.request(keep.layer - 1, count=1)
        # The gradient that autograd gives to a layer is read by no other, so it can be overwritten.
        dh_TD = dout_TD if dout_TD.is_contiguous() else dout_TD.contiguous()
        with torch.enable_grad():
            fronts, attention = self._front_graphs, self._attention
            qkv = None if keep.keeps_all else self._run_fronts(h_TD, fronts)
            if attention is None:
                assert qkv is not None
                attention, attention_THE = _KeptAttention.compute(self._parts.attend, qkv, Keep(keep.layer))
            else:
                attention_THE = attention.output()
            attention.saved.qkv, qkv = qkv or attention.saved.qkv, None
            dattention_THE = torch.empty_like(attention_THE)
            for rest in self._kept_rest_graphs or self._rest_graphs(h_TD, attention_THE, graph_only=True):
                torch.autograd.backward(rest.output_TD, dh_TD[rest.rows])
                dh_TD[rest.rows].copy_(_leaf_gradient(rest.h_TD))
                dattention_THE[rest.rows].copy_(_leaf_gradient(rest.attention_THE))
        # Autograd keeps this object until the backward of the whole pass has ended.
        self._input, self._attention, self._front_graphs, self._kept_rest_graphs = None, None, [], []
        del attention_THE, h_TD, rest
        gradients = attention.backward(dattention_THE)
        del attention, dattention_THE
        if keep.host is not None:
            # Not earlier: the backward of attention needs the most memory.
            keep.host.request(keep.layer - 1)
        while fronts:
            front = fronts.pop()
            given = (dh_TD[front.rows], *(gradient[front.rows] for gradient in gradients))
            torch.autograd.backward(front.outputs, given)
            dh_TD[front.rows].copy_(_leaf_gradient(front.h_TD))
        return dh_TD

    def _run_fronts(self, h_TD: Tensor, graphs: list[_FrontGraph] | None = None) -> Qkv:
        """Compute the part of the layer before attention, tile by tile (one range of rows after another).
        Return queries, keys and values of all rows. If `graphs` is given, append the autograd graph of every
        tile to it."""
        whole: list[Tensor] = []
        for rows in self._tiles:
            leaf_TD = _detach_leaf(h_TD[rows])
            with self._parts.tile_adapters(rows):
                residual_TD, parts = self._parts.project_qkv(leaf_TD, rows)
            whole = whole or [part.new_empty(len(h_TD), *part.shape[1:]) for part in parts]
            for into, part in zip(whole, parts, strict=True):
                into[rows] = part.detach()
            if graphs is not None:
                edges = tuple(get_gradient_edge(output) for output in (residual_TD, *parts))
                graphs.append(_FrontGraph(rows, leaf_TD, edges))
        q_THE, k_TGE, v_TGE = whole
        return q_THE, k_TGE, v_TGE

    def _rest_graphs(
        self, h_TD: Tensor, attention_THE: Tensor, graph_only: bool = False
    ) -> Iterator[_RestGraph]:
        for rows in self._tiles:
            leaf_TD, seen = _detach_leaf(h_TD[rows]), _detach_leaf(attention_THE[rows])
            with self._parts.tile_adapters(rows):
                output_TD = self._parts.finish_layer(leaf_TD, seen, graph_only)
            yield _RestGraph(rows, leaf_TD, seen, output_TD)

    def _collect_outputs(self, h_TD: Tensor, rest_graphs: Iterator[_RestGraph] | list[_RestGraph]) -> Tensor:
        output_TD = torch.empty_like(h_TD)
        for rest in rest_graphs:
            output_TD[rest.rows] = rest.output_TD.detach()
        return output_TD


def _detach_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


def _leaf_gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


class _KeptAttention:
    """The autograd graph of a layer's attention over all rows, kept from the forward to the backward."""

    def __init__(
        self, edge: GradientEdge, output: Tensor | _Saved, saved: _SavedTensors, gradients: list[Tensor]
    ) -> None:
        self._edge, self._output, self.saved, self._gradients = edge, output, saved, gradients

    @classmethod
    def compute(cls, attend: Callable[[Qkv], Tensor], qkv: Qkv, keep: Keep) -> tuple[_KeptAttention, Tensor]:
        """Compute the attention of all rows. Return its graph, and its output [T, H, E]."""
        saved, gradients = _SavedTensors(qkv, keep), list[Tensor]()
        with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
            anchor = torch.zeros((), requires_grad=True)
            attention_THE = attend(_CollectGradients.apply(anchor, gradients, *qkv))
        edge, attention_THE = get_gradient_edge(attention_THE), attention_THE.detach()
        return cls(edge, saved.pack(attention_THE), saved, gradients), attention_THE

    def output(self) -> Tensor:
        """Return the output of attention, which has been kept on the device or the host since the forward."""
        return self.saved.unpack(self._output)

    def backward(self, dattention_THE: Tensor) -> list[Tensor]:
        """Return the gradients of queries, keys and values."""
        torch.autograd.backward((self._edge,), (dattention_THE,))
        return self._gradients


class _SavedTensors:
    """The tensors that the autograd graph of attention saves, except queries, keys and values, which the
    backward provides again. Large tensors are kept on the device or in host memory. The autograd graph refers
    to this object, so this object must not refer to the graph."""

    def __init__(self, qkv: Qkv, keep: Keep) -> None:
        self.qkv: Qkv | None = None
        """Queries, keys and values that the backward of attention reads. None until the backward provides
        them."""
        self._keep = keep
        self._given = {one.untyped_storage().data_ptr(): index for index, one in enumerate(qkv)}
        self._least_bytes = min(one.nbytes for one in qkv)
        self._storage_readers: dict[int, Fetch] = {}
        """Maps the address of each large saved storage to a function that returns the storage's values as a
        vector."""
        self._fetched_storages: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        saved = _Saved.from_tensor(tensor)
        if saved.address in self._given:
            return replace(saved, qkv_index=self._given[saved.address])
        if tensor.nbytes < self._least_bytes:
            return tensor
        if saved.address not in self._storage_readers:
            flat = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            self._storage_readers[saved.address] = self._keep.store_tensor(flat)
        return saved

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.qkv_index is not None:
            assert self.qkv is not None, "queries, keys and values have not been given again"
            flat = self.qkv[saved.qkv_index]
        else:
            if saved.address not in self._fetched_storages:
                self._fetched_storages[saved.address] = self._storage_readers.pop(saved.address)()
            flat = self._fetched_storages[saved.address]
        return flat.as_strided(saved.size, saved.stride, saved.offset)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor saved by autograd, described as a view of a storage that is kept in another place."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    qkv_index: int | None = None
    """Index of the tensor in (queries, keys, values). None for any other tensor."""

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _Saved:
        address = tensor.untyped_storage().data_ptr()
        return cls(address, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class _CollectGradients(torch.autograd.Function):
    """An autograd function that returns its input tensors unchanged. Its backward appends their gradients to
    a list. The autograd graph then needs no leaf tensors, which it would keep alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: list[Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.into = gradients
        return tuple(one.view_as(one) for one in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.into.extend(gradients)
        return (None,) * (2 + len(gradients))
