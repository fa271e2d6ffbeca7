"""Gated DeltaNet (linear attention) over packed rows: every sample begins with an empty state.

A layer mixes rows with a short convolution and with a recurrence, and transformers' own forward would carry
both from one sample of a pack into the next. Here these two run on a padded batch of samples, while the
layer's linears run on the packed rows.

Shapes: T rows of the pack, S samples of a batch, L rows of the longest of them, H value heads, V width of a
value head, N inputs of the convolution (q, k and v).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from weftune.base.attention import Pack
from weftune.core.deterministic import are_kernels_deterministic

MODULES = frozenset({"Qwen3_5GatedDeltaNet"})
"""Names of the layer classes in transformers that this module supports."""
CHUNK = 64
"""Number of rows (tokens) per chunk of the DeltaNet recurrence. Transformers pads samples to a multiple of
this number."""


def separate_samples(model: PreTrainedModel) -> None:
    """Make every Gated DeltaNet layer of the model start each sample of a pack with an empty state."""
    for module in model.modules():
        if type(module).__name__ in MODULES:
            setattr(module, "forward", PackedDeltaNet(module))  # noqa: B010 (a method, to mypy)


class PackedDeltaNet:
    """A forward of a Gated DeltaNet layer, with transformers' signature, that keeps packed samples separate.
    If it is called without a pack, it runs the original forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        functions = vars(sys.modules[type(module).__module__])
        self._convolve, self._recur = functions["causal_conv1d_fn"], functions["torch_chunk_gated_delta_rule"]

    def __call__(
        self,
        hidden_states: Tensor,
        *others: Any,
        weftune_pack: Pack | None = None,
        **keyword_arguments: Any,
    ) -> Any:
        module = self._module
        if weftune_pack is None:
            with deterministic_sums():
                return type(module).forward(module, hidden_states, *others, **keyword_arguments)
        assert keyword_arguments.get("attention_mask") is None, "packed rows have no mask"
        assert keyword_arguments.get("cache_params") is None, "packed rows have no past"
        linears = module.in_proj_qkv, module.in_proj_b, module.in_proj_a
        qkv_TN, b_TH, a_TH = (linear(hidden_states)[0] for linear in linears)
        arguments = qkv_TN, b_TH, a_TH, weftune_pack.lengths
        # The recurrence keeps many times the size of its inputs, so its backward recomputes it instead.
        if weftune_pack.cache is not None:
            mixed_THV = self._mix_continued_samples(*arguments, weftune_pack.cache.states)
        elif torch.is_grad_enabled():
            mixed_THV = checkpoint(self._mix_rows, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed_THV = self._mix_rows(*arguments)
        gate_THV = module.in_proj_z(hidden_states)[0].unflatten(-1, (-1, module.head_v_dim))
        normed_RV = module.norm(mixed_THV.flatten(0, 1), gate_THV.flatten(0, 1))
        return module.out_proj(normed_RV.view(1, len(mixed_THV), -1))

    def _mix_rows(self, qkv_TN: Tensor, b_TH: Tensor, a_TH: Tensor, lengths: Sequence[int]) -> Tensor:
        samples = self._samples(qkv_TN, b_TH, a_TH, lengths)
        output_by_sample: dict[int, Tensor] = {}
        for together in group_by_chunk_count(lengths):
            qkv_SLN, beta_SLH, decay_SLH = (
                pad_sequence([samples[i][n] for i in together], batch_first=True) for n in range(3)
            )
            mixed_SLHV, _ = self._mix_batch(qkv_SLN, beta_SLH, decay_SLH)
            output_by_sample |= {i: mixed_SLHV[at, : lengths[i]] for at, i in enumerate(together)}
        return torch.cat([output_by_sample[i] for i in range(len(lengths))])

    def _samples(
        self, qkv_TN: Tensor, b_TH: Tensor, a_TH: Tensor, lengths: Sequence[int]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the inputs of the convolution, the step sizes and the decays of the DeltaNet layer for each
        sample."""
        decay_TH = -self._module.A_log.float().exp() * softplus(a_TH.float() + self._module.dt_bias)
        return list(zip(*(x.split(lengths) for x in (qkv_TN, b_TH.sigmoid(), decay_TH)), strict=True))

    def _mix_continued_samples(
        self,
        qkv_TN: Tensor,
        b_TH: Tensor,
        a_TH: Tensor,
        lengths: Sequence[int],
        states: Sequence[dict[int, tuple[Tensor, Tensor]]],
    ) -> Tensor:
        """Return the outputs of samples whose earlier rows were computed in previous passes. Each sample
        continues from its cached state (the last inputs of the convolution and the matrix of the recurrence),
        which is then replaced by its new state."""
        module, found = self._module, []
        samples = self._samples(qkv_TN, b_TH, a_TH, lengths)
        for (qkv_LN, beta_LH, decay_LH), state in zip(samples, states, strict=True):
            before_KN, matrix = state.get(module.layer_idx, (None, None))
            if before_KN is None:
                before_KN = qkv_LN.new_zeros(module.conv_kernel_size - 1, qkv_LN.shape[1])
            inputs_LN = torch.cat([before_KN, qkv_LN])
            mixed_1LHV, matrix = self._mix_batch(
                inputs_LN[None], beta_LH[None], decay_LH[None], len(before_KN), matrix
            )
            state[module.layer_idx] = inputs_LN[len(qkv_LN) :], matrix
            found.append(mixed_1LHV[0])
        return torch.cat(found)

    def _mix_batch(
        self,
        qkv_SLN: Tensor,
        beta_SLH: Tensor,
        decay_SLH: Tensor,
        earlier_inputs: int = 0,
        matrix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the recurrence and its last state. The first `earlier_inputs` rows belong to
        an earlier pass and enter the convolution only, not the recurrence; `matrix` is the state of the
        recurrence after that pass."""
        module = self._module
        weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
        qkv_SLN = self._convolve(qkv_SLN.mT, weight, bias, activation=module.activation).mT[
            :, earlier_inputs:
        ]
        q, k, v = qkv_SLN.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (-1, module.head_k_dim)) for x in (q, k))
        repeats = module.num_v_heads // module.num_k_heads
        with deterministic_sums():
            mixed_SLHV, last = self._recur(
                q.repeat_interleave(repeats, dim=2),
                k.repeat_interleave(repeats, dim=2),
                v.unflatten(-1, (-1, module.head_v_dim)),
                g=decay_SLH,
                beta=beta_SLH,
                use_qk_l2norm_in_kernel=True,
                initial_state=matrix,
                output_final_state=True,
            )
        assert isinstance(mixed_SLHV, Tensor)
        return mixed_SLHV, last


class SumsByProducts(TorchFunctionMode):
    """A torch function mode that computes cumulative sums of floats as products with a triangular matrix of
    ones. Torch has no deterministic cumulative sum on a GPU, and the backward of a cumulative sum needs one
    too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.cumsum, torch.Tensor.cumsum) or not args[0].is_floating_point():
            return func(*args, **kwargs)
        dim = kwargs["dim"] if "dim" in kwargs else args[1]
        # In float64: the summands are exponents, and a product rounds less carefully than a running sum.
        x = args[0].movedim(dim, -1).double()
        sums = x @ x.new_ones(x.shape[-1], x.shape[-1]).triu()
        return sums.movedim(-1, dim).to(args[0].dtype)


def deterministic_sums() -> AbstractContextManager[object]:
    return SumsByProducts() if are_kernels_deterministic() else nullcontext()


def group_by_chunk_count(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of samples, grouped by their number of chunks of the DeltaNet recurrence: samples of
    one group can be a batch without more padding than each needs alone."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(-(-length // CHUNK), []).append(index)
    return list(groups.values())
