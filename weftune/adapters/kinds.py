"""The spec class of every adapter kind, by the kind's name. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

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
"""Base class of the specs of all adapter kinds."""

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


@dataclass(frozen=True, slots=True)
class BrokenKind:
    """An adapter kind, defined by another package, that cannot be imported."""

    name: str
    package: str
    error: Exception

    @property
    def problem(self) -> str:
        reason = (str(self.error).strip().splitlines() or [""])[0]
        return f"the package {self.package} cannot be used: {type(self.error).__name__}: {reason}"

    @property
    def repair_command(self) -> str:
        return f"pip install --upgrade {self.package}"

    def __str__(self) -> str:
        remedy = f"repair it, or try {self.repair_command}"
        return f"{self.name} is a kind that does not work: {self.problem}; {remedy}"


BROKEN: dict[str, BrokenKind] = {}
"""Maps the name of each adapter kind that cannot be imported to its record with the error."""


def _load_other_kinds() -> None:
    """Add the spec classes of adapter kinds that other packages define. They cannot replace Weftune's own
    kinds, and a package that fails to import does not affect others."""
    for entry_point in entry_points(group="weftune.kinds"):
        if entry_point.name in KINDS:
            continue
        try:
            KINDS[entry_point.name] = _load_spec(entry_point)
        except Exception as error:  # the code of other packages may raise anything
            package = entry_point.dist.name if entry_point.dist is not None else entry_point.module
            BROKEN[entry_point.name] = BrokenKind(entry_point.name, package, error)


def _load_spec(entry_point: EntryPoint) -> type[AdapterSpec]:
    spec = entry_point.load()
    if not (isinstance(spec, type) and issubclass(spec, TargetSpec)):
        raise TypeError(f"{entry_point.value} is no class that extends TargetSpec")
    get_type_hints(spec)  # they validate jobs files and messages
    return spec


_load_other_kinds()


def kind_in_config(config: Mapping[str, Any]) -> str | None:
    """Return the name of the adapter kind that an adapter folder's config describes, or None if the kind is
    unknown."""
    if "weftune_kind" in config:
        own = config["weftune_kind"]
        return own if isinstance(own, str) and own in KINDS else None
    peft_type = config.get("peft_type")
    if peft_type == LoraSpec.peft_type:
        return "dora" if config.get("use_dora") else "lora"
    return next((name for name, spec in KINDS.items() if peft_type and spec.peft_type == peft_type), None)
