"""The frozen base model, or one pipeline stage of it. It computes the last hidden states of packed samples.

Shapes: T rows of the pack, D width of the last hidden state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from weftune.base import attention
from weftune.base.check import check_packing, refuse_config, refuse_modules
from weftune.base.decoders import MIXTURES
from weftune.base.delta_net import separate_samples
from weftune.base.quant.linear import QuantLinear, matrix_dtype, unrounded_activations
from weftune.base.shape import embedding_module, model_shape, site_modules, site_shape
from weftune.base.spec import BaseSpec
from weftune.core.batch import Microbatch
from weftune.core.shapes import EMBED_SCALE, SCORE, LayerRange, ModelShape, SiteShape, SiteSlice
from weftune.core.shards import VocabularyShard
from weftune.core.weights import Head, WeightHolder
from weftune.errors import BaseModelError

DEFAULT_DEVIATION = 0.02
"""Standard deviation with which transformers initialises linears of model families whose config has no such
value."""


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A pretrained causal language model whose weights are frozen, in eval mode, with Weftune's attention for
    packed samples."""

    model: PreTrainedModel
    spec: BaseSpec
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    local_layers: LayerRange | None = None
    """Range of the layers on this worker, or None for all layers. `shape` counts only layers on this worker.
    With several stages, the range extends from the start of the worker's first stage to the end of its
    last."""
    all_sites: tuple[SiteShape, ...] = ()
    """Sites (adaptable linears) of all pipeline stages, with the sizes of whole linears even if layers are
    divided into shards. Empty if the whole base is on this worker."""
    read_stored: Callable[[str], Tensor | None] | None = None
    """Function from the name of a parameter to its whole value if it is streamed or divided among shards, and
    to None otherwise. The field is None if no parameter is streamed or divided."""
    slices: Mapping[str, SiteSlice] = field(default_factory=dict)
    """Maps each site (an adaptable linear) to the part of it on this worker, if layers are divided into
    shards (tensor parallelism). `shape` then has the sizes of these parts. Empty without shards."""
    vocabulary_shard: VocabularyShard | None = None
    """Tokens whose rows of the embedding and of the head are on this worker. None if these rows are not
    divided among shards."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, whose input is tokens. Later stages get the hidden states of the
        previous stage."""
        return self.local_layers is None or self.local_layers.is_first

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the head."""
        return self.local_layers is None or self.local_layers.is_last

    @property
    def is_tied(self) -> bool:
        """Whether the head's weight is tied to the embedding."""
        return bool(getattr(self.model.config, "tie_word_embeddings", False))

    @property
    def whole_sites(self) -> tuple[SiteShape, ...]:
        return self.all_sites or self.shape.sites

    @property
    def trained_sites(self) -> tuple[SiteShape, ...]:
        """Sites (adaptable linears) whose adapter parameters this worker stores and updates. They are the
        sites of its layers, with the sizes of whole linears even if layers are divided into shards."""
        if not self.slices:
            return self.shape.sites
        return tuple(site for site in self.all_sites if site.name in self.slices)

    @classmethod
    def from_model(cls, model: PreTrainedModel, spec: BaseSpec, device: torch.device) -> Base:
        """Freeze `model` in place, and check that packing samples does not change its outputs."""
        refuse_config(model.config, spec.model)
        refuse_modules(model, spec.model)
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise BaseModelError(f"{spec.model} has no linear output layer over its vocabulary.")
        nn.Module.to(model, device)
        model.eval().requires_grad_(False)
        copy_config(model)
        plain = plain_attention(model.config)
        isolate_samples(model)
        dtype = matrix_dtype(model)
        base = cls(model, spec, model_shape(model, dtype), device, dtype)
        with unrounded_activations(model):
            check_packing(base, plain)
        return base

    def sites(self) -> dict[str, nn.Module]:
        """Return a dict from the path of each site (where adapters can attach) to its module: first adaptable
        linears, in the model's order, then experts, by the paths of their parameters."""
        return site_modules(self.model)

    def weight_reader(self) -> Callable[[str], Tensor]:
        """Return a function from the path of a site (an adaptable linear) or of the embedding to its weight
        [N, K], on the device or the host. For the embedding's path with `.embed_scale` appended, the function
        returns the factor by which embeddings are multiplied, and for the path of a scalar head, the standard
        deviation of the head's initial values."""
        modules: dict[str, nn.Module] = {}

        def read(site: str) -> Tensor:
            if not modules:
                modules.update(self.sites() | embedding_module(self.model))
            if site == SCORE:
                return torch.tensor(initial_deviation(self.model.config), dtype=torch.float64)
            path = site.removesuffix(f".{EMBED_SCALE}")
            if path not in modules:
                raise BaseModelError(
                    f"{self.spec.model} has no {path}; its family keeps its embedding elsewhere, so that "
                    "Weftune can neither train embeddings of it nor start virtual tokens from them."
                )
            module = modules[path]
            if path != site:
                return torch.as_tensor(getattr(module, EMBED_SCALE, 1.0))
            if self.slices:
                return self._read_parameter(site, "weight", cast(Tensor, module.weight))
            if isinstance(module, QuantLinear):
                return module.build_matrix(
                    {name: self._read_parameter(site, name, own) for name, own in module.parts.items()}
                )
            if isinstance(module, WeightHolder):
                return module.frozen_weight().matrix()
            weight = self._read_parameter(site, "weight", cast(Tensor, module.weight))
            embeds = module is self.model.get_input_embeddings()
            return weight.T if not embeds and site_shape(site, module).fan_in_fan_out else weight

        return read

    def _read_parameter(self, site: str, name: str, default: Tensor) -> Tensor:
        """Return a parameter of a site (an adaptable linear) from `read_stored` if it is streamed or divided
        among shards, otherwise `default`."""
        stored = None if self.read_stored is None else self.read_stored(f"{site}.{name}")
        if stored is None and self.slices:
            raise BaseModelError(
                f"{site}.{name} is divided among shards, and the files of {self.spec.model} hold it under "
                "another name, so that adapters cannot start from it; train without --shards"
            )
        return default if stored is None else stored

    def hidden(
        self, microbatch: Microbatch, pack: attention.Pack | None = None, input_TD: Tensor | None = None
    ) -> Tensor:
        """Compute the last hidden states h_TD; the last stage also applies the final norm. A given `pack`
        replaces the boundaries of samples that the microbatch's lengths imply. `input_TD` are the hidden
        states of the previous stage; the first stage computes the embeddings of the tokens instead."""
        assert (input_TD is None) == self.is_first, "the first stage takes tokens, every other hidden states"
        pack = pack or attention.pack(microbatch.sample_lengths, self.device)
        assert pack.max_length <= self.shape.context, "a sample is longer than the base has positions for"
        decoder = self.model.base_model
        output = decoder(
            input_ids=microbatch.tokens_T[None] if input_TD is None else None,
            inputs_embeds=None if input_TD is None else input_TD[None],
            position_ids=microbatch.positions_T[None],
            use_cache=False,
            weftune_pack=pack,
        )
        h_1TD: Tensor = output.last_hidden_state
        return h_1TD[0]

    def head(self) -> Head:
        output, config = self.model.get_output_embeddings(), self.model.config
        return Head(
            output.weight,
            output.bias,
            getattr(config, "final_logit_softcapping", None),
            logit_multiplier(config),
            self.vocabulary_shard,
        )


def initial_deviation(config: PretrainedConfig) -> float:
    """Return the standard deviation with which transformers initialises linears that it adds to a model."""
    for name in ("initializer_range", "init_std", "initializer_factor"):
        if hasattr(config, name):
            return float(getattr(config, name) or DEFAULT_DEVIATION)
    return DEFAULT_DEVIATION


def isolate_samples(model: PreTrainedModel) -> None:
    """Change every layer that mixes rows (attention and recurrent layers) so that the samples of a pack do
    not affect one another."""
    attention.register_attention()
    model.set_attn_implementation(attention.NAME)
    separate_samples(model)


def plain_attention(config: PretrainedConfig) -> str:
    """Return the name of the attention implementation that transformers would use. With a soft-cap it is
    `eager`, since sdpa in older versions ignores soft-caps."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped else str(config._attn_implementation)


def logit_multiplier(config: PretrainedConfig) -> float:
    """Return the factor by which logits are multiplied. Cohere's config has a multiplier, Granite's a
    divisor."""
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    if scale is not None:
        return float(scale)
    return 1.0 if divisor is None else 1.0 / float(divisor)


def copy_config(model: PreTrainedModel) -> None:
    """Replace the model's config by a copy, since transformers shares configs by reference. In a mixture of
    experts, disable the output of the routers' logits, which no loss uses, and compute float64 experts
    without grouped products."""
    shared, own = model.config, copy.deepcopy(model.config)
    if own.model_type in MIXTURES:
        # There is no loss on the routers' logits, and torch has no grouped products in float64.
        own.output_router_logits = False
        if model.dtype is torch.float64:
            own._experts_implementation = "eager"
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            setattr(module, "config", own)  # noqa: B010 (nn.Module declares its attributes tensors or modules)
