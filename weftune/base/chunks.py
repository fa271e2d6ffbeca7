"""The attention of a sample that passes through the layers in chunks (MuxTune, section 3.5).

Long samples are cut into chunks of consecutive rows. The chunks of a sample run forward in order and backward
in reverse. A chunk attends to its own keys and values and those of the earlier chunks, which are kept in one
buffer per sample and layer. The backward of a chunk adds to the gradients of all keys and values that the
chunk attended to. Since the backwards of all later chunks precede it, the gradients of the chunk's own keys
and values are then complete.

Shapes: T rows of a chunk, L keys of the sample up to the end of a chunk, H query heads, G key and value
heads, D width of a head, P prefix keys, N width of all key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weftune.base.attention import ReadKeys, Rule, attend_to_earlier


@dataclass(slots=True)
class LayerKeys:
    """The keys and values of one sample in one layer, and their gradients."""

    keys_LGD: Tensor
    values_LGD: Tensor
    requires_gradient: bool = False
    """Whether the keys and values of any chunk computed so far depend on a trained parameter."""
    gradients: tuple[Tensor, Tensor] | None = None
    """Gradients of keys and values, summed over the backwards so far. None before the first backward."""

    def write(self, first_row: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self.keys_LGD[first_row : first_row + len(k_TGD)] = k_TGD
        self.values_LGD[first_row : first_row + len(v_TGD)] = v_TGD

    def read(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the rows `rows` of the sample as leaf tensors that require
        gradients."""
        # `data` does not share its version with the tensor: later chunks write other rows, and autograd would
        # take that for a change of the rows that it has saved.
        keys_LGD, values_LGD = (x.data[rows].requires_grad_() for x in (self.keys_LGD, self.values_LGD))
        return keys_LGD, values_LGD

    def read_heads_first(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the rows `rows` of the sample with heads before rows, each [1, G, L,
        D]."""
        return _heads_first(self.keys_LGD[rows]), _heads_first(self.values_LGD[rows])

    def add_gradients(self, rows: slice, gradients: Sequence[Tensor]) -> None:
        if self.gradients is None:
            self.gradients = _zeros_like(self.keys_LGD), _zeros_like(self.values_LGD)
        for total_LGD, gradient_LGD in zip(self.gradients, gradients, strict=True):
            total_LGD[rows] += gradient_LGD

    def read_gradients(self, rows: slice) -> tuple[Tensor, Tensor]:
        assert self.gradients is not None, "gradients are added before they are read"
        keys_LGD, values_LGD = (total[rows].to(self.keys_LGD.dtype) for total in self.gradients)
        return keys_LGD, values_LGD


def _zeros_like(x: Tensor) -> Tensor:
    """Return zeros of the same shape, for a sum over chunks, in float32 or, if that is more precise, in the
    dtype of `x`."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


@dataclass(slots=True)
class SampleKeys:
    """The keys and values of one sample in the layers of this worker (process). They are kept from the
    forward pass of the sample's first chunk until the backward pass of this chunk, which is the last."""

    rows: int
    """Number of rows of the whole sample."""
    layers: dict[int, LayerKeys] = field(default_factory=dict)

    def layer_keys(self, number: int, prefix_rows: int, k_TGD: Tensor, v_TGD: Tensor) -> LayerKeys:
        """Return the keys and values of a layer. The first call allocates them, with room for all rows of the
        sample and for `prefix_rows` prefix keys."""
        if number not in self.layers:
            room = prefix_rows + self.rows
            keys_LGD, values_LGD = (x.detach().new_empty(room, *x.shape[1:]) for x in (k_TGD, v_TGD))
            self.layers[number] = LayerKeys(keys_LGD, values_LGD)
        return self.layers[number]


class ChunkKeys:
    """The keys and values of a sample during the pass of one of its chunks (consecutive rows). The class
    implements `KeyValueCache`."""

    def __init__(
        self, sample: SampleKeys, start: int, prefix_keys: int = 0, read_prefix: ReadKeys | None = None
    ) -> None:
        """Prepare the pass of the chunk that begins with row `start` of the sample. `read_prefix` returns the
        `prefix_keys` keys, with their values, that the adapter puts before the sample. These are computed
        with the first chunk, and all chunks attend to them."""
        self._sample, self._start = sample, start
        self._prefix_keys, self._read_prefix = prefix_keys, read_prefix

    @property
    def states(self) -> tuple[dict[int, tuple[Tensor, Tensor]], ...]:
        """Raise AssertionError. Recurrent states are not supported, since a base with recurrent layers does
        not run samples in chunks."""
        raise AssertionError("no sample is cut into chunks where layers have a recurrent state")

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rule: Rule, layer: int) -> Tensor:
        memory = self._sample.layer_keys(layer, self._prefix_keys, k_TGD, v_TGD)
        first = self._prefix_keys + self._start
        if self._start == 0 and self._read_prefix is not None:
            ((keys_PN, values_PN),) = self._read_prefix(layer)
            k_TGD, v_TGD = (
                torch.cat([before_PN.view(-1, *x.shape[1:]).to(x.dtype), x])
                for before_PN, x in ((keys_PN, k_TGD), (values_PN, v_TGD))
            )
            first = 0
        memory.requires_gradient |= k_TGD.requires_grad or v_TGD.requires_grad
        # Autograd does not see the earlier keys: without the anchor, a chunk that depends on parameters
        # through these keys alone, such as virtual tokens, would have no backward.
        anchor = torch.zeros((), device=q_THD.device, requires_grad=memory.requires_gradient)
        splits = first > 0 and _sees_all_earlier_keys(q_THD, v_TGD, rule, first + len(k_TGD))
        function = _SplitAttention if splits else _ChunkAttention
        seen_THD: Tensor = function.apply(memory, first, rule, anchor, q_THD, k_TGD, v_TGD)
        return seen_THD


class _ChunkAttention(torch.autograd.Function):
    """An autograd function for the attention of a chunk to its own keys, which it writes to memory, and to
    the keys of the sample's earlier chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        memory: LayerKeys,
        first_row: int,
        rule: Rule,
        anchor: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
    ) -> Tensor:
        memory.write(first_row, k_TGD, v_TGD)
        stop = first_row + len(k_TGD)
        # The first row of the chunk attends to no earlier key.
        reach = stop if rule.window is None else len(q_THD) + rule.window - 1
        ctx.memory, ctx.own, ctx.read = memory, slice(first_row, stop), slice(max(0, stop - reach), stop)
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            given = q_THD.detach().requires_grad_(), *memory.read(ctx.read)
            seen_THD = attend_to_earlier(*given, rule)
        ctx.graph = (given, seen_THD) if seen_THD.requires_grad else None
        return seen_THD.detach()

    @staticmethod
    def backward(ctx: Any, d_THD: Tensor) -> tuple[Tensor | None, ...]:
        memory: LayerKeys = ctx.memory
        given, seen_THD = ctx.graph
        dq_THD, *gradients = torch.autograd.grad(seen_THD, given, d_THD)
        memory.add_gradients(ctx.read, gradients)
        ctx.memory = ctx.graph = None
        return None, None, None, None, dq_THD, *memory.read_gradients(ctx.own)


def _sees_all_earlier_keys(q_THD: Tensor, v_TGD: Tensor, rule: Rule, length: int) -> bool:
    """Return whether every row on a CPU attends to all keys before it (no sliding window cuts off any of
    `length` keys) and PyTorch's kernel can compute this attention."""
    is_limited = rule.softcap is not None or (rule.window is not None and rule.window < length)
    return q_THD.device.type == "cpu" and q_THD.shape[-1] == v_TGD.shape[-1] and not is_limited


class _SplitAttention(torch.autograd.Function):
    """The attention of a chunk on a CPU, computed as its attention to its own keys and its attention to all
    earlier keys.

    Neither part needs a mask: the kernel is causal in the first part, and a row attends to every key of the
    second one. With a mask, PyTorch would also compute the scores that the mask hides. The two results are
    added with the weights of their softmax sums. Given the result and the sums of both parts together, the
    backward of a part returns that part's contribution to the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        memory: LayerKeys,
        first_row: int,
        rule: Rule,
        anchor: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
    ) -> Tensor:
        memory.write(first_row, k_TGD, v_TGD)
        ctx.memory, ctx.scale = memory, rule.scale
        ctx.parts = (slice(first_row, first_row + len(k_TGD)), True), (slice(0, first_row), False)
        q_1HTD = _heads_first(q_THD)
        (own_1HTD, own_1HT), (earlier_1HTD, earlier_1HT) = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_1HTD, *memory.read_heads_first(rows), is_causal=is_causal, scale=rule.scale
            )
            for rows, is_causal in ctx.parts
        )
        sums_1HT = torch.logaddexp(own_1HT, earlier_1HT)
        seen_1HTD = (
            own_1HTD * (own_1HT - sums_1HT).exp()[..., None]
            + earlier_1HTD * (earlier_1HT - sums_1HT).exp()[..., None]
        ).to(q_THD.dtype)
        ctx.save_for_backward(q_1HTD, seen_1HTD, sums_1HT)
        return seen_1HTD[0].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, d_THD: Tensor) -> tuple[Tensor | None, ...]:
        memory: LayerKeys = ctx.memory
        q_1HTD, seen_1HTD, sums_1HT = ctx.saved_tensors
        dq_1HTD = torch.zeros_like(q_1HTD)
        for rows, is_causal in ctx.parts:
            part_1HTD, *gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(d_THD),
                q_1HTD,
                *memory.read_heads_first(rows),
                seen_1HTD,
                sums_1HT,
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            dq_1HTD += part_1HTD
            memory.add_gradients(rows, [x_1GLD[0].transpose(0, 1) for x_1GLD in gradients])
        ctx.memory = None
        own, _ = ctx.parts[0]
        return None, None, None, None, dq_1HTD[0].transpose(0, 1), *memory.read_gradients(own)


def _heads_first(x_LGD: Tensor) -> Tensor:
    """Return the tensor with its heads before its rows, as PyTorch's attention takes it, [1, G, L, D]."""
    return x_LGD.transpose(0, 1)[None]
