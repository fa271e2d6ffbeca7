"""IA³: trained scales l that start at one. y = (x ⊙ l)Wᵀ + b at linears that the spec names as feed-forward,
and y = l ⊙ (xWᵀ + b) at all other adapted linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from weftune.adapters.files import is_transposed, peft_config, target_modules
from weftune.adapters.folder import target_fields
from weftune.adapters.ia3.spec import SCALE, Ia3Spec
from weftune.adapters.kind import NewAdapter, SiteTensors, TiledPart
from weftune.adapters.plain import PREFIX, JobAt, JobPart, MergeAt, PlainKind
from weftune.adapters.target import ends_with
from weftune.core.shapes import SiteShape
from weftune.ops.lora.scales import SiteScale


class Ia3(PlainKind):
    name = "ia3"

    def part(self, job_site: JobAt) -> JobPart:
        scale = job_site.trained(SCALE)
        if job_site.adapter.spec.is_feedforward(job_site.site.name):
            return JobPart(g_in_K=scale)
        return JobPart(g_out_N=scale, scales_bias=True)

    def is_tiled(self, spec: Ia3Spec) -> bool:
        return True

    def tiled_part(self, tensors: SiteTensors) -> TiledPart | None:
        if (tensors.site.name, SCALE) not in tensors.weights:
            return None
        scale = SiteScale(tensors.weight(SCALE), tensors.total(SCALE), scales_bias=True)
        feedforward = tensors.adapter.spec.is_feedforward(tensors.site.name)
        return TiledPart(g_in=scale) if feedforward else TiledPart(g_out=scale)

    def start(self, new_adapter: NewAdapter) -> None:
        for value in new_adapter.parameters.values():
            value.fill_(1.0)

    def stored_name(self, site: str, name: str) -> str:
        return f"{PREFIX}{site}.ia3_l"

    def to_stored(self, spec: Ia3Spec, site: str, name: str, value: Tensor) -> Tensor:
        return value[None, :] if spec.is_feedforward(site) else value[:, None]

    def from_stored(self, spec: Ia3Spec, site: str, name: str, value: Tensor) -> Tensor:
        return value.flatten()

    def config(
        self, spec: Ia3Spec, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str
    ) -> Any:
        modules = target_modules(spec, adapted_sites, sites)
        if not isinstance(modules, str):
            # PEFT cannot choose layers for this kind: if the spec does, the modules are named one by one.
            modules = (
                sorted(adapted_sites) if spec.layers is not None else _used_names(modules, adapted_sites)
            )
        feedforward = [name for name in adapted_sites if spec.is_feedforward(name)]
        return peft_config(
            "IA3Config",
            base,
            target_modules=modules,
            feedforward_modules=feedforward
            if isinstance(modules, str)
            else _used_names(modules, feedforward),
            fan_in_fan_out=is_transposed(adapted_sites, sites),
        )

    def read_spec(self, config: Mapping[str, Any]) -> Ia3Spec:
        feedforward = config.get("feedforward_modules") or ()
        return Ia3Spec(
            **target_fields(config),
            feedforward=(feedforward,) if isinstance(feedforward, str) else tuple(map(str, feedforward)),
        )

    def merged(self, merge_site: MergeAt) -> tuple[Tensor, Tensor | None]:
        scale = merge_site.own[SCALE]
        if merge_site.spec.is_feedforward(merge_site.site.name):
            return merge_site.weight_NK * scale, merge_site.bias_N
        bias_N = None if merge_site.bias_N is None else merge_site.bias_N * scale
        return merge_site.weight_NK * scale[:, None], bias_N


def _used_names(modules: Sequence[str], sites: Sequence[str]) -> list[str]:
    """Return the names in `modules` with which the path of at least one of the linears in `sites` ends."""
    return [one for one in modules if any(ends_with(site, one) for site in sites)]
