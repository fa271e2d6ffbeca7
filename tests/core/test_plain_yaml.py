"""YAML by libyaml: the same values, and nothing nested so deeply that whoever walks through them fails."""

from __future__ import annotations

import pytest
import yaml

from weftune.core.plain_yaml import dump_yaml, load_yaml

VALUES = {
    "job": {"name": "ä-1", "rate": 2e-4, "big": 1e22, "text": "no", "empty": "", "none": None},
    "long": "word " * 60,
    "lines": "a\nb: c\n# d",
    "list": [1, [2.5, True], {"k": []}],
}


def test_what_is_written_is_read_back_by_either_reader() -> None:
    text = dump_yaml(VALUES).decode()
    assert load_yaml(text) == yaml.safe_load(text) == VALUES
    assert list(load_yaml(text)) == list(VALUES)


@pytest.mark.parametrize("text", ["- " * 8000 + "x", "[" * 3000 + "]" * 3000])
def test_what_is_nested_deeply_is_refused_as_before(text: str) -> None:
    with pytest.raises(RecursionError):
        load_yaml(text)


def test_what_is_no_yaml_is_said_alike() -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml("a: [1, 2")
