"""One supervisor for all processes of a run: who is lost is started again with its team, and nobody else."""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import pytest

import weftune.launch.supervise
from tests.launch.mains import tell_wall_time
from tests.run.processes import context
from weftune.core.clock import PhaseClock, use_clock
from weftune.errors import UserError
from weftune.launch import supervise
from weftune.launch.supervise import (
    INTERRUPTED,
    THREADS,
    UNGUARDED,
    ProcessSpec,
    Supervisor,
    Team,
    TeamEnd,
    exit_unguarded_script,
    fork_context,
)
from weftune.launch.workers import launch
from weftune.run.workers.heartbeat import LOST


def ends(code, _):
    raise SystemExit(code)


def waits(connection):
    """For ever, with signs of life."""
    while True:
        connection.send(None)
        time.sleep(0.05)


def is_killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


def says(words, connection):
    for word in words:
        connection.send(word)


def stops_itself(_):
    os.kill(os.getpid(), signal.SIGSTOP)


class Told:
    """Runs teams whose members depend on the attempt, and keeps what was said, heard and started."""

    def __init__(self, folder, *teams, **keys):
        self.said, self.heard, self.attempts = [], [], []
        context()
        made = [
            Team(members=partial(self._members, number, lists), **keys) for number, lists in enumerate(teams)
        ]
        self.supervisor = Supervisor(made, folder, self.said.append, self.heard.append)

    def _members(self, number, lists, attempt):
        self.attempts.append((number, attempt))
        mains = lists[min(attempt, len(lists) - 1)]
        return [ProcessSpec(f"worker {number}.{at}", main) for at, main in enumerate(mains)]


def tells_its_threads(connection):
    import torch

    connection.send((torch.get_num_threads(), os.environ.get(THREADS)))


def test_the_server_that_processes_come_from_is_told_how_many_threads_each_has(monkeypatch):
    """On ARM the products of a linear do not hear of it when torch is told later."""
    seen = []
    monkeypatch.setattr(supervise, "ensure_running", lambda: seen.append(os.environ[THREADS]))
    monkeypatch.delenv(THREADS, raising=False)
    fork_context(2)
    assert seen == [str(max(1, os.cpu_count() // 2))]
    assert THREADS not in os.environ
    monkeypatch.setenv(THREADS, "3")
    fork_context(2)
    assert len(seen) == 1, "the user's own word is in the environment already"


def test_a_process_has_its_share_of_the_cores_and_finds_no_word_of_the_user_s(tmp_path, monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    told = Told(tmp_path, [[tells_its_threads, partial(ends, 0)]])
    assert told.supervisor.run() == [TeamEnd(0)]
    assert told.heard == [(max(1, os.cpu_count() // 2), None)]


def test_a_team_with_a_lost_member_is_started_again_as_a_whole_and_ends_with_its_first(tmp_path):
    told = Told(tmp_path, [[waits, is_killed], [partial(ends, 1), partial(ends, 0)]], name="all")
    assert told.supervisor.run() == [TeamEnd(1)]
    assert told.said == [
        "worker 0.1 was ended by SIGKILL; starting all again from the last checkpoints (1 of 3)."
    ]
    assert told.attempts == [(0, 0), (0, 1)]
    assert len((tmp_path / "ranks" / "pids").read_text().splitlines()) == 2


def test_a_team_that_is_lost_too_often_is_given_up_and_the_others_come_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(weftune.launch.supervise, "MAX_RESTARTS", 1)
    told = Told(tmp_path, [[is_killed]], [[partial(says, ["a", "b"])]])
    assert told.supervisor.run() == [TeamEnd(LOST, "worker 0.0 was ended by SIGKILL"), TeamEnd(0)]
    assert told.heard == ["a", "b"], "what it said last is heard, too"
    assert told.said == [
        "worker 0.0 was ended by SIGKILL; starting it again from the last checkpoints (1 of 1).",
        "worker 0.0 was ended by SIGKILL; giving up; resume with weftune train jobs.yaml --resume",
    ]
    assert told.attempts == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("code", [0, 1, 2, INTERRUPTED])
def test_ends_of_the_first_member_that_no_other_try_would_change_are_no_losses(tmp_path, code):
    told = Told(tmp_path, [[partial(ends, code), partial(ends, 0)]])
    assert told.supervisor.run() == [TeamEnd(code)]
    assert told.said == []


def test_a_script_that_would_train_in_its_processes_gets_a_sentence_and_they_end(tmp_path, monkeypatch):
    told = Told(tmp_path, [[waits, partial(ends, UNGUARDED)]])
    with pytest.raises(UserError, match=r'write `if __name__ == "__main__":` before the call'):
        told.supervisor.run()
    assert told.attempts == [(0, 0)]


def test_only_a_process_that_imports_the_script_that_has_started_it_is_ended(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    exit_unguarded_script()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    exit_unguarded_script()
    assert codes == [UNGUARDED]


@pytest.mark.timed
def test_a_member_that_says_nothing_any_more_is_ended_and_started_again(tmp_path):
    told = Told(tmp_path, [[stops_itself], [partial(ends, 0)]], silent_seconds=2.0)
    assert told.supervisor.run() == [TeamEnd(0)]
    assert told.said[0] == "worker 0.0 has given no sign of life for 2 seconds."


def test_asked_to_stop_nobody_is_started_again(tmp_path):
    """SIGTERM ends whoever is still at its imports; that is no loss."""
    told = Told(tmp_path, [[waits, waits]])

    def press():
        deadline = time.monotonic() + 60
        while not (tmp_path / "ranks" / "pids").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    finger = threading.Thread(target=press)
    finger.start()
    ended = told.supervisor.run()
    finger.join()
    assert [one.code for one in ended] == [INTERRUPTED]
    assert told.said == []
    assert told.attempts == [(0, 0)]


def test_workers_count_the_wall_time_of_the_command_that_has_started_them(tmp_path):
    words = [str(tmp_path / "seconds")]
    with use_clock(PhaseClock(elapsed_seconds=100.0)):
        assert launch(tell_wall_time, words, words, 1, tmp_path / "out") == 0
    assert 100 <= float((tmp_path / "seconds").read_text()) < 200
