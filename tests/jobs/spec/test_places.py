"""Places: a mistake points at what was written, or at the nearest thing around it."""

from __future__ import annotations

from weftune.errors import Mistake
from weftune.jobs.spec.places import (
    ABSENT,
    Place,
    Placed,
    dotted,
    in_file_order,
    place_of,
    places_of,
    step_into,
    wrap,
)


def test_a_place_is_its_line_and_its_name_as_far_as_there_are_any() -> None:
    assert str(Place("jobs.yaml", 3, "jobs[0].seed")) == "jobs.yaml:3 jobs[0].seed"
    assert str(Place("jobs.yaml", 1, "")) == "jobs.yaml:1"
    assert str(Place("jobs.yaml", 0, "")) == "jobs.yaml"
    assert str(Place("", 0, "seed")) == "seed"


def test_a_way_is_written_with_dots_and_brackets() -> None:
    assert dotted(("jobs", 2, "adapter", "targets", 0)) == "jobs[2].adapter.targets[0]"
    assert dotted(()) == ""


def test_a_step_leads_into_mappings_and_lists_and_nowhere_else() -> None:
    assert step_into({"a": None}, "a") is None
    assert step_into({"a": 1}, "b") is ABSENT
    assert step_into([5, 6], 1) == 6
    assert step_into((5,), 0) == 5
    assert step_into([5, 6], 2) is ABSENT
    assert step_into([5, 6], "a") is ABSENT
    assert step_into("text", 0) is ABSENT


def test_what_has_no_line_of_its_own_stands_on_that_of_what_holds_it() -> None:
    tree = {"adapter": {"targets": ["q", "v"]}, "seed": 1}
    lines = {("jobs", 0): 3, ("jobs", 0, "adapter"): 4, ("jobs", 0, "adapter", "targets", 1): 6}
    found = places_of(tree, ("jobs", 0), "jobs.yaml", lines)
    assert {str(place) for place in found.values()} == {
        "jobs.yaml:3 jobs[0]",
        "jobs.yaml:3 jobs[0].seed",
        "jobs.yaml:4 jobs[0].adapter",
        "jobs.yaml:4 jobs[0].adapter.targets",
        "jobs.yaml:4 jobs[0].adapter.targets[0]",
        "jobs.yaml:6 jobs[0].adapter.targets[1]",
    }
    assert str(place_of(found, ("adapter", "rank", "x"))) == "jobs.yaml:4 jobs[0].adapter"
    assert str(place_of(found, ("adapter", "rank"))) == "jobs.yaml:4 jobs[0].adapter"
    assert str(place_of(found, ("eval",))) == "jobs.yaml:3 jobs[0]"


def test_in_python_there_are_no_lines_and_rows_are_not_looked_into() -> None:
    found = places_of({"data": {"rows": [{"text": "a"}] * 3}, "seed": 1})
    assert {str(place) for place in found.values()} == {"", "data", "data.rows", "seed"}


def test_what_a_shorthand_held_is_still_placed_where_it_was_written() -> None:
    found = places_of({"data": ["a", "b"], "date": 1})
    wrap(found, ("data",), "path")
    assert str(found["data", "path"]) == "data"
    assert str(found["data", "path", 1]) == "data[1]"
    assert not any(loc[:2] == ("date", "path") for loc in found)


def test_mistakes_come_in_the_order_of_their_lines_each_once() -> None:
    late, early = Placed(Place("f", 9, "b"), "too large"), Placed(Place("f", 2, "a"), "too small")
    assert in_file_order([late, early, late]) == [
        Mistake("f:2 a", "too small"),
        Mistake("f:9 b", "too large"),
    ]
