"""YAML as plain values: which text is a number, where each key stands, and how much a file may hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from weftune.errors import SpecError
from weftune.jobs.spec.lines import parse_yaml, read_yaml


def values(text: str) -> Any:
    document = parse_yaml(text, "f.yaml")
    assert document.faults == []
    return document.values


def faults(text: str) -> list[str]:
    return [f"{one.location}: {one.sentence}" for one in parse_yaml(text, "f.yaml").faults]


def complaint(text: str) -> str:
    with pytest.raises(SpecError) as told:
        parse_yaml(text, "f.yaml")
    return str(told.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("TRUE", True), ("yes", "yes"), ("no", "no"), ("truely", "truely"),
        ("", None), ("~", None), ("null", None), ("Null", None), ("none", "none"), ("nulls", "nulls"),
        ("7", 7), ("-7", -7), ("+7", 7), ("1_000", 1000), ("010", 10), ("0x1F", 31), ("7a", "7a"),
        ("2e-4", 2e-4), ("1E3", 1000.0), (".5", 0.5), ("5.", 5.0), ("-1.5e+3", -1500.0), ("1.5x", "1.5x"),
        (".inf", math.inf), ("-.INF", -math.inf), ("2024-01-01", "2024-01-01"), ("1:30", "1:30"),
        ("'7'", "7"), ("0o7", "0o7"), ("<<", "<<"),
    ],
)  # fmt: skip
def test_a_word_is_what_yaml_1_2_has_it(text: str, value: Any) -> None:
    found = values(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def test_what_is_no_number_at_all_is_one_too() -> None:
    assert math.isnan(values("a: .NaN")["a"])


def test_every_key_and_item_has_its_line() -> None:
    document = parse_yaml("# first\na:\n  b: [1,\n    2]\nc:\n- 5\n- {d: 6}\n", "f.yaml")
    assert (document.file, document.values, document.faults) == (
        "f.yaml",
        {"a": {"b": [1, 2]}, "c": [5, {"d": 6}]},
        [],
    )
    assert document.lines == {
        (): 2,
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "b", 0): 3,
        ("a", "b", 1): 4,
        ("c",): 5,
        ("c", 0): 6,
        ("c", 1): 7,
        ("c", 1, "d"): 7,
    }
    empty = parse_yaml("# nothing\n", "f.yaml")
    assert (empty.values, empty.lines, empty.faults) == (None, {}, [])


def test_what_is_merged_in_gives_way_to_what_is_written_and_the_earlier_to_none() -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\n"
    assert values(text + "z: {<<: *x, b: 3}")["z"] == {"a": 1, "b": 3}
    assert values(text + "z: {b: 3, <<: *x}")["z"] == {"a": 1, "b": 3}
    assert values(text + "z: {<<: [*x, *y]}")["z"] == {"a": 1, "b": 1, "c": 2}
    assert values(text + "z: {<<: *y, d: 4, <<: *x}")["z"] == {"a": 1, "b": 2, "c": 2, "d": 4}
    assert values(text + "z: {<<: *x, d: 4, e: 5}")["z"] == {"a": 1, "b": 1, "d": 4, "e": 5}
    assert faults("z:\n  <<: [{a: 1}, 3]\n") == ["f.yaml:2 z: << takes a mapping, or a list of mappings"]


def test_an_alias_may_be_used_as_often_as_one_likes_but_not_inside_itself() -> None:
    assert values("a: &a [1]\nb: [*a, *a]\nc: {d: *a}")["b"] == [[1], [1]]
    assert faults("a: &a\n  b: *a\n  c: 1\n") == [
        "f.yaml:2 a.b: an alias stands inside the thing it names; remove it"
    ]
    assert parse_yaml("a: &a {b: *a, c: 1}", "f").values == {"a": {"b": None, "c": 1}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3 a: is written twice, first on line 1; remove one"),
        ("a:\n  ? [x]\n  : 1\n  b: 2\n", "f.yaml:2 a: a key must be plain text"),
        ("\na: !!set x\n", "f.yaml:2 a: the tag tag:yaml.org,2002:set means nothing here; remove it"),
        ("a: !!int x\n", "f.yaml:1 a: is a number that cannot be read"),
        ("a: !!float x\n", "f.yaml:1 a: is a number that cannot be read"),
        ('a: "\\ud800"\n', "f.yaml:1 a: holds half a surrogate pair, which is no text; remove it"),
        ('a: "x\\udfff"\n', "f.yaml:1 a: holds half a surrogate pair, which is no text; remove it"),
    ],
)
def test_what_means_nothing_is_told_at_its_line_and_the_rest_is_read(text: str, fault: str) -> None:
    assert faults(text) == [fault]
    assert faults(text + "\nz: [\n 1]\n") == [fault]
    assert parse_yaml(text + "\nz: 9\n", "f.yaml").values["z"] == 9


def test_after_a_key_that_cannot_be_one_and_one_that_is_written_twice_the_others_are_read() -> None:
    assert parse_yaml("? [x]\n: 1\na: 1\na: 2\nb: 3\n", "f.yaml").values == {"a": 1, "b": 3}


def test_letters_beside_the_surrogates_are_text() -> None:
    assert values('a: "\\ud7ff\\ue000"')["a"] == "\ud7ff\ue000"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\n\tb: 2\n", "f.yaml:2: is not YAML: a tab stands where YAML wants spaces; indent with spaces"),
        (
            "a: b: c\n",
            "f.yaml:1: is not YAML: a colon stands where no key can be; put the text in quotes, or",
        ),
        ("a: [1\n", "f.yaml:2: is not YAML: expected ',' or ']'"),
        ("a: *x\n", "f.yaml:1: is not YAML: found undefined alias 'x'"),
        ("a: \x01\n", "f.yaml: is not YAML: unacceptable character #x0001"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: is not YAML: but found another document"),
    ],
)
def test_what_is_no_yaml_is_one_line_that_says_where(text: str, sentence: str) -> None:
    assert complaint(text).startswith(sentence)
    assert "\n" not in complaint(text)


def flow(depth: int) -> str:
    return "[" * depth + "]" * depth


def block(depth: int) -> str:
    return "- " * depth + "a"


def test_lists_stand_inside_one_another_fifty_deep_and_no_deeper() -> None:
    assert values(flow(50))
    assert values(block(49))
    assert values("a:\n" + "".join(f"- {flow(40)}\n" for _ in range(3))), "depth is left again"
    for text in (flow(51), block(50), "{a: " * 51 + "}" * 51, "- a\n" * 30 + block(50)):
        assert complaint(text) == "f.yaml: is nested too deeply"


def counted(count: int) -> str:
    """A file of so many values once aliases are followed: a list of lists of 99 items each, and of items."""
    lists, items = divmod(count - 1, 100)
    return f"- &a [{', '.join(['1'] * 99)}]\n" + "- *a\n" * (lists - 1) + "- 1\n" * items


def test_a_file_holds_fifty_thousand_values_and_no_more() -> None:
    assert len(values(counted(50_000))) == 499 + 99
    assert complaint(counted(50_001)) == "f.yaml: holds more than 50000 values once aliases are followed"


def test_a_file_has_a_million_characters_and_no_more() -> None:
    text = "a: |\n " + "x" * (1_000_000 - 6)
    assert len(values(text)["a"]) == 1_000_000 - 6
    assert complaint(text + "x") == "f.yaml: has more than 1,000,000 characters; write shorter files"


def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    for path, sentence in (
        (tmp_path / "no.yaml", f"there is no file {tmp_path / 'no.yaml'}"),
        (tmp_path, f"{tmp_path} is a folder; name the YAML file in it"),
        (tmp_path / ("x" * 300), f"cannot read {tmp_path / ('x' * 300)}: File name too long"),
    ):
        with pytest.raises(SpecError) as told:
            read_yaml(path)
        assert str(told.value) == sentence
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    with pytest.raises(SpecError, match=r"^latin\.yaml: is not UTF-8 text \(byte 6\)$"):
        read_yaml(tmp_path / "latin.yaml")


def test_a_mark_before_the_first_letter_is_no_part_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "f.yaml").values == {"a": 1}
