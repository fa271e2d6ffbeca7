"""YAML files that Weftune itself writes, handled by libyaml if it is installed: with thousands of jobs, the
reader and writer in Python take longer than the jobs' training."""

from __future__ import annotations

import re
from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
LONGEST = 1 << 16
MOST_BRACKETS = 200
NESTED = re.compile(r"^[ \t?:-]{100}", re.MULTILINE)
"""Beginning of a deeply indented line."""


def load_yaml(text: str) -> Any:
    """Return plain values. Deeply nested text is left to Python's reader, which raises RecursionError:
    libyaml accepts it, and code that walks through the values would fail later."""
    return yaml.load(text, Loader=_LOADER if _is_shallow(text) else yaml.SafeLoader)


def dump_yaml(values: Any) -> bytes:
    """Return plain values as YAML, with keys in their own order."""
    text: str = yaml.dump(values, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text.encode()


def _is_shallow(text: str) -> bool:
    brackets = text.count("[") + text.count("{")
    return len(text) <= LONGEST and brackets <= MOST_BRACKETS and NESTED.search(text) is None
