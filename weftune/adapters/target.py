"""The keys of an adapter in a jobs file that all kinds share, such as `targets` and `layers`. This module
does not import torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from weftune.core.shapes import SCORE, SiteShape, layer_number

ALL_LINEAR = "all-linear"
ATTENTION = ("o_proj", "self_attn.out_proj", "attn.c_proj", "attention.dense")
"""Names of the last linear of the attention block in the supported model families."""
FEEDFORWARD = ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h")
"""Names of the last linear of the feed-forward block in the supported model families."""
Layers = str | int | tuple[int, ...]
"""Layers to adapt: a layer number, several numbers, or ranges such as `16-31`."""
MAX_LAYERS = 10_000
ROWS = "rows"
"""Name of the parameter with the embeddings of virtual tokens: [rows, hidden width]."""
KEYS, VALUES = "prefix_keys", "prefix_values"
"""Names of the parameters with prefix keys and prefix values of a layer, each [rows, width of all heads]."""

TOKENS = "token_rows_nD"
"""Name of the parameter with trained token embeddings, which are whole rows, not differences from the base.
In an adapter's parameters it belongs to the embedding."""
HEAD = "head_D"
"""Name of the parameter with the scalar head, which belongs to the module SCORE."""
STORED_TOKENS = "token_adapter.trainable_tokens_delta"
"""Name of the parameter TOKENS in PEFT's files, where the path of the embedding precedes it."""
PROJECTION = "project_out"
"""Name of a linear that some models have between the last layer and the output layer."""
EMBEDDINGS = {"layers": "embed_tokens", "h": "wte"}
"""Maps the name that a model gives its list of layers to the name of its embedding, which is in the same
module."""


@dataclass(frozen=True, slots=True)
class FromJob:
    """Reference, in a job's `init_from`, to another job of the run whose finished adapter provides the
    initial weights."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    job: str


def source_job(adapter: TargetSpec) -> str:
    """Return the job that a spec's `init_from` names, or "" if it names a folder or is None."""
    return adapter.init_from.job if isinstance(adapter.init_from, FromJob) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """The target modules and the initial weights of an adapter. Base class of the specs of all adapter
    kinds."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    implementation: ClassVar[str]
    """Import path `package.module:Class` of the class that implements the kind. It is imported only for
    training, because it needs torch."""
    peft_type: ClassVar[str | None] = None
    """PEFT's name for the adapter kind. None if PEFT does not have the kind."""
    is_mergeable: ClassVar[bool] = True
    """Whether adapters of the kind can be merged into the weights of a base."""
    is_dense: ClassVar[bool] = False
    """Whether an adapter has at least as many parameters as its target modules have weights."""
    is_served: ClassVar[bool] = False
    """Whether vLLM loads the adapter files of the kind."""
    runs_on_shards: ClassVar[bool] = False
    """Whether the kind supports layers that are divided into shards (a part for each worker). Parameters at a
    linear are then divided in the same way as the linear. For parameters that are not divided, each shard
    computes a part of the gradient."""
    unused_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that the specs of all kinds have but that have no effect for this kind."""

    kind: str
    targets: str | tuple[str, ...] = ALL_LINEAR
    """`all-linear`, a regular expression that must match a whole module path, or a list of path endings."""
    layers: Layers | None = None
    """Numbers of the adapted layers, counted from 0. None adapts all layers."""
    init_from: str | FromJob | None = None
    """PEFT adapter folder with the initial weights, or a job of the same run whose finished adapter provides
    them. None for a new adapter."""

    def targets_site(self, name: str) -> bool:
        """Return whether PEFT would adapt the module `name` with these targets and layers. The module must
        not be the output layer, which is never adapted."""
        if self.layers is not None and layer_number(name) not in layer_numbers(self.layers):
            return False
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or re.fullmatch(self.targets, name) is not None
        return any(ends_with(name, target) for target in self.targets)

    def expressions(self) -> dict[tuple[str, ...], str]:
        """Return the spec's regular expressions, by the path of their key in the spec. Each expression must
        match a whole module path."""
        is_one = isinstance(self.targets, str) and self.targets.lower() != ALL_LINEAR
        return {("targets",): str(self.targets)} if is_one else {}

    def adapts(self, site: SiteShape) -> bool:
        """Return whether the adapter has parameters at the linear. By default this is False for experts;
        kinds that support experts override this method."""
        return not site.experts and self.targets_site(site.name)

    def shapes_at(self, site: SiteShape) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes, by name, of the adapter's parameters at a linear that it adapts."""
        raise NotImplementedError

    def parameters_at(self, site: SiteShape) -> int:
        """Return the number of values that the adapter trains at the linear."""
        return sum(map(math.prod, self.shapes_at(site).values()))

    @property
    def rows_before(self) -> int:
        """Number of virtual tokens that the adapter inserts before every sample."""
        return 0

    @property
    def keys_before(self) -> int:
        """Number of prefix keys and values that the adapter inserts before every sample in every layer."""
        return 0

    @property
    def positions_before(self) -> int:
        """Number of positions of the base's context that virtual tokens or prefix keys of the adapter take up
        before every sample."""
        return self.rows_before + self.keys_before

    @property
    def starts_as_base(self) -> bool:
        """Whether a new adapter leaves the outputs of the base unchanged."""
        return not self.positions_before and self.init_from is None

    @property
    def start_text(self) -> str:
        """Text whose embeddings initialise the virtual tokens. Empty if they are initialised otherwise."""
        return ""

    @property
    def trained_tokens(self) -> tuple[int, ...]:
        """Ids of tokens whose embeddings are trained. If the output layer is tied to the embedding, its rows
        for these tokens are trained, too."""
        return ()

    @property
    def scalar_head(self) -> bool:
        """Whether the adapter also trains a vector that maps the last hidden state of a sample to a scalar
        value, as in reward models."""
        return False

    def shapes_outside_linears(self, sites: Sequence[SiteShape]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of parameters that belong to no linear, such as virtual tokens, for a base or
        stage with the linears `sites`."""
        return {}

    def embedding_row_shapes(self, sites: Sequence[SiteShape]) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return the shapes of trained rows of the embedding, as {path of the embedding: {parameter name:
        shape}}. Empty if none are trained."""
        path = embedding_path(sites) if self.trained_tokens else None
        return {} if path is None else {path: {TOKENS: (len(self.trained_tokens), embedding_width(sites))}}

    def scalar_head_shapes(self, sites: Sequence[SiteShape]) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return the shape of the scalar head, as {module: {parameter name: shape}}. Empty if the adapter has
        none or `sites` do not include the last layer."""
        width = last_hidden_width(sites) if self.scalar_head else 0
        return {SCORE: {HEAD: (width,)}} if width else {}

    def parameter_counts(self, sites: Sequence[SiteShape]) -> Iterator[tuple[str, int]]:
        """Yield (module path, number of trained values) for every module with trained values. The path is
        empty for values that belong to no single module."""
        yield "", sum(map(math.prod, self.shapes_outside_linears(sites).values()))
        for path, shapes in {**self.embedding_row_shapes(sites), **self.scalar_head_shapes(sites)}.items():
            yield path, sum(map(math.prod, shapes.values()))
        yield from ((site.name, self.parameters_at(site)) for site in sites if self.adapts(site))

    def scales_outputs(self, site: SiteShape) -> bool:
        """Return whether the adapter scales the base's outputs at a linear that it adapts."""
        return False

    def scaled_outputs(self, sites: Sequence[SiteShape]) -> int:
        """Return the number of values per token that are kept for the gradients of scales of outputs. They
        are the outputs of all linears that may be multiplied in one product with a scaled linear."""
        beside = {
            _shared_input_key(site) for site in sites if self.adapts(site) and self.scales_outputs(site)
        }
        return sum(site.out_features for site in sites if _shared_input_key(site) in beside)

    def copied_values(self, sites: Sequence[SiteShape]) -> int:
        """Return the number of values per token that fused layers save for the adapter's backward, besides
        the base's activations and scaled outputs. All layers are counted, under the assumption that every row
        belongs to the job."""
        return 0

    def rank_at(self, name: str) -> int:
        """Return the rank of the adapter at a linear, from which its time is estimated. 0 for kinds without a
        rank."""
        return 0


def _shared_input_key(site: SiteShape) -> tuple[str, int]:
    """Return a key of a linear. Linears with equal keys have the same parent module and input width, so they
    may share their input."""
    return site.name.rpartition(".")[0], site.in_features


def ends_with(name: str, ending: str) -> bool:
    """Return whether a module path ends with the dotted names in `ending`."""
    return name == ending or name.endswith(f".{ending}")


@cache
def layer_numbers(layers: Layers) -> frozenset[int]:
    """Return the layer numbers that `layers` describes. Raise ValueError if it is not a valid description."""
    if isinstance(layers, int):
        return frozenset({layers})
    if not isinstance(layers, str):
        return frozenset(layers)
    numbers: set[int] = set()
    for part in layers.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if bounds is None:
            raise ValueError(f"{part.strip()!r} is neither a number nor a range")
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if high < low:
            raise ValueError(f"{part.strip()!r} ends before it begins")
        if high >= MAX_LAYERS:
            raise ValueError(f"{part.strip()!r} goes beyond the layers of any base")
        numbers |= set(range(low, high + 1))
    return frozenset(numbers)


def embedding_path(sites: Sequence[SiteShape]) -> str | None:
    """Return the module path of the embedding, found from the path of a linear of layer 0. None if `sites`
    has no such linear."""
    first = next(_first_layer(sites), None)
    if first is None:
        return None
    beside, _, _ = first.name.partition(".0.")
    parent, _, layers = beside.rpartition(".")
    return f"{parent}.{EMBEDDINGS.get(layers, 'embed_tokens')}"


def embedding_width(sites: Sequence[SiteShape]) -> int:
    """Return the width of the embedding: the most frequent input width of the linears of layer 0. 0 if
    `sites` has no linear of layer 0."""
    return _most_common_width(_first_layer(sites))


def last_hidden_width(sites: Sequence[SiteShape]) -> int:
    """Return the width of the last hidden states: the most frequent input width of the linears of the last
    layer, or the output width of a projection after it (OPT). 0 if `sites` has no linear of the last
    layer."""
    width = _most_common_width(site for site in sites if site.in_last_layer)
    projections = (site.out_features for site in sites if ends_with(site.name, PROJECTION))
    return next(projections, width) if width else 0


def _most_common_width(sites: Iterable[SiteShape]) -> int:
    """Return the most frequent input width of the linears in `sites`, or 0 if there are none."""
    widths = Counter(site.in_features for site in sites)
    return max(widths, key=lambda width: widths[width], default=0)


def _first_layer(sites: Sequence[SiteShape]) -> Iterator[SiteShape]:
    return (site for site in sites if layer_number(site.name) == 0)
