"""Sweeps in shares of the jobs: trials train in rounds, and rungs are decided by the trials of all shares.

The processes of the shares are called one after another in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.launches import dealt, fresh
from tests.outputs import assert_same_job, jobs_folder, states
from weftune.cli.train import train
from weftune.launch import split
from weftune.launch.supervise import INTERRUPTED, Team, TeamEnd

JOBS = [
    {"name": "other", "steps": 5, "data": "b.jsonl", "adapter": {"rank": 2}},
    {
        "name": "s",
        "steps": 8,
        "adapter": {"rank": 3, "dropout": 0.1},
        "eval": {"fraction": 0.25, "every": 4},
        "sweep": {
            "over": {"learning_rate": [3e-2, 1e-2, 3e-3, 1e-3]},
            "halving": {"at": [0.25, 0.5], "keep": 0.5},
            "keep": 1,
        },
    },
]


class Unconnected:
    def send(self, _message: Any) -> None:
        pass


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run every share in this process. Return the list of the numbers of shares in each round."""
    rounds: list[int] = []

    def supervise(teams: list[Team], *_: Any) -> tuple[list[TeamEnd], dict[int, str], dict[str, Any]]:
        rounds.append(len(teams))
        for team in teams:
            (member,) = team.members(0)
            member.main(Unconnected())
        return [TeamEnd(0)] * len(teams), {}, {}

    monkeypatch.setattr(split, "_supervise_teams", supervise)
    monkeypatch.setattr(split, "_exit_with_launcher", lambda: None)
    monkeypatch.setattr(split.ShareView, "send_heartbeats", lambda _: None)
    return rounds


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `undisturbed` is the output of one process."""
    folder = jobs_folder(tmp_path_factory.mktemp("rounds"), JOBS)
    train(folder / "jobs.yaml", device="cpu", output=folder / "undisturbed")
    return folder


def record(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "s" / "sweep.json").read_text())
    return found


def assert_same_sweep(output: Path, undisturbed: Path) -> None:
    ours, theirs = record(output), record(undisturbed)
    assert ours["decisions"] == theirs["decisions"]
    assert (ours["best"], ours["samples"]) == (theirs["best"], theirs["samples"])
    for key in ("reason", "state", "score_step"):
        assert [trial[key] for trial in ours["trials"]] == [trial[key] for trial in theirs["trials"]]
    assert states(output) == states(undisturbed)
    for name in ("other", *theirs["best"]):
        assert_same_job(output, undisturbed, name)
    assert not list(output.glob("*/checkpoints"))
    assert not (output / ".shares").exists()


def test_trials_of_two_shares_are_compared_and_divided_anew_after_each_rung(
    place: Path, in_one_process: list[int]
) -> None:
    output = place / fresh(place, "shares")
    train(place / "jobs.yaml", device="cpu", gpus="2", output=output)
    assert [decision["step"] for decision in record(output)["decisions"]] == [2, 4]
    assert in_one_process == [2, 2, 1], "four trials and the other job, two trials, the best"
    assert dealt(output) == [record(output)["best"]]
    assert_same_sweep(output, place / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "kept_round"), product((None, "3"), (0, 1)))
def test_interrupted_in_a_round_it_resumes_to_the_same_decisions(
    place: Path,
    in_one_process: list[int],
    monkeypatch: pytest.MonkeyPatch,
    kept_round: int,
    gpus: str | None,
) -> None:
    """The first share of a round trains, and the others do not begin."""
    whole: Callable[..., Any] = split._supervise_teams

    def interrupted(teams: list[Team], *rest: Any) -> Any:
        if len(in_one_process) < kept_round:
            return whole(teams, *rest)
        whole(teams[:1], *rest)
        return [TeamEnd(INTERRUPTED)] * len(teams), {}, {}

    monkeypatch.setattr(split, "_supervise_teams", interrupted)
    output = place / fresh(place, "interrupted")
    with pytest.raises(typer.Exit) as end:
        train(place / "jobs.yaml", device="cpu", gpus="2", output=output)
    assert end.value.exit_code == INTERRUPTED
    assert set(states(output).values()) - {"paused", "succeeded", "cancelled"} == set()
    monkeypatch.setattr(split, "_supervise_teams", whole)
    train(place / "jobs.yaml", device="cpu", gpus=gpus, output=output, resume=True)
    assert_same_sweep(output, place / "undisturbed")
