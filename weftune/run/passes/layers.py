"""Decoder layers of known model families as a few fused ops, which replace transformers' own forward. The
differences between families are described in base/decoders.

Linears that share their input run as one product, and each residual is added by the last linear of its
branch, or by the norm after it. In a mixture of experts everything except router and experts is fused.

Shapes: T rows, D hidden width, I inner width, N outputs of a group of linears, H query heads, G key and value
heads, E rotary width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from weftune.adapters.banks import Banks
from weftune.base.attention import Pack, Rule, attend_with_prefixes, is_kernel_supported
from weftune.base.decoders import DECODERS, MIXTURES, DecoderFacts
from weftune.base.model import Base
from weftune.base.shards import share_input, sum_output
from weftune.base.stages import Elsewhere, find_decoder
from weftune.core.batch import Microbatch
from weftune.core.shards import ShardTeam
from weftune.ops.norm import rms_norm, rms_norm_onto, skip_rms_norm
from weftune.ops.rotary import HeadNorms, rotary_split
from weftune.ops.swiglu import geglu, swiglu
from weftune.plan.program.program import Recompute
from weftune.run.passes.host_copies import HostStore
from weftune.run.passes.row_tiles import Keep, TiledParts, row_tiles, tiled_layer

Linear = Callable[[Tensor, Tensor | None], Tensor]
"""A function of an input x and a residual (or None) that returns the outputs of linears with this input, plus
the residual."""
Angle = tuple[Tensor, Tensor]
"""Cosines and sines of a rotary embedding, [T, E] each."""
ACTIVATIONS = {"silu": swiglu, "gelu_pytorch_tanh": geglu}


class Layers:
    """The decoder layers of a base, whose forwards can be replaced by fused ops. There are none if the base
    is not of a known model family."""

    def __init__(self, base: Base, team: ShardTeam | None = None) -> None:
        """Find the decoder layers of a base. `team` describes the workers among which every layer is divided
        into shards; None if layers are not divided."""
        self.sum_over_shards = None if team is None else team.sum_over_shards
        self.recompute = Recompute()
        """Layers and outputs that the backward recomputes instead of keeping them from the forward."""
        self.host = HostStore(base.device)
        """Store in host memory for the tensors that layers keep from their forward to their backward, if they
        are offloaded."""
        self._base = base
        self._decoder = cast(Any, find_decoder(base.model))
        self._config: Any = base.model.config
        self._device = base.device
        self._structure = find_layer_structure(self._config)
        # On a worker with a stage, the layers of other stages are elsewhere, with several stages also those
        # between.
        layers = enumerate(self._decoder.layers if self._structure is not None else ())
        here = {at: layer for at, layer in layers if not isinstance(layer, Elsewhere)}
        self.modules: list[Any] = list(here.values())
        path = next(name for name, module in base.model.named_modules() if module is self._decoder)
        self.paths = [f"{path}.layers.{at}" for at in here]
        self._has_final_norm = base.is_last
        """Whether this worker also holds the final norm of the model."""
        self.fused_layers: list[FusedLayer] = []
        self.final_norm: FusedNorm | None = None
        self._angles: list[Angle] | None = None
        """List to which each layer appends the cosines and sines of its rotary embedding instead of computing
        anything. None except within `compute_inputs`."""
        heads = [module.self_attn.head_dim for module in self.modules]
        self.has_experts = self._config.model_type in MIXTURES
        """Whether the layers have experts (MoE) instead of an MLP."""
        served = bool(heads) and is_kernel_supported(base.device, base.dtype, heads[0])
        self.can_capture = served and not self.has_experts and (team is None or team.is_capturable)
        """Whether passes can be captured as CUDA graphs. This requires that the host never waits for the
        device during a pass."""

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Groups of adapted linears that share their input, each given by the linears' paths."""
        found = (
            ()
            if self._structure is None
            else (self._structure.qkv, () if self.has_experts else self._structure.gate_up)
        )
        shared = [ends for ends in found if len(ends) > 1]
        return [tuple(f"{path}.{end}" for end in ends) for path in self.paths for ends in shared]

    def fuse(self, banks: Banks) -> None:
        if self._structure is None:
            return
        for index, module in enumerate(self.modules):
            module.forward = FusedLayer(self, index, banks, self._config, self._structure)
            self.fused_layers.append(module.forward)
        if self.modules and self._has_final_norm:
            norm = self._decoder.norm
            self.final_norm = FusedNorm(norm, self._structure)
            norm.forward = partial(self._final_norm, self.final_norm)
        rotary = self._decoder.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope"):
            # Transformers would read the longest sample's length from the device in every pass.
            rotary.forward = Angles(rotary, self._device)

    def _final_norm(self, norm: FusedNorm, h_1TD: Tensor) -> Tensor:
        """Apply the model's final norm to the output of the last layer. This method replaces the forward of
        the norm's module."""
        if self._angles is not None:
            return h_1TD
        h_TD, tile_rows = h_1TD[0], self.recompute.tile_rows
        parts = h_TD.split(tile_rows) if 0 < tile_rows < len(h_TD) else (h_TD,)
        return torch.cat([norm(part) for part in parts])[None] if len(parts) > 1 else norm(h_TD)[None]

    def compute_inputs(self, microbatch: Microbatch, pack: Pack) -> tuple[Tensor, list[Angle]]:
        """Return the input of the first layer, and for each layer the cosines and sines of its rotary
        embedding. Both are computed by the model's own forward, in which the layers themselves are
        skipped."""
        angles: list[Angle] = []
        self._angles = angles
        try:
            return self._base.hidden(microbatch, pack), angles
        finally:
            self._angles = None

    def skips_layer(self, angle: Angle) -> bool:
        """Return whether a layer must return its input unchanged, because `compute_inputs` only computes the
        inputs of the layers. If so, append `angle` to the list that `compute_inputs` returns."""
        if self._angles is not None:
            self._angles.append(angle)
        return self._angles is not None

    def unfuse(self) -> None:
        """Restore the original forward of every layer, of the final norm and of the rotary embedding."""
        self.fused_layers = []
        for module in self.modules:
            module.__dict__.pop("forward", None)
        if self.modules and self._has_final_norm:
            self._decoder.norm.__dict__.pop("forward", None)
        if self.modules:
            self._decoder.rotary_emb.__dict__.pop("forward", None)


class FusedLayer:
    """The fused forward of one decoder layer. It has the same signature as the layer's forward in
    transformers, which it replaces."""

    def __init__(
        self, layers: Layers, index: int, banks: Banks, config: Any, structure: DecoderFacts
    ) -> None:
        self._layers, self._index, self._banks = layers, index, banks
        module, path = layers.modules[index], layers.paths[index]
        attention = module.self_attn
        self._layer = int(path.rpartition(".")[2])
        own = attention.config
        self._heads, self._groups = own.num_attention_heads, own.num_key_value_heads
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        self._rule = Rule(attention.scaling, window, None)
        names = (*structure.norms, *(structure.head_norms or ()))
        norms = {name: FusedNorm(module.get_submodule(name), structure) for name in names}
        self._before_attention, self._before_mlp = (
            norms[structure.norm_before_attention],
            norms[structure.norm_before_mlp],
        )
        self._after_attention = (
            norms[structure.norm_after_attention] if structure.norm_after_attention else None
        )
        self._after_mlp = norms[structure.norm_after_mlp] if structure.norm_after_mlp else None
        self._head_norms = [norms[name] for name in structure.head_norms or ()]
        self._activation = ACTIVATIONS[getattr(config, structure.activation_key)]
        self._qkv = banks.linear(f"{path}.{structure.qkv[0]}")
        self._sum_over_shards = layers.sum_over_shards
        adds = self._sum_over_shards is None
        self._o = banks.linear(
            f"{path}.{structure.output_projection}",
            adds_residual=adds and structure.norm_after_attention is None,
        )
        self._experts: Callable[[Tensor], Tensor] | None = module.mlp if layers.has_experts else None
        if not layers.has_experts:
            self._gate_up = banks.linear(f"{path}.{structure.gate_up[0]}")
            self._down = banks.linear(
                f"{path}.{structure.down}", adds_residual=adds and structure.norm_after_mlp is None
            )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        weftune_pack: Pack | None = None,
    ) -> Tensor:
        assert attention_mask is None, "packed rows have no mask"
        assert past_key_values is None, "packed rows have no past"
        assert position_embeddings is not None
        assert weftune_pack is not None
        cos_TE, sin_TE = (x[0] for x in position_embeddings)
        if self._layers.skips_layer((cos_TE, sin_TE)):
            return hidden_states
        arguments = hidden_states[0], cos_TE, sin_TE, weftune_pack
        # A chunk of a sample is as short as a tile.
        is_chunk = weftune_pack.cache is not None and torch.is_grad_enabled()
        if self._layers.recompute.tile_rows and not is_chunk:
            h_TD = self._run_in_tiles(*arguments)
        elif torch.is_grad_enabled() and self._is_recomputed:
            h_TD = checkpoint(self._run, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            h_TD = self._run(*arguments)
        return h_TD[None]

    @property
    def _is_recomputed(self) -> bool:
        """Whether the backward recomputes the whole layer from its input."""
        return self._index < self._layers.recompute.recomputed_layers

    @property
    def _recomputes_outputs(self) -> bool:
        """Whether the backward recomputes the outputs of norms and activation functions. False for a layer
        that is recomputed as a whole: the functions that recompute the outputs would keep the layer's inputs
        alive."""
        return self._layers.recompute.recomputes_outputs and not self._is_recomputed

    def _run(self, h_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor, pack: Pack) -> Tensor:
        h_TD, qkv = self.project_qkv(h_TD, cos_TE, sin_TE, self._recomputes_outputs)
        return self.finish_layer(
            h_TD, attend_with_prefixes(*qkv, pack, self._rule, self._layer), self._recomputes_outputs
        )

    def _run_in_tiles(self, h_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor, pack: Pack) -> Tensor:
        layers, recompute = self._layers, self._layers.recompute
        keep = Keep(
            self._index,
            keeps_all=not self._is_recomputed,
            keeps_attention=recompute.keeps_attention,
            host=layers.host if self._index < recompute.offloaded_layers else None,
        )
        parts = TiledParts(
            project_qkv=lambda h, rows: self.project_qkv(h, cos_TE[rows], sin_TE[rows], recomputes=True),
            attend=lambda qkv: attend_with_prefixes(*qkv, pack, self._rule, self._layer),
            finish_layer=lambda h, seen, graph_only: self.finish_layer(h, seen, keep.keeps_all, graph_only),
            tile_adapters=self._banks.bind_tile,
        )
        tiles = row_tiles(len(h_TD), recompute.tile_rows)
        return tiled_layer(h_TD, self._banks.anchor, parts, tiles, keep)

    def project_qkv(
        self, h_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor, recomputes: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Compute the norm, the q, k and v projections and the rotary embedding. Return the residual, which
        is h itself, and queries, keys and values. `recomputes` says whether the backward recomputes the
        norm's output."""
        h_TD, qkv_TN = self._norm_and_project(h_TD, self._before_attention, self._qkv, recomputes)
        norms = head_norms(*self._head_norms) if self._head_norms else None
        return h_TD, rotary_split(qkv_TN, cos_TE, sin_TE, self._heads, self._groups, norms)

    def finish_layer(
        self, h_TD: Tensor, attention_THD: Tensor, recomputes: bool, graph_only: bool = False
    ) -> Tensor:
        """Compute the rest of the layer after attention, and return the layer's output. `h_TD` is the
        residual and `attention_THD` the output of attention. `recomputes` says whether the backward
        recomputes the outputs of norms and activation functions. If `graph_only`, only the autograd graph is
        needed, and the values may be arbitrary."""
        h_TD = self._add_branch(h_TD, self._o, attention_THD.flatten(1), self._after_attention)
        if self._experts is not None:
            h_TD, n_TD = self._before_mlp.norm_with_residual(h_TD)
            return h_TD + self._experts(n_TD[None])[0]
        h_TD, gate_up_TN = self._norm_and_project(h_TD, self._before_mlp, self._gate_up, recomputes)
        act_TI = self._activation(gate_up_TN)
        # A norm after the last linear saves the linear's output for its backward.
        discards_output = graph_only and self._after_mlp is None
        with (
            recompute_saved(act_TI, partial(self._activation, gate_up_TN.detach()), recomputes),
            self._banks.graph_only() if discards_output else nullcontext(),
        ):
            return self._add_branch(h_TD, self._down, act_TI, self._after_mlp, discards_output)

    # -- half layers --------------------------------------------------------------------------------------

    def normalise_half(self, is_feed_forward: bool, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual around half a layer (the attention or the feed-forward), and the normalised
        input of that half."""
        norm = self._before_mlp if is_feed_forward else self._before_attention
        return norm.norm_with_residual(h_TD)

    def run_half(self, is_feed_forward: bool, n_TD: Tensor, angle: Angle, pack: Pack) -> Tensor:
        """Compute the attention or the feed-forward of a layer, given its normalised input. Return the output
        of this shard (a worker's part of the layer), which is to be summed over the shards."""
        if is_feed_forward:
            return self._down(self._activation(self._gate_up(n_TD, None)), None)
        norms = head_norms(*self._head_norms) if self._head_norms else None
        qkv = rotary_split(self._qkv(n_TD, None), *angle, self._heads, self._groups, norms)
        return self._o(attend_with_prefixes(*qkv, pack, self._rule, self._layer).flatten(1), None)

    def add_half_output(self, is_feed_forward: bool, h_TD: Tensor, y_TD: Tensor) -> Tensor:
        """Return the residual h plus y, the output of the attention or the feed-forward after the sum over
        shards."""
        norm = self._after_mlp if is_feed_forward else self._after_attention
        return h_TD + y_TD if norm is None else norm.add_norm(h_TD, y_TD)

    def _add_branch(
        self, h_TD: Tensor, linear: Linear, x: Tensor, norm: FusedNorm | None, discards_output: bool = False
    ) -> Tensor:
        """Compute the last linear of a branch (attention or feed-forward) and, if there is one, the norm
        after it. Return the residual h plus the result. If layers are divided into shards, the linear's
        output is summed over them, unless `discards_output` says that its values may be arbitrary."""
        if self._sum_over_shards is None:
            return linear(x, h_TD) if norm is None else norm.add_norm(h_TD, linear(x, None))
        y_TD = linear(x, None)
        if not discards_output:
            y_TD = sum_output(y_TD, self._sum_over_shards)
        return h_TD + y_TD if norm is None else norm.add_norm(h_TD, y_TD)

    def _norm_and_project(
        self, h_TD: Tensor, norm: FusedNorm, linear: Linear, recomputes: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the norm and the linears at the start of a branch (attention or feed-forward). Return the
        residual around the branch, and the output of the linears. `recomputes` says whether the backward
        recomputes the norm's output."""
        h_TD, n_TD = norm.norm_with_residual(h_TD)
        with recompute_saved(n_TD, partial(norm, h_TD.detach()), recomputes):
            if self._sum_over_shards is not None:
                n_TD = share_input(n_TD, self._sum_over_shards)
            return h_TD, linear(n_TD, None)


@contextmanager
def recompute_saved(output: Tensor, recompute: Callable[[], Tensor], recomputes: bool) -> Iterator[None]:
    """Return a context in which autograd saves the function `recompute` instead of the tensor `output`, and
    calls it in the backward to compute that tensor again. If `recomputes` is False, the context has no
    effect."""
    if not recomputes:
        yield
        return

    # Autograd keeps the functions as long as the packed values: they must not refer to the tensor itself.
    known = output.data_ptr(), output.shape
    del output

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        return recompute if (tensor.data_ptr(), tensor.shape) == known else tensor

    def unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved()

    with saved_tensors_hooks(pack, unpack):
        yield


class FusedNorm:
    """A norm module of the base, with its weight and settings in the form that the fused ops expect."""

    def __init__(self, module: Any, structure: DecoderFacts) -> None:
        self._module = module
        self.eps: float = getattr(module, structure.norm_eps)
        self.offset = structure.norm_offset

    @property
    def weight_D(self) -> Tensor:
        return cast(Tensor, self._module.weight)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight_D, self.eps, self.offset)

    def norm_with_residual(self, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return h unchanged, for the residual, and the normalised h."""
        return skip_rms_norm(h_TD, self.weight_D, self.eps, self.offset)

    def add_norm(self, h_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return h plus the normalised x."""
        return rms_norm_onto(h_TD, x_TD, self.weight_D, self.eps, self.offset)


def head_norms(q: FusedNorm, k: FusedNorm) -> HeadNorms:
    assert q.eps == k.eps
    return HeadNorms(q.weight_D, k.weight_D, q.eps, q.offset)


class Angles:
    """The replacement for the forward of a rotary embedding, which does not read the samples' lengths from
    the device. This is possible because the frequencies change only for samples longer than the base's
    context, which do not occur."""

    def __init__(self, rotary: Any, device: torch.device) -> None:
        self._frequency_E = rotary.original_inv_freq.to(device, torch.float32)
        self._scaling: float = rotary.attention_scaling

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half_1TE = position_ids[..., None].float() * self._frequency_E
        angle_1TE = torch.cat((half_1TE, half_1TE), dim=-1)
        return (angle_1TE.cos() * self._scaling).to(x.dtype), (angle_1TE.sin() * self._scaling).to(x.dtype)


def find_layer_structure(config: Any) -> DecoderFacts | None:
    """Return the structure of the decoder layers of a model's family, or None if fused ops do not support the
    family or its activation function."""
    mixture = MIXTURES.get(config.model_type)
    structure = DECODERS.get(config.model_type) if mixture is None else mixture.attention
    if structure is None or getattr(config, structure.activation_key) not in structure.activations:
        return None
    return structure
