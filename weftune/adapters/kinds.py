"""The kinds of adapter by name, and the record that holds what a job may say about each. No torch here."""

from __future__ import annotations

from weftune.adapters.dora.spec import DoraSpec
from weftune.adapters.ia3.spec import Ia3Spec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.target import TargetSpec
from weftune.adapters.vera.spec import VeraSpec

AdapterSpec = TargetSpec
"""Any adapter's spec."""

KINDS: dict[str, type[AdapterSpec]] = {
    "lora": LoraSpec,
    "dora": DoraSpec,
    "vera": VeraSpec,
    "ia3": Ia3Spec,
}


def kind_in(peft_type: object, use_dora: bool = False) -> str | None:
    """The kind that PEFT's config calls so; None where there is no such."""
    if peft_type == LoraSpec.peft_type:
        return "dora" if use_dora else "lora"
    return next((name for name, spec in KINDS.items() if spec.peft_type == peft_type), None)
