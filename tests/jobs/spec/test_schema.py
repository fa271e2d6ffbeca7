"""pydantic's findings as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from weftune.jobs.spec.layer import Fault
from weftune.jobs.spec.schema import build, find_section


@dataclass(frozen=True)
class Inner:
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    size: int


@dataclass(frozen=True)
class Small:
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str
    mode: Literal["fast", "slow", "auto"] = "auto"
    kind: Literal["one"] = "one"
    side: Literal["left", "right"] = "left"
    ratio: float = 0.5
    tags: str | tuple[str, ...] = ()
    inner: Inner | Mapping[str, int] | None = None
    flag: bool = False
    other: bytes = b""


def faults(**values: Any) -> list[tuple[str, str]]:
    made = build(Small, values)
    assert isinstance(made, list)
    return [(".".join(map(str, fault.loc)), fault.sentence) for fault in made]


def test_values_that_fit_are_the_record() -> None:
    assert build(Small, {"name": "a", "tags": ["x"]}) == Small("a", tags=("x",))


@pytest.mark.parametrize(
    ("values", "place", "sentence"),
    [
        ({"mode": "quick"}, "mode", 'must be fast, slow or auto, got "quick"'),
        ({"mode": "SLOW"}, "mode", 'must be fast, slow or auto, got "SLOW"; did you mean slow?'),
        ({"side": "up"}, "side", 'must be left or right, got "up"'),
        ({"kind": "two"}, "kind", 'must be one, got "two"; there is no other yet'),
        ({"kind": "On"}, "kind", 'must be one, got "On"; did you mean one?'),
        ({"name": 7}, "name", "must be text, got 7; write it in quotes"),
        ({"name": 1.5}, "name", "must be text, got 1.5; write it in quotes"),
        ({"name": ["a"]}, "name", "must be text, got a list"),
        ({"ratio": "much"}, "ratio", 'must be a number, got "much"'),
        ({"ratio": [1]}, "ratio", "must be a number, got a list"),
        ({"flag": "perhaps"}, "flag", 'must be true or false, got "perhaps"'),
        ({"flag": 3}, "flag", "must be true or false, got 3"),
        ({"tags": ["x", 3]}, "tags.1", "must be text, got 3; write it in quotes"),
        ({"inner": {"size": "x"}}, "inner.size", 'must be a whole number, got "x"'),
        ({"inner": {"size": 1.5}}, "inner.size", "must be a whole number, got 1.5"),
        ({"inner": 7}, "inner", "must be a mapping, got 7"),
        ({"other": 7}, "other", "cannot be used: Input should be a valid bytes"),
    ],
)
def test_each_wrong_value_is_one_sentence_at_its_place(values: dict, place: str, sentence: str) -> None:
    assert faults(**{"name": "a", **values}) == [(place, sentence)]


def test_what_is_missing_is_told_of_what_lacks_it() -> None:
    assert faults() == [("", "needs a name")]
    made = build(Small, {}, "base", ("base",))
    assert made == [Fault(("base",), "needs a name")]


def test_an_unknown_key_is_told_by_its_section() -> None:
    assert faults(name="a", sede=1) == [("sede", "is not a key of a job; did you mean seed?")]
    made = build(Small, {"name": "a", "modle": 1}, "base", ("base",))
    assert made == [Fault(("base", "modle"), "is not a key of base; did you mean model?")]


def test_a_section_is_named_by_the_way_to_it() -> None:
    assert find_section(()) == "job"
    assert find_section((), "base") == "base"
    assert find_section(("adapter",)) == "adapter"
    assert find_section(("data",)) == "data"
    assert find_section(("data", "path", 0)) == "source"
    assert find_section(("eval", "path")) == "eval"
