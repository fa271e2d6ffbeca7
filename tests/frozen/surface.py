"""What users rely on, as data: commands with their options, names from Python, keys of a jobs file.

`python -m tests.frozen.surface` records it anew in surface.json; nothing may vanish from it unannounced.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

FILE = Path(__file__).parent / "surface.json"


def surface() -> dict[str, Any]:
    import weftune
    from weftune.cli.main import app

    return {
        "commands": commands(app),
        "python": {name: signature(getattr(weftune, name)) for name in dir(weftune) if name[0] != "_"},
        "keys": sorted(keys(weftune.JobSpec)),
    }


def commands(app: Any) -> dict[str, list[str]]:
    import typer.main

    group: Any = typer.main.get_command(app)
    return {
        verb: sorted(option for one in command.params for option in one.opts)
        for verb, command in group.commands.items()
    }


def signature(value: Any) -> str:
    try:
        return ", ".join(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return ""


def keys(kind: Any, before: str = "") -> set[str]:
    """Of a record and of those that it holds, with dots."""
    found: set[str] = set()
    for one in fields(kind):
        found.add(before + one.name)
        for held in (kind_in for kind_in in parts(get_type_hints(kind)[one.name]) if is_dataclass(kind_in)):
            found |= keys(held, f"{before}{one.name}.")
    return found


def parts(hint: Any) -> list[Any]:
    """What a value may be; of an adapter any kind."""
    from weftune.adapters.kinds import KINDS, AdapterSpec

    kinds = KINDS.values() if hint is AdapterSpec else ()
    return [hint, *kinds, *(deeper for one in get_args(hint) for deeper in parts(one))]


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
