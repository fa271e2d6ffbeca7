"""A job that is cancelled, in any mode and state, ends within two steps and its memory returns."""

import json
from functools import partial

import pytest

from tests.launch.mains import OTHER, VICTIM, cancelling_main
from tests.launch.modes import MODES
from tests.launches import deep_folder
from tests.outputs import assert_same_job, states

JOBS = [
    {"name": VICTIM, "steps": 8, "adapter": {"rank": 4}, "eval": {"fraction": 0.3, "every": 4}},
    {"name": OTHER, "steps": 20, "adapter": {"rank": 3, "dropout": 0.1}, "data": "b.jsonl"},
]
VECTORS = 5
"""Of a job: master weights, two moments, gradient, and what passes read."""
MOMENTS = {
    "it trains": (VICTIM, 2, "Stepped"),
    "it is evaluated": (VICTIM, 4, "Evaluated"),
    "it has ended": (OTHER, 18, "Stepped"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    folder = deep_folder(tmp_path_factory.mktemp("cancelled"), JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


def cases():
    """Every moment in every mode; on one device more moments are in `tests/test_joining.py`."""
    for mode in MODES:
        for moment in MOMENTS:
            yield pytest.param(mode, moment, id=f"{mode.name}, {moment}")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "moment"), cases())
def test_a_cancelled_job_ends_within_two_steps_its_memory_returns_and_the_other_trains_as_if_alone(
    place, mode, moment, tmp_path
):
    output, late = mode.output(place), moment == "it has ended"
    runs = partial(cancelling_main, MOMENTS[moment], tmp_path)
    assert mode.start(place, output.name, runs=runs).wait() == (0 if late else 1)
    assert states(output) == {VICTIM: "succeeded" if late else "cancelled", OTHER: "succeeded"}
    mode.assert_it_was(output)
    assert_same_job(output, place / "undisturbed", OTHER)
    workers = [notes(path) for path in sorted(tmp_path.glob("worker-*"))]
    assert len(workers) == mode.workers
    after = workers[0][workers[0].index({"cancelled": VICTIM}) + 1 :]
    events = [one["event"] for one in after if "event" in one]
    assert len([job for job, _, what in events if (job, what) == (VICTIM, "Stepped")]) <= 2
    for windows in ([one for one in told if "own" in one] for told in workers):
        both = [one["own"] for one in windows if one["aboard"] == [OTHER, VICTIM]]
        alone = [one["own"] for one in windows if one["aboard"] == [OTHER]]
        assert both[-1] - alone[-1] >= VECTORS
        assert alone[0] <= alone[-1]


def notes(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
