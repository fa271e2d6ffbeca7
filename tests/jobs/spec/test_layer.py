"""A job's keys laid over the defaults, every shorthand written out, and the place of each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weftune.data.spec import DataSpec, EvalSpec, Source
from weftune.errors import Mistake
from weftune.jobs.spec.layer import (
    ABSENT,
    Layer,
    Place,
    child_value,
    dotted_name,
    expand_shorthands,
    find_source_location,
    is_row_data,
    keys_from_keywords,
    merge_over_defaults,
    nest_source_locations,
    plain_values,
    sort_mistakes,
    source_locations,
)


def test_a_place_is_its_line_and_its_name_as_far_as_there_are_any() -> None:
    assert str(Place("jobs.yaml", 3, "jobs[0].seed")) == "jobs.yaml:3 jobs[0].seed"
    assert str(Place("jobs.yaml", 1, "")) == "jobs.yaml:1"
    assert str(Place("jobs.yaml", 0, "")) == "jobs.yaml"
    assert str(Place("", 0, "seed")) == "seed"


def test_a_way_is_written_with_dots_and_brackets() -> None:
    assert dotted_name(("jobs", 2, "adapter", "targets", 0)) == "jobs[2].adapter.targets[0]"
    assert dotted_name(()) == ""


def test_a_step_leads_into_mappings_and_lists_and_nowhere_else() -> None:
    assert child_value({"a": None}, "a") is None
    assert child_value({"a": 1}, "b") is ABSENT
    assert child_value([5, 6], 1) == 6
    assert child_value((5,), 0) == 5
    assert child_value([5, 6], 2) is ABSENT
    assert child_value([5, 6], "a") is ABSENT
    assert child_value("text", 0) is ABSENT


def test_what_has_no_line_of_its_own_stands_on_that_of_what_holds_it() -> None:
    tree = {"adapter": {"targets": ["q", "v"]}, "seed": 1}
    lines = {("jobs", 0): 3, ("jobs", 0, "adapter"): 4, ("jobs", 0, "adapter", "targets", 1): 6}
    found = source_locations(tree, ("jobs", 0), "jobs.yaml", lines)
    assert {str(place) for place in found.values()} == {
        "jobs.yaml:3 jobs[0]",
        "jobs.yaml:3 jobs[0].seed",
        "jobs.yaml:4 jobs[0].adapter",
        "jobs.yaml:4 jobs[0].adapter.targets",
        "jobs.yaml:4 jobs[0].adapter.targets[0]",
        "jobs.yaml:6 jobs[0].adapter.targets[1]",
    }
    assert str(find_source_location(found, ("adapter", "rank", "x"))) == "jobs.yaml:4 jobs[0].adapter"
    assert str(find_source_location(found, ("adapter", "rank"))) == "jobs.yaml:4 jobs[0].adapter"
    assert str(find_source_location(found, ("eval",))) == "jobs.yaml:3 jobs[0]"


def test_in_python_there_are_no_lines_and_rows_are_not_looked_into() -> None:
    found = source_locations({"data": {"rows": [{"text": "a"}] * 3}, "seed": 1})
    assert {str(place) for place in found.values()} == {"", "data", "data.rows", "seed"}


def test_what_a_shorthand_held_is_still_placed_where_it_was_written() -> None:
    found = source_locations({"data": ["a", "b"], "date": 1})
    nest_source_locations(found, ("data",), "path")
    assert str(found["data", "path"]) == "data"
    assert str(found["data", "path", 1]) == "data[1]"
    assert not any(loc[:2] == ("date", "path") for loc in found)


def test_mistakes_come_in_the_order_of_their_lines_each_once() -> None:
    late, early = Place("f", 9, "b").mistake("too large"), Place("f", 2, "a").mistake("too small")
    assert sort_mistakes([late, early, late]) == [
        Mistake("f:2 a", "too small"),
        Mistake("f:9 b", "too large"),
    ]


def layer(name: str, **values: Any) -> Layer:
    return expand_shorthands(values, source_locations(values, (name,)))


def place(found: Layer, *loc: str | int) -> str:
    return str(found.places[loc])


def test_a_path_alone_stands_for_a_mapping_with_that_path() -> None:
    assert layer("a", data="rows.jsonl").values == {"data": {"path": "rows.jsonl"}}
    assert place(layer("a", data="rows.jsonl"), "data", "path") == "a.data"


@pytest.mark.parametrize("listed", [list, tuple])
def test_of_a_list_of_paths_each_is_a_source_in_its_place(listed: type) -> None:
    found = layer("a", data=listed(["x", {"path": "y", "weight": 2}, "z"]))
    assert found.values["data"]["path"] == [{"path": "x"}, {"path": "y", "weight": 2}, {"path": "z"}]
    assert [place(found, "data", "path", index, "path") for index in range(3)] == [
        "a.data[0]",
        "a.data[1].path",
        "a.data[2]",
    ]
    inner = layer("a", data={"path": listed(["x"]), "limit": 3}, eval={"path": ["y"]})
    assert inner.values == {"data": {"path": [{"path": "x"}], "limit": 3}, "eval": {"path": ["y"]}}
    assert ("eval", "path", 0, "path") not in inner.places
    assert ("data", "limit", "path") not in inner.places


def test_a_number_alone_stands_for_the_patience_of_an_early_stop() -> None:
    found = layer("a", early_stop=3)
    assert found.values == {"early_stop": {"patience": 3}}
    assert place(found, "early_stop", "patience") == "a.early_stop"
    for other in (True, None, "soon", {"patience": 2}):
        assert layer("a", early_stop=other).values == {"early_stop": other}


def test_what_is_written_out_leaves_what_was_given_as_it_was() -> None:
    values = {"data": {"path": ["x"]}}
    places = source_locations(values)
    before = dict(places)
    expand_shorthands(values, places)
    assert values == {"data": {"path": ["x"]}}
    assert places == before


@pytest.mark.parametrize(
    ("below", "above", "whole"),
    [
        ({"epochs": 3}, {"steps": 7}, {"steps": 7}),
        ({"steps": 7}, {"epochs": 3}, {"epochs": 3}),
        ({"epochs": 3}, {"steps": None}, {"epochs": 3, "steps": None}),
        ({"steps": 7}, {"epochs": None}, {"steps": 7, "epochs": None}),
        ({"eval": {"path": "x"}, "seed": 1}, {"eval": {"fraction": 1}}, {"eval": {"fraction": 1}, "seed": 1}),
        ({"eval": {"fraction": 0.1}}, {"eval": {"path": "x"}}, {"eval": {"path": "x"}}),
        ({"data": {"path": "x"}}, {"data": {"fraction": 1}}, {"data": {"path": "x", "fraction": 1}}),
        ({"adapter": {"rank": 4, "seed": 8}}, {"adapter": {"rank": 2}}, {"adapter": {"rank": 2, "seed": 8}}),
        ({"adapter": {"rank": 4}}, {"adapter": None}, {"adapter": None}),
        ({"eval": None}, {"eval": {"path": "x"}}, {"eval": {"path": "x"}}),
        ({"betas": [1, 2]}, {"betas": [3]}, {"betas": [3]}),
        ({"seed": 1}, {}, {"seed": 1}),
    ],
)  # fmt: skip
def test_what_a_job_says_is_laid_over_the_defaults(below: dict, above: dict, whole: dict) -> None:
    assert merge_over_defaults(layer("defaults", **below), layer("a", **above)).values == whole


def test_each_key_is_placed_where_it_was_written_and_what_was_displaced_nowhere() -> None:
    below = layer("defaults", epochs=3, betas=[1, 2], adapter={"rank": 4, "targets": ["q", "v"]})
    found = merge_over_defaults(below, layer("a", steps=7, betas=[5], adapter={"rank": 2}))
    assert {".".join(map(str, loc)): str(where) for loc, where in found.places.items()} == {
        "": "a",
        "steps": "a.steps",
        "betas": "a.betas",
        "betas.0": "a.betas[0]",
        "adapter": "a.adapter",
        "adapter.rank": "a.adapter.rank",
        "adapter.targets": "defaults.adapter.targets",
        "adapter.targets.0": "defaults.adapter.targets[0]",
        "adapter.targets.1": "defaults.adapter.targets[1]",
    }


class Rows:
    """As datasets have them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": "a"}


@pytest.mark.parametrize(
    "data",
    [
        [],
        (),
        [{"text": "a"}],
        [{"text": "a"}, "rows.jsonl"],
        ["rows.jsonl", {"text": "a"}],
        [7],
        Rows(),
        [{"path": "a", "weight": 1, "text": "b"}],
        [DataSpec(path="a")],
    ],
)
def test_what_is_no_path_and_no_mixture_of_paths_is_rows(data: Any) -> None:
    assert is_row_data(data)


@pytest.mark.parametrize(
    "data",
    [
        "rows.jsonl",
        b"rows",
        Path("rows.jsonl"),
        {"path": "a"},
        DataSpec(path="a"),
        None,
        7,
        iter([1]),
        ["a", Path("b")],
        [{"path": "a"}],
        [{"path": "a", "weight": 2}, "b"],
        [Source(path="a")],
        (Source(path="a"), "b"),
    ],
)
def test_a_path_or_a_mixture_of_paths_is_not_rows(data: Any) -> None:
    assert not is_row_data(data)


def test_what_python_has_more_kinds_of_is_made_plain() -> None:
    value = {1: np.int64(3), "b": (np.float32(0.5), True, None, "x"), "c": Path("rows"), "d": np.bool_(True)}
    plain = plain_values(value)
    assert plain == {"1": 3, "b": [0.5, True, None, "x"], "c": "rows", "d": np.bool_(True)}
    assert [type(plain["1"]), type(plain["b"][0]), type(plain["b"][1])] == [int, float, bool]
    assert plain_values(EvalSpec) is EvalSpec


def test_of_a_record_only_what_is_set_is_a_key() -> None:
    assert plain_values(EvalSpec(fraction=0.1)) == {"fraction": 0.1}
    assert plain_values([EvalSpec(path="x", every=5)]) == [{"path": "x", "every": 5}]


def test_rows_are_passed_on_untouched() -> None:
    rows = [{"text": Path("a")}]
    assert plain_values({"rows": rows})["rows"] is rows
    found = keys_from_keywords({"name": "a", "data": rows, "early_stop": np.int64(3)})
    assert found.values["data"]["rows"] is rows
    assert found.values["early_stop"] == {"patience": 3}
    assert str(found.places["early_stop", "patience"]) == "early_stop"
    assert ("data", "rows", 0) not in found.places
    assert keys_from_keywords({"data": Path("rows.jsonl")}).values == {"data": {"path": "rows.jsonl"}}
