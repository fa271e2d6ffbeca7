"""The kinds of adapter by name, and the record that holds what a job may say about each. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from weftune.adapters.bottleneck.spec import BottleneckSpec
from weftune.adapters.diff.spec import DiffSpec
from weftune.adapters.dora.spec import DoraSpec
from weftune.adapters.ia3.spec import Ia3Spec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.pissa.spec import PissaSpec
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.adapters.prompt.spec import PromptSpec
from weftune.adapters.target import TargetSpec
from weftune.adapters.vera.spec import VeraSpec

AdapterSpec = TargetSpec
"""Any adapter's spec."""

KINDS: dict[str, type[AdapterSpec]] = {
    "lora": LoraSpec,
    "dora": DoraSpec,
    "pissa": PissaSpec,
    "vera": VeraSpec,
    "ia3": Ia3Spec,
    "bottleneck": BottleneckSpec,
    "diff": DiffSpec,
    "prompt": PromptSpec,
    "prefix": PrefixSpec,
}


for _point in entry_points(group="weftune.kinds"):
    # Kinds of other packages, each the spec of its jobs; ours keep their names.
    KINDS.setdefault(_point.name, _point.load())


def kind_in(config: Mapping[str, Any]) -> str | None:
    """The kind of the adapter that has this config; None where there is no such."""
    if "weftune_kind" in config:
        own = config["weftune_kind"]
        return own if isinstance(own, str) and own in KINDS else None
    peft_type = config.get("peft_type")
    if peft_type == LoraSpec.peft_type:
        return "dora" if config.get("use_dora") else "lora"
    return next((name for name, spec in KINDS.items() if peft_type and spec.peft_type == peft_type), None)
