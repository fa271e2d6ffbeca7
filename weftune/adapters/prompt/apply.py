"""Prompt tuning: rows before every sample, drawn from a normal distribution as PEFT draws them.

What puts them there is `Banks`; samples are laid out with room for them (`Samples.behind`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weftune.adapters.files import peft
from weftune.adapters.kind import NewAdapter
from weftune.adapters.plain_kind import PlainKind
from weftune.adapters.prompt.spec import PromptSpec
from weftune.core.shapes import SiteShape
from weftune.ops.draw import fill_normal


class Prompt(PlainKind):
    name = "prompt"

    def start(self, new: NewAdapter) -> None:
        for place, value in new.parameters.items():
            fill_normal(value, new.key(*place))

    def stored_name(self, site: str, name: str) -> str:
        return "prompt_embeddings"

    def config(self, spec: PromptSpec, targeted: Sequence[str], sites: Sequence[SiteShape], base: str) -> Any:
        ((_, width),) = spec.shapes_outside(sites).values()
        return peft().PromptTuningConfig(
            num_virtual_tokens=spec.num_virtual_tokens,
            token_dim=width,
            num_transformer_submodules=1,
            task_type="CAUSAL_LM",
            inference_mode=True,
            base_model_name_or_path=base,
        )

    def read_spec(self, config: Mapping[str, Any]) -> PromptSpec:
        return PromptSpec(num_virtual_tokens=int(config["num_virtual_tokens"]))
