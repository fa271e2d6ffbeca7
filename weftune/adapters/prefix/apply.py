"""Prefix tuning: trained keys and values before every sample in every layer, as in PEFT without a projection.

`Banks.read_prefix_keys` returns them, and `base.attention` attends to them. Shapes: P virtual tokens, N width
of all key heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftune.adapters.files import peft_config, read_tensors, write_folder
from weftune.adapters.kind import NewAdapter, Parameters
from weftune.adapters.plain import PlainKind
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError
from weftune.ops.draw import fill_normal

STORED = "prompt_embeddings"
"""Name of the only tensor in adapter files of prefix tuning. It concatenates, layer by layer, the prefix keys
and then the prefix values."""


class PrefixTuning(PlainKind):
    name = "prefix"

    def gathers(self, spec: PrefixSpec) -> bool:
        return True

    def start(self, new_adapter: NewAdapter) -> None:
        for (site, name), value in new_adapter.parameters.items():
            fill_normal(value, new_adapter.key(site, name))

    def config(
        self, spec: PrefixSpec, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str
    ) -> Any:
        """Return PEFT's config for the adapter. PEFT reads the number of layers and the head width from the
        base."""
        return peft_config(
            "PrefixTuningConfig",
            base,
            num_virtual_tokens=spec.num_virtual_tokens,
            num_transformer_submodules=1,
        )

    def read_spec(self, config: Mapping[str, Any]) -> PrefixSpec:
        return PrefixSpec(num_virtual_tokens=int(config["num_virtual_tokens"]))

    def save(
        self, folder: Path, spec: PrefixSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        ordered = [parameters[one.site, one.name] for one in self.layout(spec, sites).parameters]
        write_folder(folder, {STORED: torch.cat(ordered, dim=1)}, self.config(spec, (), sites, base))

    def read(
        self, folder: Path, spec: PrefixSpec, sites: Sequence[SiteShape]
    ) -> dict[tuple[str, str], Tensor]:
        parameters = self.layout(spec, sites).parameters
        widths = [one.shape[1] for one in parameters]
        found, shape = read_tensors(folder), [spec.num_virtual_tokens, sum(widths)]
        if found.keys() != {STORED} or list(found[STORED].shape) != shape:
            named = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
            raise AdapterError(f"{folder} does not fit: it has {named}, and the adapter is {STORED} {shape}")
        parts = found[STORED].split(widths, dim=1)
        return {(one.site, one.name): part for one, part in zip(parameters, parts, strict=True)}
