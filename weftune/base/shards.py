"""One shard of a base, or of one stage of it: a slice of every linear in every layer, as in Megatron's tensor
parallelism.

The linears that read the hidden states (q, k, v, gate, up) are cut by their outputs, and those that write to
them (o, down) by their inputs. A shard computes the attention of its own heads and its part of the
feed-forward. The outputs of o and of down are summed over the shards in the forward, and the gradients at the
inputs of attention and feed-forward in the backward. Adapters are part of the linears, so that these sums
include them. Embedding and head are cut by the tokens of the vocabulary: an embedding is a sum over the
shards, of which one has the token's row, and `ops/logprobs.py` combines the logits of all shards. Norms are
whole on every shard.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PretrainedConfig, PreTrainedModel

from weftune.base.architecture import (
    quantised_shards_reason,
    refuse_family_on_shards,
    refuse_uneven_shards,
)
from weftune.base.check import refuse_modules
from weftune.base.decoders import DECODERS, DecoderFacts
from weftune.base.load import load_config, load_plain, model_source
from weftune.base.model import Base, isolate_samples, own_config
from weftune.base.quant.linear import matrix_dtype
from weftune.base.shape import embedding_module, model_shape, model_sites, values
from weftune.base.spec import BaseSpec
from weftune.base.stages import ENDS, Elsewhere, decoder_of, keep_stages
from weftune.base.weights import file_reader, weight_files
from weftune.core.shapes import EMBED_SCALE, LayerRange, SiteShape, SiteSlice
from weftune.core.shards import ShardTeam, SumOverShards, VocabularyShard
from weftune.errors import BaseModelError


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a family's attention and feed-forward."""

    heads: int
    key_heads: int
    head_width: int
    inner: int
    """Width of the feed-forward."""


def load_shard(spec: BaseSpec, device: torch.device, team: ShardTeam, layer_range: LayerRange) -> Base:
    """Load one shard of a stage. The whole base passes through host memory."""
    refuse_sharding(spec, team.shards)
    model = load_plain(spec, torch.device("cpu"))
    files = weight_files(model_source(spec), spec.revision)
    read = None if files is None else file_reader(model, files, torch.device("cpu"))
    whole: dict[str, tuple[int, ...]] = {
        site.name: (site.out_features, site.in_features) for site in model_sites(model)
    }
    for path, module in embedding_module(model).items():
        whole[path] = cast(nn.Embedding, module).weight.shape
    dtype = matrix_dtype(model)

    def read_whole(name: str) -> Tensor | None:
        shape = whole.get(name.removesuffix(".weight"))
        if shape is None or read is None:
            return None
        weight_NK = torch.empty(shape, dtype=dtype)
        read(name, weight_NK)
        return weight_NK.to(device)

    return shard_of(model, spec, device, team, layer_range, read_whole)


def refuse_sharding(spec: BaseSpec, shards: int) -> None:
    """Raise BaseModelError if the layers of a base cannot be divided into this many shards."""
    config = load_config(spec, model_source(spec))
    if config.quantised is not None:
        raise BaseModelError(quantised_shards_reason(spec.model))
    _refuse_config(config.text, spec.model, shards)


def _refuse_config(config: PretrainedConfig, name: str, shards: int) -> None:
    refuse_family_on_shards(config.model_type, name)
    sizes = _sizes(config)
    refuse_uneven_shards(sizes.heads, sizes.key_heads, sizes.inner, name, shards)


def _sizes(config: PretrainedConfig) -> _Sizes:
    heads = config.num_attention_heads
    return _Sizes(
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        inner=config.intermediate_size,
    )


def shard_of(
    model: PreTrainedModel,
    spec: BaseSpec,
    device: torch.device,
    team: ShardTeam,
    layer_range: LayerRange,
    read_whole: Callable[[str], Tensor | None] = lambda name: None,
) -> Base:
    """Cut `model` in place to one shard of a stage, and return it as a frozen base with Weftune's attention.
    `read_whole` returns the whole weight of a site or of the embedding by its name, for kinds that start from
    it, or None for any other parameter."""
    _refuse_config(model.config, spec.model, team.shards)
    refuse_modules(model, spec.model)
    whole = model_shape(model, matrix_dtype(model))
    model.eval().requires_grad_(False)
    own_config(model)
    keep_stages(model, layer_range)
    isolate_samples(model)
    slices = dict(_cut_layers(model, team))
    for layer in _layers(model):
        _sum_over_shards(layer, DECODERS[model.config.model_type], team.sum_over_shards)
    vocabulary = VocabularyShard(team, whole.vocabulary)
    _cut_ends(model, vocabulary)
    nn.Module.to(model, device)
    sites = tuple(local_site(site, slices[site.name]) for site in whole.sites if site.name in slices)
    layers = layer_range.stop - layer_range.start
    shape = replace(whole, layers=layers, parameters=values(model), sites=sites)
    dtype = matrix_dtype(model)
    return Base(model, spec, shape, device, dtype, layer_range, whole.sites, read_whole, slices, vocabulary)


def local_site(site: SiteShape, part: SiteSlice) -> SiteShape:
    """Return the shape of a linear of which only a part is local."""
    if part.cuts_inputs:
        return replace(site, in_features=part.size, part=part)
    return replace(site, out_features=part.size, part=part)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the local layers."""
    layers = cast(nn.ModuleList, getattr(decoder_of(model), ENDS[model.config.model_type].layers))
    return [layer for layer in layers if not isinstance(layer, Elsewhere)]


def _cut_layers(model: PreTrainedModel, team: ShardTeam) -> Iterator[tuple[str, SiteSlice]]:
    """Cut every layer's linears, and yield the path of each with its local part."""
    facts, sizes = DECODERS[model.config.model_type], _sizes(model.config)
    parts = _slices(facts, sizes, team)
    paths = {id(module): path for path, module in model.named_modules()}
    for layer in _layers(model):
        for name, part in parts.items():
            linear = cast(nn.Linear, layer.get_submodule(name))
            _cut_linear(linear, part, keeps_bias=not part.cuts_inputs or team.shard == 0)
            yield paths[id(linear)], part
        _set_head_counts(layer.get_submodule(facts.o.rpartition(".")[0]), sizes, team)


def _slices(facts: DecoderFacts, sizes: _Sizes, team: ShardTeam) -> dict[str, SiteSlice]:
    """Return the local part of each linear of a layer, by its path inside the layer."""
    width = sizes.head_width
    queries = _scaled(team.part(sizes.heads), width)
    keys = _scaled(_key_heads(sizes, team), width)
    inner = team.part(sizes.inner)
    if len(facts.qkv) == 1:
        first_key, first_value = sizes.heads * width, (sizes.heads + sizes.key_heads) * width
        together = (queries, _shifted(keys, first_key), _shifted(keys, first_value))
        qkv = [SiteSlice(together, cuts_inputs=False)]
    else:
        qkv = [SiteSlice((one,), cuts_inputs=False) for one in (queries, keys, keys)]
    if len(facts.gate_up) == 1:
        gate_up = [SiteSlice((inner, _shifted(inner, sizes.inner)), cuts_inputs=False)]
    else:
        gate_up = [SiteSlice((inner,), cuts_inputs=False)] * 2
    return {
        **dict(zip(facts.qkv, qkv, strict=True)),
        facts.o: SiteSlice((queries,), cuts_inputs=True),
        **dict(zip(facts.gate_up, gate_up, strict=True)),
        facts.down: SiteSlice((inner,), cuts_inputs=True),
    }


def _key_heads(sizes: _Sizes, team: ShardTeam) -> tuple[int, int]:
    """Return the key/value heads of a shard. Where there are fewer than shards, several shards repeat one."""
    if sizes.key_heads % team.shards == 0:
        return team.part(sizes.key_heads)
    own = team.shard * sizes.key_heads // team.shards
    return own, own + 1


def _scaled(part: tuple[int, int], width: int) -> tuple[int, int]:
    return part[0] * width, part[1] * width


def _shifted(part: tuple[int, int], first: int) -> tuple[int, int]:
    return part[0] + first, part[1] + first


def _cut_linear(linear: nn.Linear, part: SiteSlice, keeps_bias: bool) -> None:
    """Keep only a part of a linear's weight. The bias of outputs that are summed is on one shard only."""
    kept = torch.cat([torch.arange(start, stop) for start, stop in part.ranges])
    weight_NK = linear.weight.index_select(1 if part.cuts_inputs else 0, kept)
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    linear.out_features, linear.in_features = weight_NK.shape
    if linear.bias is None:
        return
    if not keeps_bias:
        linear.register_parameter("bias", None)
    elif not part.cuts_inputs:
        linear.bias = nn.Parameter(linear.bias[kept], requires_grad=False)


def _set_head_counts(attention: nn.Module, sizes: _Sizes, team: ShardTeam) -> None:
    """Give an attention module the head counts of its shard, for families that read them."""
    first, last = _key_heads(sizes, team)
    counts = {"num_attention_heads": sizes.heads // team.shards, "num_key_value_heads": last - first}
    config = copy.copy(attention.config)
    for name, count in counts.items():
        setattr(config, name, count)
        if hasattr(attention, name):
            setattr(attention, name, count)
    attention.config = config
    groups = counts["num_attention_heads"] // counts["num_key_value_heads"]
    setattr(attention, "num_key_value_groups", groups)  # noqa: B010 (nn.Module declares tensors or modules)


# -- embedding and head ----------------------------------------------------------------------------------


class ShardedEmbedding(nn.Module):
    """The embeddings of one shard's tokens. Every shard gets the embeddings of all tokens, as a sum to which
    one shard adds the embedding and the others add zeros."""

    def __init__(self, whole: nn.Embedding, shard: VocabularyShard) -> None:
        super().__init__()
        self.weight = _rows(whole.weight, shard)
        self.padding_idx = whole.padding_idx
        self._shard = shard
        if (scale := getattr(whole, EMBED_SCALE, None)) is not None:
            self.register_buffer(EMBED_SCALE, torch.as_tensor(scale), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        row, is_local = self._shard.local_rows(tokens)
        h = torch.where(is_local[..., None], embedding(row, self.weight), 0.0)
        self._shard.team.sum_over_shards(h)
        scale = getattr(self, EMBED_SCALE, None)
        return h if scale is None else h * scale.to(h.dtype)


def _cut_ends(model: PreTrainedModel, shard: VocabularyShard) -> None:
    """Keep only the shard's rows of the embedding and of the head, those of both that this stage has. A head
    that is tied to the embedding stays tied."""
    decoder, ends = decoder_of(model), ENDS[model.config.model_type]
    whole, head = getattr(decoder, ends.embedding), model.get_output_embeddings()
    is_tied = getattr(whole, "weight", None) is getattr(head, "weight", head)
    if isinstance(whole, nn.Embedding):
        setattr(decoder, ends.embedding, ShardedEmbedding(whole, shard))
    if isinstance(head, nn.Linear):
        head.weight = getattr(decoder, ends.embedding).weight if is_tied else _rows(head.weight, shard)
        head.out_features = len(head.weight)
        if head.bias is not None:
            head.bias = _rows(head.bias, shard)


def _rows(whole: Tensor, shard: VocabularyShard) -> nn.Parameter:
    """Return the shard's rows of a parameter, without the memory of the others."""
    return nn.Parameter(whole.detach()[shard.start : shard.stop].clone(), requires_grad=False)


# -- sums over shards ------------------------------------------------------------------------------------


def _sum_over_shards(layer: nn.Module, facts: DecoderFacts, sum_over_shards: SumOverShards) -> None:
    """Add the sums over shards to the attention and the feed-forward of a layer."""
    for last in (facts.o, facts.down):
        branch = layer.get_submodule(last.rpartition(".")[0])
        branch.register_forward_pre_hook(partial(_share_input, sum_over_shards), with_kwargs=True)
        layer.get_submodule(last).register_forward_hook(partial(_sum_output, sum_over_shards))


def _share_input(
    sum_over_shards: SumOverShards, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if given:
        return (_SharedInput.apply(given[0], sum_over_shards), *given[1:]), named
    return given, {**named, "hidden_states": _SharedInput.apply(named["hidden_states"], sum_over_shards)}


def _sum_output(
    sum_over_shards: SumOverShards, module: nn.Module, given: tuple[Any, ...], output_TD: Tensor
) -> Tensor:
    return cast(Tensor, _SummedOutput.apply(output_TD, sum_over_shards))


class _SharedInput(torch.autograd.Function):
    """Returns its input, which is the same on every shard. The gradient is the sum over the shards."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, sum_over_shards: SumOverShards) -> Tensor:
        ctx.sum_over_shards = sum_over_shards
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None]:
        total_TD = dx_TD.clone(memory_format=torch.contiguous_format)
        ctx.sum_over_shards(total_TD)
        return total_TD, None


class _SummedOutput(torch.autograd.Function):
    """Returns the sum over the shards. Every shard's gradient is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, sum_over_shards: SumOverShards) -> Tensor:
        total_TD = y_TD.clone(memory_format=torch.contiguous_format)
        sum_over_shards(total_TD)
        return total_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None]:
        return dy_TD, None
