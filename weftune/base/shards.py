"""One shard of a base, as in Megatron's tensor parallelism: a slice of every linear in every layer.

A shard may also be cut from one pipeline stage. Linears that read the hidden states (q, k, v, gate, up) are
cut by their outputs, and linears that write to them (o, down) by their inputs. A shard computes the attention
of its own heads and its part of the feed-forward. The outputs of o and of down are summed over the shards in
the forward, and the gradients at the inputs of attention and feed-forward in the backward. Adapters belong to
the linears, so these sums include them. Embedding and head are cut by the tokens of the vocabulary: only one
shard has a token's row of the embedding, the others contribute zeros to a sum over the shards, and
`ops/logprobs.py` combines the logits of all shards. Norms are whole on every shard.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PretrainedConfig, PreTrainedModel

from weftune.base.architecture import (
    refuse_family_on_shards,
    refuse_repeated_heads,
    refuse_uneven_shards,
)
from weftune.base.check import refuse_modules
from weftune.base.decoders import DECODERS, DecoderFacts
from weftune.base.load import load_config, load_plain, model_source, wrap_load_errors
from weftune.base.model import Base, copy_config, isolate_samples
from weftune.base.quant.linear import QuantLinear, cut_quantised, matrix_dtype, quant_paths
from weftune.base.shape import embedding_module, model_shape, model_sites, parameter_count
from weftune.base.spec import BaseSpec
from weftune.base.stages import ENDS, Elsewhere, find_decoder, keep_stages, outline_model
from weftune.base.weights import (
    Fill,
    ParameterSlice,
    WeightFiles,
    file_reader,
    read_each_parameter,
    stored_names,
)
from weftune.core.shapes import EMBED_SCALE, LayerRange, ModelShape, SiteShape, SiteSlice
from weftune.core.shards import ShardTeam, SumOverShards, VocabularyShard, indices_in_whole


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a model's attention and feed-forward, from which the parts of a shard follow."""

    heads: int
    key_heads: int
    head_width: int
    inner_width: int
    """Width of the feed-forward."""


ReadWhole = Callable[[str], Tensor | None]
"""Function from the name of a parameter to its whole weight, from which some kinds of adapters are
initialised. The function returns None for parameters other than the embedding and the weights of sites
(adaptable linears)."""


def _read_no_weight(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One shard (tensor-parallel slice) of some layers of a model: the workers that divide the layers, and
    the part of each linear that this shard keeps."""

    team: ShardTeam
    whole: ModelShape
    """Sizes of the whole base model, before it is cut."""
    slices: Mapping[str, SiteSlice]
    """Maps each site (an adaptable linear) of these layers to the part that this shard keeps."""
    read_whole: ReadWhole = _read_no_weight

    @property
    def vocabulary(self) -> VocabularyShard:
        return VocabularyShard(self.team, self.whole.vocabulary)


class StoredWeights:
    """The weights in the files of a base, read as whole tensors or as the parts that one shard keeps."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles, device: torch.device) -> None:
        """Open the weight files of `model`, the whole model without weights. Weights are read to `device`,
        and quantised there."""
        read = file_reader(model, files, device)
        assert read is not None, "the files hold the model's parameters under its names"
        self._read, self._files, self._device, self._dtype = read, files, device, matrix_dtype(model)
        self._quantised = {path: cast(QuantLinear, model.get_submodule(path)) for path in quant_paths(model)}
        self._shapes = {site.name: (site.out_features, site.in_features) for site in model_sites(model)}
        for path, module in embedding_module(model).items():
            outputs, inputs = cast(nn.Embedding, module).weight.shape
            self._shapes[path] = outputs, inputs

    def read_whole(self, name: str) -> Tensor | None:
        """Return the whole weight of a site (an adaptable linear) or of the embedding, or None for any other
        parameter."""
        path = name.removesuffix(".weight")
        if path in self._quantised:
            return self._quantised[path].build_matrix(self._read_quantised(path))
        if path not in self._shapes:
            return None
        weight_NK = torch.empty(self._shapes[path], dtype=self._dtype, device=self._device)
        self._read(name, weight_NK)
        return weight_NK

    def _read_quantised(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of the whole weight of a quantised linear."""
        parts = {
            name: torch.empty_like(part, device=self._device)
            for name, part in self._quantised[path].parts.items()
        }
        for name, part in parts.items():
            self._read(f"{path}.{name}", part)
        return parts

    def part_reader(self, model: PreTrainedModel, shard: ModelShard) -> Fill:
        """Return a function (name, tensor) that writes the shard's part of a parameter into the tensor.
        `model` has already been cut to the shard. The tensors of a quantised weight should be requested one
        after another, since only those of the latest weight are cached."""
        slices = dict(_parameter_slices(model, shard))
        read_plain = file_reader(model, self._files, self._device, slices)
        assert read_plain is not None, "the files hold the parameters of the whole model"
        cached_parameters: dict[str, nn.Parameter] = {}

        def read(name: str, out: Tensor) -> None:
            path, _, part = name.rpartition(".")
            if path not in self._quantised or part == "bias":
                read_plain(name, out)
                return
            if name not in cached_parameters:
                cached_parameters.clear()
                whole = self._read_quantised(path)
                linear = cut_quantised(self._quantised[path], whole, shard.slices[path])
                cached_parameters.update({f"{path}.{own}": value for own, value in linear.named_parameters()})
            out.copy_(cached_parameters[name])

        return read


def load_shard(spec: BaseSpec, device: torch.device, team: ShardTeam, layer_range: LayerRange) -> Base:
    """Load one shard of the given layers. Of weights that are not quantised, only the shard's parts are read
    from the files; quantised weights are read whole and cut, one at a time."""
    refuse_sharding(spec, team.shards)
    model, files = outline_model(spec, device)
    if files is None or stored_names(model, files) is None:
        # The names in the files differ from the model's; transformers can map them.
        return cut_shard(load_plain(spec, torch.device("cpu")), spec, device, team, layer_range)
    with wrap_load_errors(spec):
        stored = StoredWeights(model, files, device)
        shard = cut_model(model, spec, team, [layer_range], stored.read_whole)
        read_each_parameter(model, stored.part_reader(model, shard), device)
        return shard_base(model, spec, device, shard, layer_range)


def refuse_sharding(spec: BaseSpec, shards: int) -> None:
    """Raise BaseModelError if the layers of a base cannot be divided into `shards` shards."""
    config = load_config(spec, model_source(spec))
    _refuse_config(config.text_config, spec.model, shards)
    refuse_repeated_heads(config.quantisation, _read_sizes(config.text_config).key_heads, spec.model, shards)


def _refuse_config(config: PretrainedConfig, name: str, shards: int) -> None:
    refuse_family_on_shards(config.model_type, name)
    sizes = _read_sizes(config)
    refuse_uneven_shards(sizes.heads, sizes.key_heads, sizes.inner_width, name, shards)


def _read_sizes(config: PretrainedConfig) -> _Sizes:
    heads = config.num_attention_heads
    return _Sizes(
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        inner_width=config.intermediate_size,
    )


def cut_shard(
    model: PreTrainedModel,
    spec: BaseSpec,
    device: torch.device,
    team: ShardTeam,
    layer_range: LayerRange,
    read_whole: ReadWhole = _read_no_weight,
) -> Base:
    """Cut `model` in place to one shard of the given layers, and return it as a frozen base with Weftune's
    attention."""
    shard = cut_model(model, spec, team, [layer_range], read_whole)
    nn.Module.to(model, device)
    return shard_base(model, spec, device, shard, layer_range)


def cut_model(
    model: PreTrainedModel,
    spec: BaseSpec,
    team: ShardTeam,
    kept_layers: Sequence[LayerRange],
    read_whole: ReadWhole = _read_no_weight,
) -> ModelShard:
    """Cut `model` in place to one shard of the layers in `kept_layers`, and return which parts were kept. The
    model may be without weights."""
    _refuse_config(model.config, spec.model, team.shards)
    refuse_modules(model, spec.model)
    whole = model_shape(model, matrix_dtype(model))
    model.eval().requires_grad_(False)
    copy_config(model)
    keep_stages(model, *kept_layers)
    isolate_samples(model)
    shard = ModelShard(team, whole, dict(_cut_layers(model, team)), read_whole)
    _cut_embedding_and_head(model, shard.vocabulary)
    return shard


def shard_base(
    model: PreTrainedModel, spec: BaseSpec, device: torch.device, shard: ModelShard, kept_layers: LayerRange
) -> Base:
    """Return a base for a model that has been cut to `shard`, after making its layers sum their outputs over
    the shards. `kept_layers` is the range from the first layer of the model to the last one."""
    layers = _local_layers(model)
    for layer in layers:
        _sum_over_shards(layer, DECODERS[model.config.model_type], shard.team.sum_over_shards)
    _divide_embedding(model, shard.vocabulary)
    whole, slices = shard.whole, shard.slices
    sites = tuple(local_site(site, slices[site.name]) for site in whole.sites if site.name in slices)
    shape = replace(whole, layers=len(layers), parameters=parameter_count(model), sites=sites)
    return Base(
        model,
        spec,
        shape,
        device,
        matrix_dtype(model),
        kept_layers,
        whole.sites,
        shard.read_whole,
        slices,
        shard.vocabulary,
    )


def local_site(site: SiteShape, part: SiteSlice) -> SiteShape:
    """Return the shape of a site (an adaptable linear) of which this shard holds only `part`."""
    if part.cuts_inputs:
        return replace(site, in_features=part.size, part=part)
    return replace(site, out_features=part.size, part=part)


def _parameter_slices(model: PreTrainedModel, shard: ModelShard) -> Iterator[tuple[str, ParameterSlice]]:
    """Yield the name of each parameter of which this shard (tensor-parallel slice) has only a part, together
    with that part."""
    vocabulary = shard.vocabulary
    for site in shard.whole.sites:
        if (part := shard.slices.get(site.name)) is None:
            continue
        if part.cuts_inputs:
            yield f"{site.name}.weight", ParameterSlice(1, part.ranges, site.in_features)
        else:
            rows = ParameterSlice(0, part.ranges, site.out_features)
            yield from ((f"{site.name}.{name}", rows) for name in ("weight", "bias"))
    rows = ParameterSlice(0, ((vocabulary.start, vocabulary.stop),), vocabulary.vocabulary)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for path, module in model.named_modules():
        if module in ends:
            yield from ((f"{path}.{name}", rows) for name in ("weight", "bias"))


def _local_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of `model` that are on this worker, without placeholders of other layers."""
    layers = cast(nn.ModuleList, getattr(find_decoder(model), ENDS[model.config.model_type].layers))
    return [layer for layer in layers if not isinstance(layer, Elsewhere)]


def _cut_layers(model: PreTrainedModel, team: ShardTeam) -> Iterator[tuple[str, SiteSlice]]:
    """Cut the linears of every layer, and yield the path of each linear together with the part that this
    shard keeps."""
    structure, sizes = DECODERS[model.config.model_type], _read_sizes(model.config)
    parts = _site_slices(structure, sizes, team)
    paths = {id(module): path for path, module in model.named_modules()}
    for layer in _local_layers(model):
        for name, part in parts.items():
            linear = cast(nn.Linear, layer.get_submodule(name))
            path, bias = paths[id(linear)], linear.bias
            if isinstance(linear, QuantLinear):
                linear = cut_quantised(linear, linear.parts, part)
                layer.set_submodule(name, linear)
                if isinstance(linear, QuantLinear):
                    linear.input_maxima = team.max_over_shards if part.cuts_inputs else None
                    linear.output_maxima = None if part.cuts_inputs else team.max_over_shards
            else:
                _cut_weight(linear, part)
            keeps_bias = not part.cuts_inputs or team.shard == 0
            linear.register_parameter("bias", _cut_bias(bias, part) if keeps_bias else None)
            yield path, part
        _set_head_counts(layer.get_submodule(structure.output_projection.rpartition(".")[0]), sizes, team)


def _site_slices(structure: DecoderFacts, sizes: _Sizes, team: ShardTeam) -> dict[str, SiteSlice]:
    """Return a dict from the path of each linear inside a layer to the part that this shard keeps."""
    width = sizes.head_width
    queries = _scale_range(team.part(sizes.heads), width)
    keys = _scale_range(_key_head_range(sizes, team), width)
    inner = team.part(sizes.inner_width)
    if len(structure.qkv) == 1:
        first_key, first_value = sizes.heads * width, (sizes.heads + sizes.key_heads) * width
        together = (queries, _shift_range(keys, first_key), _shift_range(keys, first_value))
        qkv = [SiteSlice(together, cuts_inputs=False)]
    else:
        qkv = [SiteSlice((one,), cuts_inputs=False) for one in (queries, keys, keys)]
    if len(structure.gate_up) == 1:
        gate_up = [SiteSlice((inner, _shift_range(inner, sizes.inner_width)), cuts_inputs=False)]
    else:
        gate_up = [SiteSlice((inner,), cuts_inputs=False)] * 2
    return {
        **dict(zip(structure.qkv, qkv, strict=True)),
        structure.output_projection: SiteSlice((queries,), cuts_inputs=True),
        **dict(zip(structure.gate_up, gate_up, strict=True)),
        structure.down: SiteSlice((inner,), cuts_inputs=True),
    }


def _key_head_range(sizes: _Sizes, team: ShardTeam) -> tuple[int, int]:
    """Return the first key/value head of this worker's shard, and the one after its last. If there are fewer
    heads than shards, several shards have the same head."""
    if sizes.key_heads % team.shards == 0:
        return team.part(sizes.key_heads)
    own = team.shard * sizes.key_heads // team.shards
    return own, own + 1


def _scale_range(part: tuple[int, int], width: int) -> tuple[int, int]:
    return part[0] * width, part[1] * width


def _shift_range(part: tuple[int, int], offset: int) -> tuple[int, int]:
    return part[0] + offset, part[1] + offset


def _cut_weight(linear: nn.Linear, part: SiteSlice) -> None:
    """Replace a linear's weight by the part that this shard keeps."""
    kept = indices_in_whole(part, linear.weight.device)
    weight_NK = linear.weight.index_select(1 if part.cuts_inputs else 0, kept)
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    linear.out_features, linear.in_features = weight_NK.shape


def _cut_bias(bias: nn.Parameter | None, part: SiteSlice) -> nn.Parameter | None:
    """Return the part of a linear's bias that this shard keeps. If the linear is cut by its inputs, this is
    the whole bias, which only one shard may add."""
    if bias is None or part.cuts_inputs:
        return bias
    return nn.Parameter(bias[indices_in_whole(part, bias.device)], requires_grad=False)


def _set_head_counts(attention: nn.Module, sizes: _Sizes, team: ShardTeam) -> None:
    """Set the head counts of an attention module and its config to the shard's numbers of heads, since the
    forward of some families reads them."""
    first, last = _key_head_range(sizes, team)
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
    """An embedding that is divided over the shards by tokens. Its output is a sum over the shards: for each
    token, one shard contributes the embedding and the others contribute zeros."""

    def __init__(self, local_embedding: nn.Embedding, shard: VocabularyShard) -> None:
        """Wrap `local_embedding`, the embedding of the base, of which only the shard's rows are left."""
        super().__init__()
        self.weight, self.padding_idx, self._shard = (
            local_embedding.weight,
            local_embedding.padding_idx,
            shard,
        )
        if (scale := getattr(local_embedding, EMBED_SCALE, None)) is not None:
            self.register_buffer(EMBED_SCALE, torch.as_tensor(scale), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        row, is_local = self._shard.local_rows(tokens)
        h = torch.where(is_local[..., None], embedding(row, self.weight), 0.0)
        self._shard.team.sum_over_shards(h)
        scale = getattr(self, EMBED_SCALE, None)
        return h if scale is None else h * scale.to(h.dtype)


def _cut_embedding_and_head(model: PreTrainedModel, shard: VocabularyShard) -> None:
    """Keep only the shard's rows of the embedding and of the head, if this worker has them. A head that is
    tied to the embedding stays tied."""
    first, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = isinstance(first, nn.Embedding) and getattr(head, "weight", None) is first.weight
    if isinstance(first, nn.Embedding):
        first.weight = _copy_shard_rows(first.weight, shard)
        first.num_embeddings = len(first.weight)
    if isinstance(head, nn.Linear):
        head.weight = cast(nn.Embedding, first).weight if is_tied else _copy_shard_rows(head.weight, shard)
        head.out_features = len(head.weight)
        if head.bias is not None:
            head.bias = _copy_shard_rows(head.bias, shard)


def _copy_shard_rows(whole: Tensor, shard: VocabularyShard) -> nn.Parameter:
    """Return a copy of the shard's rows of a parameter, so that the memory of the whole can be freed."""
    return nn.Parameter(whole.detach()[shard.start : shard.stop].clone(), requires_grad=False)


def _divide_embedding(model: PreTrainedModel, shard: VocabularyShard) -> None:
    """Replace the model's embedding, of which only the shard's rows are left, by a `ShardedEmbedding`, which
    returns the embeddings of all tokens."""
    decoder, name = find_decoder(model), ENDS[model.config.model_type].embedding
    if isinstance(local := getattr(decoder, name), nn.Embedding):
        setattr(decoder, name, ShardedEmbedding(local, shard))


# -- sums over shards ------------------------------------------------------------------------------------


def _sum_over_shards(layer: nn.Module, structure: DecoderFacts, sum_over_shards: SumOverShards) -> None:
    """Add hooks to the attention and the feed-forward of a layer that sum their outputs over the shards in
    the forward, and the gradients of their inputs in the backward."""
    for last in (structure.output_projection, structure.down):
        branch = layer.get_submodule(last.rpartition(".")[0])
        branch.register_forward_pre_hook(partial(_share_input, sum_over_shards), with_kwargs=True)
        layer.get_submodule(last).register_forward_hook(partial(_sum_output, sum_over_shards))


def _share_input(
    sum_over_shards: SumOverShards,
    module: nn.Module,
    arguments: tuple[Any, ...],
    keyword_arguments: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if arguments:
        return (share_input(arguments[0], sum_over_shards), *arguments[1:]), keyword_arguments
    return arguments, {
        **keyword_arguments,
        "hidden_states": share_input(keyword_arguments["hidden_states"], sum_over_shards),
    }


def _sum_output(
    sum_over_shards: SumOverShards, module: nn.Module, arguments: tuple[Any, ...], output_TD: Tensor
) -> Tensor:
    return sum_output(output_TD, sum_over_shards)


def share_input(x_TD: Tensor, sum_over_shards: SumOverShards) -> Tensor:
    """Return the input of an attention or feed-forward, which is the same on every shard. In the backward,
    its gradients are summed over the shards."""
    return cast(Tensor, _SharedInput.apply(x_TD, sum_over_shards))


def sum_output(output_TD: Tensor, sum_over_shards: SumOverShards) -> Tensor:
    """Return the output of an attention or feed-forward, summed over the shards. In the backward, every shard
    receives the gradient of the sum."""
    return cast(Tensor, _SummedOutput.apply(output_TD, sum_over_shards))


class _SharedInput(torch.autograd.Function):
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
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, sum_over_shards: SumOverShards) -> Tensor:
        total_TD = y_TD.clone(memory_format=torch.contiguous_format)
        sum_over_shards(total_TD)
        return total_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None]:
        return dy_TD, None
