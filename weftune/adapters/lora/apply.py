"""LoRA: every job's A and B at a group of sites, in the job's own flat vector.

Shapes: T rows, K inputs, N outputs, r ranks of a job. B is held transposed, [r, N], so that each row of
either matrix belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from weftune.adapters.form import SiteTensors, TiledPart
from weftune.adapters.kind import Frozen, JobAdapter, NewAdapter, Parameters, Pass, SiteParts
from weftune.adapters.lora.experts import LoraExperts, flattened, stacked
from weftune.adapters.lora.export import merge, write_portable
from weftune.adapters.lora.files import read_start, read_tokens, write_adapter
from weftune.adapters.lora.spec import A, B, LoraSpec
from weftune.adapters.token_rows import fill_tokens
from weftune.adapters.tokens import TOKENS
from weftune.adapters.vector import ParameterShape, VectorLayout
from weftune.core.batch import Segment
from weftune.core.shapes import SiteShape
from weftune.ops.draw import fill_uniform_alike
from weftune.ops.dropout import key
from weftune.ops.lora.routes import Block, Blocks, Factors, add_lora
from weftune.ops.lora.table import Entry


class LoraBank:
    def __init__(self, sites: Sequence[SiteShape]) -> None:
        self._sites = [site.name for site in sites]
        self._aboard: dict[str, tuple[JobAdapter, Mapping[str, Factors]]] = {}
        """Job → its adapter and its A and B at every site that it adapts."""

    def attach(self, adapter: JobAdapter, weights: Parameters) -> None:
        names = [site for site in self._sites if (site, A) in weights]
        self._aboard[adapter.job] = adapter, _factors(weights, names)

    def detach(self, job: str) -> None:
        del self._aboard[job]

    def segments(self, bound: Pass) -> list[Segment]:
        return [segment for segment in bound.microbatch.segments if segment.through in self._aboard]

    def parts(self, site: str, frozen: Frozen, bound: Pass) -> SiteParts:
        found = [(segment, *self._aboard[segment.through or ""]) for segment in self.segments(bound)]
        blocks = tuple(
            _block(adapter, weights[site], site, segment, bound)
            for segment, adapter, weights in found
            if site in weights
        )
        if not blocks:
            return SiteParts()
        together = Blocks(blocks, bound.microbatch.token_index_T, bound.anchor)
        return SiteParts(add=partial(add_lora, blocks=together, route=bound.route))


def _block(adapter: JobAdapter, weights: Factors, site: str, segment: Segment, bound: Pass) -> Block:
    spec: LoraSpec = adapter.spec
    drops = bound.training and spec.dropout > 0.0
    totals = bound.totals[adapter.job]
    return Block(
        start=segment.start,
        stop=segment.stop,
        weights=weights,
        gradient=Factors(totals[site, A], totals[site, B]),
        scale=spec.scale_at(site),
        dropout=spec.dropout if drops else 0.0,
        key=key(adapter.seed, segment.step, site) if drops else 0,
    )


def low_rank(spec: LoraSpec, at: SiteTensors) -> Entry:
    """Return A and B as the tiled kernels find them."""
    return Entry(
        at.weight(A), at.weight(B), at.total(A), at.total(B), spec.scale_at(at.site.name), spec.dropout
    )


def _factors(parameters: Parameters, sites: Sequence[str]) -> dict[str, Factors]:
    return {site: Factors(parameters[site, A], parameters[site, B]) for site in sites}


def _as_held(a: Tensor, b: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return PEFT's A and B as a bank holds them, at a site whose parameters are shaped like one of them."""
    return stacked(a, b, len(like)) if like.ndim == 3 else (a, b.T)


def _as_stored(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return flattened(a, b) if a.ndim == 3 else (a, b.T)


def draw(new: NewAdapter) -> None:
    """Draw A uniformly within ±1/√K, as PEFT does, and set B to zero; other parameters are not changed."""
    if zeros := [value for (_, name), value in new.parameters.items() if name == B]:
        torch._foreach_zero_(zeros)
    alike: dict[tuple[int, ...], list[str]] = {}
    for (site, name), value in new.parameters.items():
        if name == A:
            alike.setdefault(tuple(value.shape), []).append(site)
    for shape, names in alike.items():
        values = [new.parameters[site, A] for site in names]
        keys = [new.key(site, A) for site in names]
        fill_uniform_alike(values, keys, bound=shape[-1] ** -0.5, drawn_on=new.drawn_on)


class Lora:
    name = "lora"

    def layout(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> VectorLayout:
        embedded = [
            ParameterShape(path, name, shape)
            for path, shapes in spec.shapes_in_embedding(sites).items()
            for name, shape in shapes.items()
        ]
        shapes = [
            ParameterShape(
                site.name,
                name,
                shape,
                rate=spec.loraplus_lr_ratio if name == B else 1.0,
                active=site.active if site.experts else None,
            )
            for site in sites
            if spec.adapts(site)
            for name, shape in spec.shapes_at(site).items()
        ]
        return VectorLayout((*embedded, *shapes))

    def adapts(self, spec: LoraSpec, site: str) -> bool:
        return spec.targets_site(site)

    def rows_before(self, spec: LoraSpec) -> int:
        return 0

    def constants_key(self, spec: LoraSpec) -> None:
        return None

    def constants(self, spec: LoraSpec, sites: Sequence[SiteShape], like: Tensor) -> dict[str, Tensor]:
        return {}

    def check_start(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> None:
        if isinstance(spec.init_from, str):
            read_start(spec, sites)

    def initialise(self, new: NewAdapter, sites: Sequence[SiteShape]) -> None:
        """Fill A and B as PEFT draws them, or from the adapter's `init_from` folder."""
        spec = new.adapter.spec
        if spec.init_from is not None:
            start = read_start(spec, sites)
            for (site, name), value in new.parameters.items():
                if name == TOKENS:
                    value.copy_(read_tokens(Path(spec.init_from), spec).rows_nD)
                    continue
                a_rK, b_rN = _as_held(*start[site], value)
                value.copy_(a_rK if name == A else b_rN)
            return
        draw(new)
        fill_tokens(new)

    def before_step(self, adapter: JobAdapter, step: int, masters: Callable[[], Parameters]) -> None:
        """Do nothing: only the step itself changes the weights."""

    def bank(self, sites: Sequence[SiteShape]) -> LoraBank:
        return LoraBank(sites)

    def is_tiled(self, spec: LoraSpec) -> bool:
        return True

    def gathers(self, spec: LoraSpec) -> bool:
        return False

    def tiled_part(self, adapter: JobAdapter, at: SiteTensors) -> TiledPart | None:
        if (at.site.name, A) not in at.weights:
            return None
        return TiledPart(low_rank=low_rank(adapter.spec, at))

    def expert_bank(self, sites: Sequence[SiteShape]) -> LoraExperts:
        return LoraExperts(sites)

    def save(
        self, folder: Path, spec: LoraSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        weights = {
            site: _as_stored(value, parameters[site, B])
            for (site, name), value in parameters.items()
            if name == A
        }
        tokens = {site: value for (site, name), value in parameters.items() if name == TOKENS}
        write_adapter(folder, spec, weights, sites, base, tokens)

    def portable(self, folder: Path, target: Path) -> int:
        return write_portable(folder, target)

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        merge(folder, modules, sites)
