"""The registry of adapter kinds. A site never names a kind: it asks here."""

from __future__ import annotations

from pathlib import Path

from weftune.adapters.folder import read_config
from weftune.adapters.kind import Kind
from weftune.adapters.lora.apply import Lora
from weftune.errors import AdapterError, SpecError

BY_NAME: dict[str, Kind] = {"lora": Lora()}


def kind_named(name: str) -> Kind:
    if name in BY_NAME:
        return BY_NAME[name]
    raise SpecError(f"adapter.kind: there is no kind {name!r}; known: {', '.join(BY_NAME)}")


def kind_of(folder: Path) -> Kind:
    """The kind of the adapter in a PEFT folder."""
    peft_type = read_config(folder).get("peft_type")
    if peft_type == "LORA":
        return kind_named("lora")
    raise AdapterError(f"{folder} holds a {peft_type} adapter, a kind that Weftune does not know")
