"""Mutants change code, and neither annotations nor the arguments of decorators."""

import pytest

pytest.importorskip("cosmic_ray")

from cosmic_ray.mutating import mutate_code

from tests.mutants.make import OWN, changes, mutants_of

SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Pair:
    """Two of them: 1 and 2."""
    left: int | None
    right: int = 3

def add(pair: Pair | None, known: set) -> int | None:
    if pair in known:
        known.discard(pair)
    return pair.right + 1
'''


def all_changes(source):
    made = (one.source(source) for one in mutants_of("module.py", source))
    return {changes(source, one) for one in made if one is not None}


def test_every_change_is_one_of_behaviour():
    assert all_changes(SOURCE) == {
        ("@dataclass(frozen=True)", ""),
        ("right: int = 3", "right: int = 4"),
        ("right: int = 3", "right: int = 2"),
        ("if pair in known:", "if not pair in known:"),
        ("if pair in known:", "if pair not in known:"),
        ("known.discard(pair)", "pass"),
        ("return pair.right + 1", "return pair.right - 1"),
        ("return pair.right + 1", "return pair.right + 2"),
        ("return pair.right + 1", "return pair.right + 0"),
    }


@pytest.mark.parametrize("operator", OWN.values())
def test_our_operators_do_what_their_examples_say(operator):
    for example in operator.examples():
        changed = mutate_code(example.pre_mutation_code, operator(), example.occurrence)
        assert changed == example.post_mutation_code


@pytest.mark.parametrize("statement", ["x = f(y)", "return f(y)", "x: int = f(y)", "'f(y)'", "del x"])
def test_only_calls_and_augmented_assignments_that_stand_alone_are_removed(statement):
    source = f"def g(x, y):\n    {statement}\n"
    assert all(one.operator != "RemoveStatement" for one in mutants_of("module.py", source))


def test_a_change_that_cannot_be_made_is_none():
    """cosmic-ray replaces the names of exceptions, and stumbles over dots in them."""
    source = "try:\n    f()\nexcept (json.JSONDecodeError, OSError):\n    g()\n"
    made = [one for one in mutants_of("module.py", source) if one.operator == "ExceptionReplacer"]
    assert [one.source(source) is None for one in made] == [True, False]


def test_what_only_asserts_or_is_read_by_mypy_is_left_alone() -> None:
    source = (
        "if TYPE_CHECKING:\n    import a\n"
        "class A:\n    @staticmethod\n    def f(x: int = 1, *, y: int = 2) -> int: ...\n"
        "    @property\n    def g(self) -> int: ...\n"
    )
    found = {(one.operator, one.line) for one in mutants_of("a.py", source)}
    assert found == {("NumberReplacer", 5), ("RemoveDecorator", 6)}
