"""Sizes of bases and jobs, for the packages that plan and those that compute."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Parameter names of the linears of a layer's experts, in order. Each parameter holds all experts."""
TEXT_TOWER = "model.language_model"
"""Module path of the text tower in a multimodal model."""
EMBED_SCALE = "embed_scale"
"""Attribute of an embedding with the factor that its outputs are multiplied by."""
LINEAR_ATTENTION = ".linear_attn."
"""Part of the module paths of sites (adaptable linears) in layers with a recurrent state."""
SCORE = "score"
"""Module path of the scalar head in transformers' models for sequence classification."""
LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Maximum bytes of logits that are computed at a time: few enough for the caches of a CPU, and enough to keep
a GPU busy."""


def logit_rows(device: str, vocabulary: int) -> int:
    """Return the number of supervised rows whose float32 logits are computed at a time."""
    return max(1, LOGIT_BYTES.get(device, LOGIT_BYTES["cpu"]) // (4 * vocabulary))


@dataclass(frozen=True, slots=True)
class SiteSlice:
    """The part of a linear that one shard of the base holds: some of its outputs or some of its inputs."""

    ranges: tuple[tuple[int, int], ...]
    """Consecutive outputs or inputs as (start, stop), in order."""
    cuts_inputs: bool
    """Whether the inputs of the linear are divided among shards, so that the outputs of all shards are
    summed. Otherwise its outputs are divided."""

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A site: a linear of the base that an adapter can change, or the linears of all experts of a layer,
    stored as one parameter. `name` is its module path."""

    name: str
    in_features: int
    out_features: int
    fan_in_fan_out: bool = False
    """Whether the weight is stored as [in, out] (GPT-2's Conv1D)."""
    experts: int = 0
    """Number of experts that a router chooses from; 0 for a single matrix that every token uses."""
    active_matrices: int = 1
    """Number of the site's matrices that each token is multiplied by. The number is above 1 only for
    experts."""
    in_last_layer: bool = False
    """Whether the site is in the last layer of the whole base, even if only a stage of the base is
    described."""
    part: SiteSlice | None = None
    """The local part of the linear if it is divided among shards. `in_features` and `out_features` are then
    the sizes of this part. None for a whole linear."""

    @property
    def first_input(self) -> int:
        """Index of the first local input among the inputs of the whole linear. Dropout masks depend on this
        index."""
        return self.part.ranges[0][0] if self.sums_outputs and self.part else 0

    @property
    def sums_outputs(self) -> bool:
        """Whether the outputs of several shards are summed, because each shard has a part of the inputs."""
        return self.part is not None and self.part.cuts_inputs

    @property
    def output_ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges (start, stop) of the local outputs among the outputs of the whole linear."""
        if self.part is None or self.part.cuts_inputs:
            return ((0, self.out_features),)
        return self.part.ranges

    @property
    def weight_count(self) -> int:
        return max(1, self.experts) * self.in_features * self.out_features

    def inactive_parameters(self, parameters: int) -> int:
        """Return how many of `parameters` parameters, spread evenly over all experts, a token does not
        use."""
        return parameters * (self.experts - self.active_matrices) // self.experts if self.experts else 0

    @property
    def active_weights(self) -> int:
        """Number of weights by which each token is multiplied at the site (an adapted linear); in a mixture
        of experts, only those of the experts that the token is routed to."""
        return self.active_matrices * self.in_features * self.out_features

    @property
    def values_per_token(self) -> int:
        """Number of input and output values of the site per token."""
        return self.active_matrices * (self.in_features + self.out_features)


CUT_BY_INPUTS = ("o_proj", "down_proj")
"""Names of the linears whose inputs, rather than outputs, are divided among the shards of a layer."""


@cache
def layer_number(site: str) -> int | None:
    """Return the layer number in a site's module path, or None for a site outside the layers."""
    found = re.search(r"\.(\d+)\.", site)
    return None if found is None else int(found[1])


def is_name_in_wrapper(name: str) -> bool:
    """Return whether a module path belongs to the text tower of a multimodal model."""
    return name.startswith(f"{TEXT_TOWER}.")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a base from which memory and time are predicted."""

    layers: int
    hidden: int
    vocabulary: int
    parameters: int
    bytes_per_value: int
    """Bytes per value of activations, adapters and, unless `site_bytes_per_value` is set, weights."""
    sites: tuple[SiteShape, ...]
    context: int
    """Maximum number of tokens per sample that the base has positions for."""
    unscaled_context: int | None = None
    """Maximum number of tokens per sample without rope scaling, which the factor of a rope scaling
    multiplies. None if the context cannot be extended."""
    site_bytes_per_value: float | None = None
    """Bytes per value of the weights of the sites (adaptable linears), if their format differs from the
    compute dtype."""
    multiplies_stored_format: bool = False
    """Whether matrix products read the weights directly in their stored format, without a dequantised
    copy."""
    extra_values: int = 0
    """Number of values per token that a fused layer keeps for its backward in addition to those computed from
    the widths of its linears. This number differs between families of models, for example because of their
    norms."""
    query_width: int = 0
    """Values per token of all query heads, which is also the width of attention's output. 0 if unknown."""
    shards: int = 1
    """Number of shards that the layers are divided into, if this is the shape of one shard."""

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have a recurrent state instead of attention."""
        return any(LINEAR_ATTENTION in site.name for site in self.sites)

    @property
    def attention_width(self) -> int:
        """Values per token of attention's output."""
        return self.query_width or self.hidden

    @cached_property
    def routes_to_experts(self) -> bool:
        """Whether the base is a mixture of experts, whose layers run as in transformers on every device."""
        return any(site.experts for site in self.sites)

    @cached_property
    def values_per_token(self) -> int:
        """Number of input and output values per token of all sites (adaptable linears) together."""
        return sum(site.values_per_token for site in self.sites)

    @cached_property
    def whole_values_per_token(self) -> int:
        """Number of input and output values per token of all sites (adaptable linears), summed over all
        shards."""
        if self.shards == 1:
            return self.values_per_token
        return sum(
            self.shards * site.in_features + site.out_features
            if site.name.rpartition(".")[2] in CUT_BY_INPUTS
            else site.in_features + self.shards * site.out_features
            for site in self.sites
        )

    @property
    def active_parameters(self) -> int:
        """Number of parameters that each token uses. In a mixture of experts, only the experts that a token
        is routed to count."""
        return self.parameters - sum(site.weight_count - site.active_weights for site in self.sites)

    @property
    def ties_head(self) -> bool:
        """Whether embedding and head are one matrix, which is counted once."""
        inside = sum(site.weight_count for site in self.sites if layer_number(site.name) is not None)
        return self.parameters < inside + 2 * self.vocabulary * self.hidden

    @property
    def weight_bytes_per_value(self) -> float:
        """Bytes per value of the weights of the sites (adaptable linears). Values of adapters, activations
        and head may have another size."""
        return self.bytes_per_value if self.site_bytes_per_value is None else self.site_bytes_per_value

    @property
    def base_bytes(self) -> int:
        if self.site_bytes_per_value is None:
            return self.parameters * self.bytes_per_value
        inside = sum(site.weight_count for site in self.sites)
        return round((self.parameters - inside) * self.bytes_per_value + inside * self.weight_bytes_per_value)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the largest dequantised matrix. 0 if weights are multiplied in their stored format."""
        if self.site_bytes_per_value is None or self.multiplies_stored_format:
            return 0
        return self.bytes_per_value * max(site.in_features * site.out_features for site in self.sites)

    @property
    def code_bytes(self) -> int:
        """Bytes per token of the activations that are rounded to 8 bits for one product, if products use
        8-bit numbers. Twice the width of the widest site (adaptable linear) is counted, since two such
        linears may be fused."""
        if not self.multiplies_stored_format:
            return 0
        return 2 * max(max(site.in_features, site.out_features) for site in self.sites)

    def site(self, name: str) -> SiteShape:
        return next(site for site in self.sites if site.name == name)


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers of one stage: `start` to `stop` of the base's `base_layers` layers."""

    start: int
    stop: int
    base_layers: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.base_layers


@dataclass(frozen=True, slots=True)
class JobShape:
    """The sizes of a job from which its memory and time are predicted, and the job's place in the order of
    admission."""

    name: str
    priority: int
    file_position: int
    """Position of the job in the jobs file. Of jobs of equal priority, earlier ones are admitted first."""
    trainable_parameters: int
    """Number of adapter parameters."""
    max_sample_tokens: int
    """Number of tokens in the longest sample."""
    batch_tokens: int = 0
    """Upper bound on the tokens in the largest global batch."""
    parameters_by_layer: tuple[int, ...] = ()
    """Number of adapter parameters in each layer of the base. Empty means equally many in every layer."""
    inactive_parameters: int = 0
    """Number of adapter parameters that a token does not use, because the token is not routed to the experts
    that they belong to."""
    source_job: str = ""
    """Name of the job of the same run whose trained adapter this job starts from."""
    scaled_outputs: int = 0
    """Number of output values of the base per token, over all layers, that are kept for every token of a
    microbatch while the job is attached (runs), because the job's adapter scales outputs."""
    copied_values: int = 0
    """Number of values per token, over all layers, that fused layers keep for the job's rows in addition to
    the base's activations and to scaled outputs: rows of a bottleneck, or attention without prefix keys."""
    mean_weight_count: int = 0
    """Number of weight averages that the job keeps, each as large as the master weights: 1 for a trial (job
    of a sweep) that is evaluated with the mean of its weights, otherwise 0."""
    answer_positions: int = 0
    """Maximum number of tokens whose keys and values are cached at a time while the job answers held-out
    prompts. 0 if the job generates no answers."""

    @property
    def active_parameters(self) -> int:
        """Number of adapter parameters that a token is multiplied by."""
        return self.trainable_parameters - self.inactive_parameters

    def averaged_values_in_layers(self, layer_range: LayerRange) -> int:
        """Return the number of values that the job's weight averages have in the layers of a stage."""
        return self.mean_weight_count and self.mean_weight_count * self.parameters_in_layers(layer_range)

    def parameters_in_layers(self, layer_range: LayerRange) -> int:
        """Return the number of the job's adapter parameters in the layers of a stage. Parameters outside the
        layers are counted in every stage."""
        if not self.parameters_by_layer:
            return math.ceil(
                self.trainable_parameters * (layer_range.stop - layer_range.start) / layer_range.base_layers
            )
        return (
            self.trainable_parameters
            - sum(self.parameters_by_layer)
            + sum(self.parameters_by_layer[layer_range.start : layer_range.stop])
        )


def sum_parameters_by_layer(parameters: Iterable[tuple[str, int]], layers: int) -> tuple[int, ...]:
    """Return the number of adapter parameters in each layer. Sites (adaptable linears) outside the layers are
    ignored."""
    sums = [0] * layers
    for site, count in parameters:
        if (layer := layer_number(site)) is not None:
            sums[layer] += count
    return tuple(sums)


FOUR_BIT_MAXIMA = 3 / 64
"""Additional bytes per value of nf4 weights on shards, where the maximum of each block of 64 values is a
float32 instead of one byte."""


def shard_shape(shape: ModelShape, shards: int) -> ModelShape:
    """Return the sizes of the largest shard of a base. The linears of every layer are divided among the
    shards, and so are the tokens of the embedding and of the head. Key/value heads that several shards have
    copies of are counted once."""
    sites = tuple(
        replace(site, in_features=site.in_features // shards)
        if site.name.rpartition(".")[2] in CUT_BY_INPUTS
        else replace(site, out_features=site.out_features // shards)
        for site in shape.sites
    )
    cut = sum(site.weight_count for site in shape.sites) - sum(site.weight_count for site in sites)
    vocabulary = -(-shape.vocabulary // shards)
    matrices = 1 if shape.ties_head else 2
    cut += matrices * shape.hidden * (shape.vocabulary - vocabulary)
    stored = shape.site_bytes_per_value
    if stored is not None and stored < 1:
        stored += FOUR_BIT_MAXIMA
    parameters = shape.parameters - cut
    return replace(
        shape,
        vocabulary=vocabulary,
        parameters=parameters,
        sites=sites,
        site_bytes_per_value=stored,
        query_width=shape.attention_width // shards,
        shards=shards,
    )
