"""Prompt tuning: virtual tokens before every sample. They are initialised as in PEFT: drawn from a normal
distribution, or copied from the base's embeddings of random tokens or of a text.

`Banks` inserts them at the positions that `Samples.add_prefix` leaves free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weftune.adapters.files import peft_config
from weftune.adapters.kind import NewAdapter
from weftune.adapters.plain import PlainKind
from weftune.adapters.prompt.spec import PromptSpec
from weftune.adapters.target import embedding_path
from weftune.core.shapes import EMBED_SCALE, SiteShape
from weftune.ops.draw import draw_integers, fill_normal


class Prompt(PlainKind):
    name = "prompt"

    def start(self, new_adapter: NewAdapter) -> None:
        for (site, name), value in new_adapter.parameters.items():
            fill_normal(value, new_adapter.key(site, name))

    def initialise(self, new_adapter: NewAdapter, sites: Sequence[SiteShape]) -> None:
        spec: PromptSpec = new_adapter.adapter.spec
        if spec.init == "random" or spec.init_from is not None:
            PlainKind.initialise(self, new_adapter, sites)
            return
        path = embedding_path(sites)
        assert path is not None, "the first layer is among the sites of a whole base"
        for (site, name), value in new_adapter.parameters.items():
            weight_VD, scale = new_adapter.weight_at(path), new_adapter.weight_at(f"{path}.{EMBED_SCALE}")
            ids = _repeat_tokens(new_adapter.adapter.start_tokens, len(value))
            if spec.init == "vocabulary":
                ids = draw_integers(len(value), len(weight_VD), new_adapter.key(site, name))
            value.copy_(weight_VD[ids.to(weight_VD.device)] * scale.to(weight_VD))

    def stored_name(self, site: str, name: str) -> str:
        return "prompt_embeddings"

    def config(
        self, spec: PromptSpec, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str
    ) -> Any:
        ((_, width),) = spec.shapes_outside_linears(sites).values()
        return peft_config(
            "PromptTuningConfig",
            base,
            num_virtual_tokens=spec.num_virtual_tokens,
            token_dim=width,
            num_transformer_submodules=1,
        )

    def read_spec(self, config: Mapping[str, Any]) -> PromptSpec:
        return PromptSpec(num_virtual_tokens=int(config["num_virtual_tokens"]))


def _repeat_tokens(tokens: Sequence[int], count: int) -> Tensor:
    """Return the first `count` of the tokens, which are repeated if there are fewer. Empty if there are no
    tokens."""
    return torch.tensor([tokens[at % len(tokens)] for at in range(count if tokens else 0)], dtype=torch.int64)
