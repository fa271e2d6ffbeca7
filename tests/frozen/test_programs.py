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
