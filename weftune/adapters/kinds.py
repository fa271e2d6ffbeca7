"""The kinds of adapter by name, and the spec class of each. No torch here."""

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
"""The spec of any adapter."""

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
    """A kind from another package whose code fails when it is imported."""

    name: str
    package: str
    error: Exception

    @property
    def finding(self) -> str:
        reason = (str(self.error).strip().splitlines() or [""])[0]
        return f"the package {self.package} cannot be used: {type(self.error).__name__}: {reason}"

    @property
    def mend(self) -> str:
        return f"pip install --upgrade {self.package}"

    def __str__(self) -> str:
        return f"{self.name} is a kind that does not work: {self.finding}; repair it, or try {self.mend}"


BROKEN: dict[str, BrokenKind] = {}
"""Name → kind that failed to import when all kinds were collected."""


def _gather_others() -> None:
    """Add the kinds of other packages, each as its spec class. Weftune's own kinds keep their names, and a
    package that fails does not affect the others."""
    for point in entry_points(group="weftune.kinds"):
        if point.name in KINDS:
            continue
        try:
            KINDS[point.name] = _loaded(point)
        except Exception as error:  # the code of other packages may raise anything
            package = point.dist.name if point.dist is not None else point.module
            BROKEN[point.name] = BrokenKind(point.name, package, error)


def _loaded(point: EntryPoint) -> type[AdapterSpec]:
    spec = point.load()
    if not (isinstance(spec, type) and issubclass(spec, TargetSpec)):
        raise TypeError(f"{point.value} is no class that extends TargetSpec")
    get_type_hints(spec)  # they validate jobs files and messages
    return spec


_gather_others()


def kind_in(config: Mapping[str, Any]) -> str | None:
    """Return the kind of the adapter with this config, or None if the kind is unknown."""
    if "weftune_kind" in config:
        own = config["weftune_kind"]
        return own if isinstance(own, str) and own in KINDS else None
    peft_type = config.get("peft_type")
    if peft_type == LoraSpec.peft_type:
        return "dora" if config.get("use_dora") else "lora"
    return next((name for name, spec in KINDS.items() if peft_type and spec.peft_type == peft_type), None)
