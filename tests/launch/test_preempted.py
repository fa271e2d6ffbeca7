"""A job gives way to one of higher priority in every mode, and goes on to the same curve."""

from functools import partial

import pytest

from tests.launch.mains import urgent_main
from tests.launch.modes import modes
from tests.launches import deep_folder
from tests.outputs import assert_same_job, assert_whole, lines

LOW = {"name": "low", "steps": 40, "adapter": {"rank": 4, "dropout": 0.1}, "keep": "best",
       "eval": {"fraction": 0.3, "every": 8}}  # fmt: skip
STEADY = {"name": "steady", "steps": 40, "data": "b.jsonl", "adapter": {"rank": 3}, "priority": 1}
URGENT = {"name": "urgent", "steps": 6, "data": "b.jsonl", "adapter": {"rank": 3}, "priority": 9}


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` has all, trained without any need to wait."""
    folder = tmp_path_factory.mktemp("preempted")
    deep_folder(folder, [LOW, STEADY, URGENT])
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return deep_folder(folder, [LOW, STEADY])


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes())
def test_who_gives_way_is_saved_and_goes_on_to_the_same_curve(place, mode):
    output = mode.output(place)
    keys = {"batch_size": 4, "learning_rate": 1e-2, "save_every": 4, **URGENT}
    keys["data"] = {"path": str(place / "b.jsonl"), "max_length": 64}
    assert mode.start(place, output.name, runs=partial(urgent_main, ("low", 2), keys)).wait() == 0
    mode.assert_it_was(output)
    order = [line["job"] for line in lines(output)]
    came, went = order.index("urgent"), len(order) - order[::-1].index("urgent")
    assert "low" in order[:came], "the test wants it to have begun"
    assert "low" not in order[came:went]
    assert_whole(output)
    for name in ("low", "steady", "urgent"):
        assert_same_job(output, place / "undisturbed", name)
