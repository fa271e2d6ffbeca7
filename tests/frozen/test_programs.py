"""Programs are what they were before the planners were rebuilt."""

import json

import pytest

from tests.frozen.programs import FILE, digest, plans

PLANS = dict(plans())


@pytest.mark.parametrize("name", PLANS)
def test_the_program_is_the_one_that_was_recorded(name):
    assert digest(PLANS[name]()) == json.loads(FILE.read_text())[name]


def test_every_recorded_program_is_planned():
    assert set(json.loads(FILE.read_text())) == set(PLANS)


def test_a_program_is_the_same_without_the_solver(monkeypatch):
    def never():
        raise AssertionError("a window asks for no solver")

    monkeypatch.setattr("weftune.plan.pack.milp.available", never)
    for name in list(PLANS)[::5]:
        PLANS[name]()
