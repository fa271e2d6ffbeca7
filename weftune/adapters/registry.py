"""The registry of adapter kinds, through which the rest of the package finds a kind by its name."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from weftune.adapters.folder import read_config
from weftune.adapters.kinds import BROKEN, KINDS, BrokenKind, kind_in_config
from weftune.adapters.plain import PlainKind
from weftune.adapters.vector import VectorLayout
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError, SpecError

OWN_PACKAGE = __name__.partition(".")[0]
LOADED_KINDS: dict[str, PlainKind] = {}
"""Maps the name of each adapter kind that has been requested so far to its object."""


def get_kind(name: str) -> PlainKind:
    if name in LOADED_KINDS:
        return LOADED_KINDS[name]
    if name in BROKEN:
        raise SpecError(f"adapter.kind: {BROKEN[name]}")
    if name not in KINDS:
        raise SpecError(f"adapter.kind: there is no kind {name!r}; known: {', '.join(KINDS)}")
    module, _, kind = KINDS[name].implementation.partition(":")
    package = module.partition(".")[0]
    try:
        return LOADED_KINDS.setdefault(name, getattr(import_module(module), kind)())
    except Exception as error:
        if package == OWN_PACKAGE:
            raise
        raise SpecError(f"adapter.kind: {BrokenKind(name, package, error)}") from error


_KNOWN_LAYOUTS: deque[tuple[Any, Sequence[SiteShape], VectorLayout]] = deque(maxlen=16)


def adapter_layout(spec: Any, sites: Sequence[SiteShape]) -> VectorLayout:
    """Return the layout of an adapter's parameters in a flat vector, on a base with the linears `sites`.
    Recent layouts are cached, since a layout has hundreds of parameters and thousands of jobs may share
    it."""
    for known_spec, known_sites, layout in tuple(_KNOWN_LAYOUTS):
        if known_sites is sites and known_spec == spec:
            return layout
    layout = get_kind(spec.kind).layout(spec, sites)
    _KNOWN_LAYOUTS.append((spec, sites, layout))
    return layout


def kind_of_folder(folder: Path) -> PlainKind:
    """Return the kind of the adapter that is stored in an adapter folder."""
    config = read_config(folder)
    if (name := kind_in_config(config)) is not None:
        return get_kind(name)
    named = config.get("weftune_kind") or config.get("peft_type")
    if isinstance(named, str) and named in BROKEN:
        raise AdapterError(f"{folder} cannot be read: {BROKEN[named]}")
    raise AdapterError(f"{folder} holds a {named} adapter, a kind that Weftune does not know")
