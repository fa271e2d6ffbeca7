"""Error messages from pydantic's findings: one per value, even if its type is a union."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from weftune.jobs.spec.keys import unknown_key
from weftune.jobs.spec.near import nearest
from weftune.jobs.spec.places import ABSENT, Fault, Loc, step_into
from weftune.jobs.spec.show import show

EXPECTED: Mapping[Loc, str] = {
    ("adapter",): "a mapping such as {kind: lora, rank: 16}",
    ("adapter", "targets"): "all-linear, a regular expression, or a list of the endings of module paths",
    ("adapter", "layers"): "numbers such as [0, 5], or a range such as 16-31",
    ("adapter", "target_parameters"): "a list such as [mlp.experts.gate_up_proj, mlp.experts.down_proj]",
    ("adapter", "trainable_token_indices"): "a list of the ids of tokens such as [32000, 32001]",
    ("adapter", "init_from"): "an adapter folder, or {job: NAME} for the adapter of another job",
    ("adapter", "rank_pattern"): "a mapping from a module path's ending to a rank",
    ("adapter", "alpha_pattern"): "a mapping from a module path's ending to an alpha",
    ("betas",): "a list of two numbers such as [0.9, 0.999]",
    ("data",): "a path, a list of {path, weight}, or a mapping such as {path: rows.jsonl}",
    ("data", "path"): "a path, or a list of {path, weight}",
    ("data", "columns"): "a mapping such as {prompt: question}",
    ("eval",): "a mapping such as {fraction: 0.1} or {path: held_out.jsonl}",
    ("early_stop",): "a number of evaluations, or a mapping such as {patience: 3, min_delta: 0.01}",
    ("sweep",): "a mapping such as {over: {learning_rate: [1e-4, 3e-4]}}",
    ("sweep", "over"): "a mapping such as {learning_rate: [1e-4, 3e-4], adapter.rank: [8, 64]}",
    ("sweep", "halving"): "a mapping such as {at: [0.1, 0.3], keep: 0.33}",
    ("sweep", "halving", "at"): "a list of shares of the steps such as [0.1, 0.3]",
    ("base",): "a Hub id, a folder, a GGUF file, demo, or a mapping such as {model: demo, dtype: float32}",
}
"""Location → description of the allowed values, where the type alone would describe them badly."""

KINDS: Mapping[str, str] = {
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dataclass_type": "a mapping",
    "mapping_type": "a mapping",
    "tuple_type": "a list",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
}


INNER: Mapping[Loc, str] = {
    ("data", "path"): "source",
    ("adapter", "init_from"): "init_from",
    ("sweep", "halving"): "halving",
}
"""Location → name of the section there, for sections inside of others."""

MISSING = ("missing", "missing_argument")


@cache
def _adapter_of(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)


def build(record: type, values: Mapping[str, Any], section: str = "job", root: Loc = ()) -> Any | list[Fault]:
    """Create `record` from `values`, or return the faults in them; `root` is their location in the job."""
    try:
        return _adapter_of(record).validate_python(values)
    except ValidationError as error:
        return list(_faults(error, values, section, root))


def _faults(error: ValidationError, values: Mapping[str, Any], section: str, root: Loc) -> Iterator[Fault]:
    found: dict[Loc, ErrorDetails] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_way(item, values), item)
    # A union reports an error for each member: the one that lies deeper inside is the one meant.
    around = {loc[:length] for loc in found for length in range(len(loc))}
    for loc, item in found.items():
        if loc not in around:
            yield _fault(root + loc, item, section)


def _way(item: ErrorDetails, values: Any) -> Loc:
    """Return pydantic's location without the names of union members, which do not occur in the values."""
    loc = item["loc"]
    way: list[str | int] = []
    for index, part in enumerate(loc):
        below = step_into(values, part)
        is_missing_key = index == len(loc) - 1 and item["type"] in MISSING
        if below is not ABSENT:
            values = below
        elif not is_missing_key:
            continue
        way.append(part)
    return tuple(way)


def _fault(loc: Loc, item: ErrorDetails, section: str) -> Fault:
    kind, value = item["type"], item["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return Fault(loc, unknown_key(section_of(loc[:-1], section), str(loc[-1])))
    if kind in MISSING:
        return Fault(loc[:-1], f"needs {_required(str(loc[-1]))}")
    if kind == "literal_error":
        return Fault(loc, _choice(item["ctx"]["expected"], value))
    expected = EXPECTED.get(loc) or KINDS.get(kind)
    if expected is None:
        return Fault(loc, f"cannot be used: {item['msg']}")
    hint = "; write it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
    return Fault(loc, f"must be {expected}, got {show(value)}{hint}")


def section_of(loc: Loc, section: str = "job") -> str:
    """Return the section of the spec whose keys are at `loc`."""
    if not loc:
        return section
    return INNER.get(loc[:2], str(loc[0]))


def _required(key: str) -> str:
    return {
        "name": "a name",
        "data": "data: a path, or a list of {path, weight}",
        "path": "a path",
        "model": "model: a Hub id, a folder, a GGUF file, or demo",
        "over": f"over: {EXPECTED[('sweep', 'over')]}",
        "at": f"at: {EXPECTED[('sweep', 'halving', 'at')]}",
        "keep": "keep: the share that goes on, such as 0.33",
        "job": "job: the name of another job",
        "patience": "patience: how many evaluations to wait",
    }.get(key, key)


def _choice(expected: str, value: Any) -> str:
    return choice_sentence(re.findall(r"'([^']*)'", expected), value)


def choice_sentence(choices: Sequence[str], value: Any) -> str:
    """Return the error message for a value that is none of the choices."""
    listed = ", ".join(choices[:-1]) + " or " + choices[-1] if len(choices) > 1 else choices[0]
    near = nearest(str(value).lower(), choices)
    hint = f"; did you mean {near}?" if near else "; there is no other yet" if len(choices) == 1 else ""
    return f"must be {listed}, got {show(value)}{hint}"
