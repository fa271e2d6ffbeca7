from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from weftune.jobs.store.states import MOVES, State, move
from weftune.jobs.store.store import open_store


def walk_by_moves(wishes: list[State]) -> None:
    state = State.QUEUED
    for wish in wishes:
        if state.ended:
            with pytest.raises(ValueError, match=f"cannot go from {state} to {wish}"):
                move(state, wish)
            continue
        try:
            new = move(state, wish)
        except ValueError:
            assert (state, wish) in ILLEGAL
        else:
            assert (state, wish) not in ILLEGAL
            state = new


def test_no_walk_makes_an_illegal_move() -> None:
    settings(max_examples=500)(given(st.lists(st.sampled_from(State), max_size=20))(walk_by_moves))()


@pytest.mark.slow
def test_no_walk_of_2000_makes_an_illegal_move() -> None:
    settings(max_examples=2000)(given(st.lists(st.sampled_from(State), max_size=20))(walk_by_moves))()


ILLEGAL = {
    (State.QUEUED, State.QUEUED),
    (State.QUEUED, State.SUCCEEDED),
    (State.RUNNING, State.RUNNING),
    (State.PAUSED, State.PAUSED),
    (State.PAUSED, State.RUNNING),
    (State.PAUSED, State.SUCCEEDED),
    (State.PAUSED, State.FAILED),
}


def test_preemption_and_resumption_are_the_only_ways_back() -> None:
    back = {(old, new) for old, after in MOVES.items() for new in after if new is State.QUEUED}
    assert back == {(State.RUNNING, State.QUEUED), (State.PAUSED, State.QUEUED)}


NAMES = ("a", "b", "c")


class Walks(RuleBasedStateMachine):
    """A store through random moves, kills, resumptions and the user's words, beside what it should say."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp())
        self.output = self.folder / "out"
        self.store = open_store(self.output, resume=False)
        self.expected: dict[str, State] = {}
        for name in NAMES:
            self.store.add_job(name)
            self.expected[name] = State.QUEUED

    @rule(name=st.sampled_from(NAMES), wish=st.sampled_from(State))
    def move(self, name: str, wish: State) -> None:
        before = self.expected[name]
        if wish in MOVES[before]:
            self.store.move_job(name, wish, "a reason")
            self.expected[name] = wish
            return
        with pytest.raises(ValueError, match=f"cannot go from {before} to {wish}"):
            self.store.move_job(name, wish)

    @rule()
    def end_and_resume(self) -> None:
        self.store.write_status()
        self.store.close()
        assert json.loads((self.output / "status.json").read_text())["jobs"].keys() == set(NAMES)
        self.store = open_store(self.output, resume=True)
        for name, state in self.expected.items():
            self.expected[name] = state if state.ended else State.QUEUED

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.store.restart_job(name)
        self.expected[name] = State.QUEUED

    @rule(name=st.sampled_from(NAMES))
    def retry(self, name: str) -> None:
        self.store.retry_job(name, "retried from step 3")
        self.expected[name] = State.QUEUED

    @invariant()
    def every_job_is_where_it_should_be(self) -> None:
        assert {name: job.state for name, job in self.store.status.jobs.items()} == self.expected

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


def walk(times: int) -> None:
    run_state_machine_as_test(Walks, settings=settings(max_examples=times, stateful_step_count=12))


def test_no_walk_of_a_store_over_kills_and_resumptions_loses_a_state() -> None:
    walk(60)


@pytest.mark.slow
def test_no_walk_of_2000_of_a_store_over_kills_and_resumptions_loses_a_state() -> None:
    walk(2000)


def test_three_states_are_ends() -> None:
    assert [state for state in State if state.ended] == [State.SUCCEEDED, State.FAILED, State.CANCELLED]
