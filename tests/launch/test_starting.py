"""A job that starts from another's adapter, in every mode and in shares."""

import json
import shutil

import pytest

from tests.launch.modes import modes
from tests.launches import Shares, dealt, deep_folder, fresh
from tests.outputs import assert_same_job, assert_whole

FIRST = {"name": "first", "steps": 6, "adapter": {"rank": 4}}
SECOND = {"name": "second", "steps": 5, "data": "b.jsonl", "adapter": {"rank": 4}}
OTHER = {"name": "other", "steps": 11, "adapter": {"rank": 3, "dropout": 0.1}}


def start_from(job, start):
    return {**job, "adapter": {**job["adapter"], "init_from": start}}


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` has all of them, the second trained by itself from the first's folder."""
    folder = tmp_path_factory.mktemp("starting")
    deep_folder(folder, [FIRST, OTHER])
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    deep_folder(folder, [start_from(SECOND, "undisturbed/first")])
    assert forks.weftune("train", "jobs.yaml", "--output", "alone", cwd=folder) == 0
    deep_folder(folder, [start_from(SECOND, {"job": "first"}), OTHER, FIRST])
    return folder


def assert_all_as_they_should_be(place, output):
    assert_whole(output)
    for name in ("first", "other"):
        assert_same_job(output, place / "undisturbed", name)
    assert_same_job(output, place / "alone", "second")


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes())
def test_it_starts_as_from_the_folder_in_every_mode(place, mode):
    output = mode.output(place)
    assert mode.start(place, output.name).wait() == 0
    mode.assert_it_was(output)
    assert_all_as_they_should_be(place, output)


@pytest.mark.slow
def test_in_shares_it_is_where_its_source_is_unless_that_is_trained_already(place):
    output = place / fresh(place, "shares")
    assert Shares(place, "shares", 2).wait() == 0
    assert sorted(dealt(output)) == [["other"], ["second", "first"]]
    assert_all_as_they_should_be(place, output)
    shutil.rmtree(output / "second")
    status = json.loads((output / "status.json").read_text())
    del status["jobs"]["second"]
    (output / "status.json").write_text(json.dumps(status))
    lines = (output / "metrics.jsonl").read_text().splitlines(keepends=True)
    (output / "metrics.jsonl").write_text("".join(line for line in lines if '"second"' not in line))
    assert Shares(place, "shares", 2, resume=True).wait() == 0
    assert sorted(dealt(output)) == [["second"]]
    assert_all_as_they_should_be(place, output)
