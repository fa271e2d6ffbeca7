"""Validation of the values in a job, with one error message per invalid value: numbers out of range, and
errors that pydantic reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from weftune.adapters.kinds import KINDS as ADAPTER_KINDS
from weftune.base.spec import RopeScaling
from weftune.core.bounds import Bound, format_value
from weftune.jobs.spec.keys import JobKeys, nearest_word, unknown_key
from weftune.jobs.spec.layer import ABSENT, Fault, Loc, child_value
from weftune.jobs.sweeps.spec import SweepSpec
from weftune.objectives.spec import OBJECTIVES

EXPECTED: Mapping[Loc, str] = {
    ("adapter",): "a mapping such as {kind: lora, rank: 16}",
    ("adapter", "targets"): "all-linear, a regular expression, or a list of the endings of module paths",
    ("adapter", "layers"): "numbers such as [0, 5], or a range such as 16-31",
    ("adapter", "target_parameters"): "a list such as [mlp.experts.gate_up_proj, mlp.experts.down_proj]",
    ("adapter", "trainable_token_indices"): "a list of the ids of tokens such as [32000, 32001]",
    ("adapter", "init_from"): "an adapter folder, or {job: NAME} for the adapter of another job",
    ("adapter", "rank_pattern"): "a mapping from a module path's ending to a rank",
    ("adapter", "alpha_pattern"): "a mapping from a module path's ending to an alpha",
    ("objective",): "a name such as dpo, or a mapping such as {kind: dpo, beta: 0.1}",
    ("betas",): "a list of two numbers such as [0.9, 0.999]",
    ("data",): "a path, a list of {path, weight}, or a mapping such as {path: rows.jsonl}",
    ("data", "path"): "a path, or a list of {path, weight}",
    ("data", "columns"): "a mapping such as {prompt: question}",
    ("eval",): "a mapping such as {fraction: 0.1} or {path: held_out.jsonl}",
    ("eval", "generate"): "a mapping such as {prompts: 8, max_new_tokens: 64}",
    ("eval", "metric"): "exact_match, or a Python function as FILE.py:FUNCTION",
    ("early_stop",): "a number of evaluations, or a mapping such as {patience: 3, min_delta: 0.01}",
    ("sweep",): "a mapping such as {over: {learning_rate: [1e-4, 3e-4]}}",
    ("sweep", "over"): "a mapping such as {learning_rate: [1e-4, 3e-4], adapter.rank: [8, 64]}",
    ("sweep", "halving"): "a mapping such as {at: [0.1, 0.3], keep: 0.33}",
    ("sweep", "halving", "at"): "a list of shares of the steps such as [0.1, 0.3]",
    ("base",): "a Hub id, a folder, a GGUF file, demo, or a mapping such as {model: demo, dtype: float32}",
    ("base", "rope_scaling"): "a mapping such as {rope_type: yarn, factor: 4}",
}
"""Maps the locations of some values to descriptions of what is allowed there, for error messages. Only values
whose types give unclear messages are listed."""

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
    ("eval", "generate"): "generate",
    ("sweep", "halving"): "halving",
    ("base", "rope_scaling"): "rope_scaling",
}
"""Maps the location of each section of a job that is inside another section to the section's name."""

REQUIRED: Mapping[str, str] = {
    "name": "a name",
    "data": "data: a path, or a list of {path, weight}",
    "path": "a path",
    "model": "model: a Hub id, a folder, a GGUF file, or demo",
    "over": f"over: {EXPECTED['sweep', 'over']}",
    "at": f"at: {EXPECTED['sweep', 'halving', 'at']}",
    "keep": "keep: the share of trials that continues, such as 0.33",
    "job": "job: the name of another job",
    "rope_type": "rope_type: linear, yarn or llama3",
    "factor": "factor: how many times longer the context becomes, such as 4",
    "patience": "patience: how many evaluations to wait",
}
"""Maps each required key to the description of its value in the error message for a missing key."""
MISSING = ("missing", "missing_argument")
ANY = "*"
"""Wildcard in patterns of locations, which matches every key of a mapping and every item of a list."""


@cache
def _type_adapter(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)


def build(record: type, values: Mapping[str, Any], section: str = "job", root: Loc = ()) -> Any | list[Fault]:
    """Create the dataclass `record` from `values`, or return the errors in them. `root` is the location of
    the values in the job."""
    try:
        return _type_adapter(record).validate_python(values)
    except ValidationError as error:
        return list(_validation_faults(error, values, section, root))


def _validation_faults(
    error: ValidationError, values: Mapping[str, Any], section: str, root: Loc
) -> Iterator[Fault]:
    found: dict[Loc, ErrorDetails] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_error_location(item, values), item)
    # A union reports an error for each member: the one that lies deeper inside is the one meant.
    around = {loc[:length] for loc in found for length in range(len(loc))}
    for loc, item in found.items():
        if loc not in around:
            yield _validation_fault(root + loc, item, section)


def _error_location(item: ErrorDetails, values: Any) -> Loc:
    """Return the location of an error that pydantic reports, without the names of union members, which are
    not keys of the values."""
    loc = item["loc"]
    found: list[str | int] = []
    for index, part in enumerate(loc):
        below = child_value(values, part)
        is_missing_key = index == len(loc) - 1 and item["type"] in MISSING
        if below is not ABSENT:
            values = below
        elif not is_missing_key:
            continue
        found.append(part)
    return tuple(found)


def _validation_fault(location: Loc, item: ErrorDetails, section: str) -> Fault:
    kind, value = item["type"], item["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return Fault(location, unknown_key(find_section(location[:-1], section), str(location[-1])))
    if kind in MISSING:
        return Fault(location[:-1], f"needs {REQUIRED.get(str(location[-1]), location[-1])}")
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return Fault(location, choice_sentence(choices, value))
    expected = EXPECTED.get(location) or KINDS.get(kind)
    if expected is None:
        return Fault(location, f"cannot be used: {item['msg']}")
    hint = "; write it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
    return Fault(location, f"must be {expected}, got {format_value(value)}{hint}")


def find_section(location: Loc, section: str = "job") -> str:
    """Return the name of the section of a job, such as `adapter`, whose keys are at `location`."""
    if not location:
        return section
    return INNER.get(location[:2], str(location[0]))


def choice_sentence(choices: Sequence[str], value: Any) -> str:
    """Return the error message for a value that is not one of the allowed choices."""
    listed = ", ".join(choices[:-1]) + " or " + choices[-1] if len(choices) > 1 else choices[0]
    near = nearest_word(str(value).lower(), choices)
    hint = f"; did you mean {near}?" if near else "; there is no other yet" if len(choices) == 1 else ""
    return f"must be {listed}, got {format_value(value)}{hint}"


# -- numbers --------------------------------------------------------------------------------------------


def _type_bounds(type_hint: Any, location: Loc) -> Iterator[tuple[Loc, Bound]]:
    """Yield the location and the allowed range of every number in a type whose annotation contains a
    `Bound`."""
    if is_dataclass(type_hint) or is_typeddict(type_hint):
        for name, below in get_type_hints(type_hint, include_extras=True).items():
            yield from _type_bounds(below, (*location, name))
    elif get_origin(type_hint) is Annotated:
        kinds = get_args(type_hint.__origin__) or (type_hint.__origin__,)
        whole, allows_none = int in kinds, NoneType in kinds
        yield from (
            (location, replace(one, is_integer=whole, allows_none=allows_none))
            for one in type_hint.__metadata__
        )
    else:
        is_same = get_origin(type_hint) in (Union, UnionType, Required)
        for below in get_args(type_hint):
            yield from _type_bounds(below, location if is_same else (*location, ANY))


BOUNDS: Mapping[Loc, Bound] = {
    **{loc: bound for kind in ADAPTER_KINDS.values() for loc, bound in _type_bounds(kind, ("adapter",))},
    **{loc: bound for spec in OBJECTIVES.values() for loc, bound in _type_bounds(spec, ("objective",))},
    **dict(_type_bounds(JobKeys, ())),
    **dict(_type_bounds(SweepSpec, ("sweep",))),
    **dict(_type_bounds(RopeScaling, ("base", "rope_scaling"))),
}
"""Maps the location of every number in a job or in the specification of a base model to its allowed range."""


def bound_of_key(location: Loc) -> Bound | None:
    """Return the allowed range of the number at `location` in a job, or None if the value there is not a
    number."""
    for pattern, bound in BOUNDS.items():
        if len(pattern) == len(location) and all(
            part in (ANY, own) for part, own in zip(pattern, location, strict=True)
        ):
            return bound
    return None


def number_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    for pattern, bound in BOUNDS.items():
        for loc, value in _matching_values(values, pattern):
            if (sentence := bound.fault(value)) is not None:
                yield Fault(loc, sentence)


def _matching_values(value: Any, pattern: Loc, location: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Yield every value whose location matches `pattern`, with the location. Absent keys are skipped."""
    if len(location) == len(pattern):
        yield location, value
        return
    part = pattern[len(location)]
    if isinstance(value, Mapping):
        for key in value if part == ANY else [part] if part in value else []:
            yield from _matching_values(value[key], pattern, (*location, key))
    elif isinstance(value, list | tuple) and part == ANY:
        for index, item in enumerate(value):
            yield from _matching_values(item, pattern, (*location, index))
