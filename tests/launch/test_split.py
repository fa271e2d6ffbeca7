"""`--gpus N`: every process holds the base and trains its jobs to what one process would make of them."""

import json
import signal

import pytest

from tests.cases import slow_but
from tests.launches import Shares, dealt, fresh
from tests.outputs import FIVE_JOBS, assert_same_results, assert_whole, jobs_folder, lines, states


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = jobs_folder(tmp_path_factory.mktemp("shares"), FIVE_JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


@pytest.mark.parametrize("count", slow_but([2, 3], [2]))
def test_losses_evaluations_and_adapters_equal_one_process(place, count, capfd):
    output = place / fresh(place, "out")
    assert Shares(place, "out", count).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    assert list(states(output)) == list(states(place / "undisturbed"))
    told = capfd.readouterr().out
    assert f"5 jobs on {place / 'model'}, shared by {count} devices" in told
    assert told.count(" on cpu: ") == count
    table = told[told.index("change") :]
    page = (output / "report.html").read_text()
    for job in FIVE_JOBS:
        assert f"{job['name']}  " in table
        assert f">{job['name']}<" in page


def test_the_shares_are_even_the_same_every_time_and_recorded(place):
    if not (place / "out" / "shares.json").exists() or len(dealt(place / "out")) != 2:
        assert Shares(place, fresh(place, "out"), 2).wait() == 0
    first = json.loads((place / "out" / "shares.json").read_text())
    assert sorted(name for share in dealt(place / "out") for name in share) == sorted(states(place / "out"))
    seconds = [share["predicted_seconds"] for share in first["shares"]]
    assert all(share["seconds"] > 0 for share in first["shares"])
    # No job is longer than a third of the work, so that two shares can be nearly even.
    assert max(seconds) < 1.25 * min(seconds)
    assert Shares(place, fresh(place, "again"), 2).wait() == 0
    assert dealt(place / "again") == dealt(place / "out")


@pytest.mark.slow
def test_interrupted_alone_then_in_two_shares_it_goes_on_in_three_and_ends_alone_with_the_same_curve(
    place, forks
):
    output = place / fresh(place, "changing")
    forks.start("train", "jobs.yaml", "--output", "changing", cwd=place)
    forks.wait_for_lines(output, 8)
    forks.signal(signal.SIGINT)
    assert forks.wait() == 130
    for count, at in ((2, 8), (3, 8)):
        before = lines(output)
        run = Shares(place, "changing", count, resume=True)
        run.wait_for_lines(len(before) + at)
        run.interrupt()
        assert run.wait() == 130
        assert not (output / ".shares").exists()
        after = lines(output)
        assert len(after) > len(before)
        assert all(line in after for line in before), "no finished step was made again"
        assert "paused" in states(output).values()
    going = {name for name, state in states(output).items() if state == "paused"}
    assert going <= {name for share in dealt(output) for name in share}
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "changing", cwd=place) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_only_unfinished_jobs_are_shared_anew_and_one_can_be_restarted(place):
    output = place / fresh(place, "anew")
    assert Shares(place, "anew", 2).wait() == 0
    assert Shares(place, "anew", 2, resume=True).wait() == 0, "nothing is left to do"
    first = lines(output)
    assert Shares(place, "anew", 2, resume=True, restart=["fifth", "other"]).wait() == 0
    assert sorted(name for share in dealt(output) for name in share) == ["fifth", "other"]
    assert all(len(share) == 1 for share in dealt(output))
    assert [line for line in lines(output) if line["job"] == "long"] == [
        line for line in first if line["job"] == "long"
    ]
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
