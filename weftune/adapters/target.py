"""The sites to which an adapter attaches: the keys common to all kinds on linears of the base. No torch
here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from weftune.core.shapes import SiteShape, layer_of

ALL_LINEAR = "all-linear"
FEEDFORWARD = ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h")
"""Names of the last linear of the feed-forward in different families."""
Layers = str | int | tuple[int, ...]
"""A layer number, several, or ranges such as `16-31`."""
MOST_LAYERS = 10_000
ROWS = "rows"
"""The parameter of adapters that put rows before a sample: [rows, hidden width]."""
KEYS, VALUES = "prefix_keys", "prefix_values"
"""The parameters of adapters that put keys and values before a sample: [rows, width of all heads]."""

TOKENS = "token_rows_nD"
"""Parameter of the embeddings themselves, not their difference from the base's. Its site is the embedding."""
STORED_TOKENS = "token_adapter.trainable_tokens_delta"
"""PEFT's name for this parameter, after the path of the embedding."""
EMBEDDINGS = {"layers": "embed_tokens", "h": "wte"}
"""Name of the list of layers → name of the embedding beside it, as families call them."""


@dataclass(frozen=True, slots=True)
class FromJob:
    """The finished adapter of another job, for which this job waits."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    job: str


def source_of(adapter: TargetSpec) -> str:
    """Return the job that a spec's `init_from` names. Empty if it names a folder, or nothing."""
    return adapter.init_from.job if isinstance(adapter.init_from, FromJob) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """The linears that an adapter changes, and what it starts from. The spec of every kind extends it."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    implementation: ClassVar[str]
    """`package.module:Class` of the Kind, imported only when a job is trained, because it needs torch."""
    peft_type: ClassVar[str | None] = None
    """PEFT's name for the kind. None if PEFT does not have it."""
    merges: ClassVar[bool] = True
    """Whether it can be merged into the weights of a base."""
    dense: ClassVar[bool] = False
    """Whether it has at least as many parameters as its targets have weights."""
    served: ClassVar[bool] = False
    """Whether vLLM loads the files that it is saved as."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """The keys of this class that have no meaning for the kind."""

    kind: str
    targets: str | tuple[str, ...] = ALL_LINEAR
    """`all-linear`, a regular expression that must match a whole module path, or a list of path endings."""
    layers: Layers | None = None
    """The layers that are adapted, counted from 0. None adapts all layers."""
    init_from: str | FromJob | None = None
    """A PEFT adapter folder to start from, or a job of the same run whose adapter is waited for."""

    def targets_site(self, name: str) -> bool:
        """Whether PEFT would put an adapter on the module `name` (the output layer is not a site)."""
        if self.layers is not None and layer_of(name) not in layer_numbers(self.layers):
            return False
        if isinstance(self.targets, str):
            return self.targets.lower() == ALL_LINEAR or re.fullmatch(self.targets, name) is not None
        return any(ends_with(name, target) for target in self.targets)

    def expressions(self) -> dict[tuple[str, ...], str]:
        """Return the regular expressions that must match whole module paths, by the key of each."""
        is_one = isinstance(self.targets, str) and self.targets.lower() != ALL_LINEAR
        return {("targets",): str(self.targets)} if is_one else {}

    def adapts(self, site: SiteShape) -> bool:
        """Whether the adapter has parameters at the site; at experts only if its kind overrides this."""
        return not site.experts and self.targets_site(site.name)

    def shapes_at(self, site: SiteShape) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of its parameters at a site that it adapts, by name."""
        raise NotImplementedError

    def parameters_at(self, site: SiteShape) -> int:
        """Return the number of values that it trains at the site."""
        return sum(map(math.prod, self.shapes_at(site).values()))

    @property
    def rows_before(self) -> int:
        """Number of rows of its own that it puts before every sample, in the place of embeddings."""
        return 0

    @property
    def keys_before(self) -> int:
        """Number of keys and values of its own that every layer sees before a sample."""
        return 0

    @property
    def positions_before(self) -> int:
        """Number of positions of the base's context that it takes before every sample."""
        return self.rows_before + self.keys_before

    @property
    def starts_as_base(self) -> bool:
        """Whether the base with a new adapter computes what the base alone computes."""
        return not self.positions_before and self.init_from is None

    @property
    def start_text(self) -> str:
        """The text whose embeddings its virtual tokens start from. Empty if there is none."""
        return ""

    @property
    def trained_tokens(self) -> tuple[int, ...]:
        """Tokens whose embeddings it trains; if these are tied, also their rows of the output layer."""
        return ()

    def shapes_outside(self, sites: Sequence[SiteShape]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of its parameters outside the sites of a base, or stage, with these sites."""
        return {}

    def shapes_in_embedding(self, sites: Sequence[SiteShape]) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return its parameters in the place of rows of the embedding: path of that → name → shape."""
        path, first = embedding_path(sites), _first_layer(sites)
        if not self.trained_tokens or path is None or first is None:
            return {}
        return {path: {TOKENS: (len(self.trained_tokens), first.in_features)}}

    def counts(self, sites: Sequence[SiteShape]) -> Iterator[tuple[str, int]]:
        """Yield (site, number of values trained there). The name is empty for values outside the sites."""
        yield "", sum(map(math.prod, self.shapes_outside(sites).values()))
        for path, shapes in self.shapes_in_embedding(sites).items():
            yield path, sum(map(math.prod, shapes.values()))
        yield from ((site.name, self.parameters_at(site)) for site in sites if self.adapts(site))

    def scales_outputs(self, site: SiteShape) -> bool:
        """Whether the adapter scales what the base computes at a site that it adapts."""
        return False

    def scaled_outputs(self, sites: Sequence[SiteShape]) -> int:
        """Return the number of the base's outputs that are kept for the gradients of such scales: those of
        all neighbouring sites that may be multiplied at once."""
        beside = {_beside(site) for site in sites if self.adapts(site) and self.scales_outputs(site)}
        return sum(site.out_features for site in sites if _beside(site) in beside)

    def rank_at(self, name: str) -> int:
        """Return the width of its product beside the frozen one, or 0. Its time is estimated from this."""
        return 0


def _beside(site: SiteShape) -> tuple[str, int]:
    """Return a key that is equal for sites of one module that may share their input."""
    return site.name.rpartition(".")[0], site.in_features


def ends_with(name: str, ending: str) -> bool:
    """Whether a module path ends in these names."""
    return name == ending or name.endswith(f".{ending}")


@cache
def layer_numbers(layers: Layers) -> frozenset[int]:
    """Return the layer numbers that `layers` describes. Raise ValueError if it is malformed."""
    if isinstance(layers, int):
        return frozenset({layers})
    if not isinstance(layers, str):
        return frozenset(layers)
    found: set[int] = set()
    for part in layers.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if bounds is None:
            raise ValueError(f"{part.strip()!r} is neither a number nor a range")
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if high < low:
            raise ValueError(f"{part.strip()!r} ends before it begins")
        if high >= MOST_LAYERS:
            raise ValueError(f"{part.strip()!r} goes beyond the layers of any base")
        found |= set(range(low, high + 1))
    return frozenset(found)


def embedding_path(sites: Sequence[SiteShape]) -> str | None:
    """Return the path of the embedding in a base with these sites. None if they lack its first layer."""
    first = _first_layer(sites)
    if first is None:
        return None
    beside, _, _ = first.name.partition(".0.")
    parent, _, layers = beside.rpartition(".")
    return f"{parent}.{EMBEDDINGS.get(layers, 'embed_tokens')}"


def _first_layer(sites: Sequence[SiteShape]) -> SiteShape | None:
    """Return the first site of the first layer, which is as wide as the embeddings that go into it."""
    return next((site for site in sites if layer_of(site.name) == 0), None)
