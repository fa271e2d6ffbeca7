"""Rows as they are read: how deep they may be, and why one is bad, told to another process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weftune.data.row import BadRow, CommonBadRow, bad_row_from_json, is_deep_json, is_nested_deeply


def nest(levels: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"list": [0, value], "tuple": (value,), "object": {"a": 0, "b": value}}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "object"])
def test_a_value_may_be_64_levels_deep_and_no_deeper(kind):
    assert [is_nested_deeply(nest(levels, kind)) for levels in (0, 1, 2, 63, 64, 65, 300)] == [False] * 5 + [
        True
    ] * 2
    assert is_nested_deeply({"flat": 1, "deep": [nest(64, kind)]})
    assert not is_nested_deeply({"flat": [1, "a", None], "deep": [nest(62, kind)]})


def test_a_text_with_few_brackets_need_not_be_looked_into():
    for levels in (1, 64, 65, 80):
        for kind in ("list", "object"):
            text = json.dumps(nest(levels, kind))
            assert is_deep_json(text, json.loads(text)) == (levels > 64)
    wide = json.dumps([[]] * 100)
    assert not is_deep_json(wide, json.loads(wide))
    assert not is_deep_json("[" * 64, nest(65))


def test_why_a_row_is_bad_is_the_same_in_another_process():
    plain = bad_row_from_json(json.loads(json.dumps(BadRow("torn").to_json())))
    assert (type(plain), str(plain)) == (BadRow, "torn")
    common = CommonBadRow("too long", kind="length", remedy="cut it", needed_tokens=7)
    read = bad_row_from_json(json.loads(json.dumps(common.to_json())))
    assert isinstance(read, CommonBadRow)
    assert (str(read), read.kind, read.remedy, read.needed_tokens) == ("too long", "length", "cut it", 7)
    assert CommonBadRow("a", kind="b", remedy="c").needed_tokens == 0
