from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.jobs.states import MOVES, State, move


@settings(max_examples=500)
@given(st.lists(st.sampled_from(State), max_size=20))
def test_no_walk_makes_an_illegal_move(wishes: list[State]) -> None:
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


ILLEGAL = {
    (State.QUEUED, State.QUEUED),
    (State.QUEUED, State.SUCCEEDED),
    (State.RUNNING, State.RUNNING),
}


def test_preemption_is_the_only_way_back() -> None:
    back = {(old, new) for old, after in MOVES.items() for new in after if new is State.QUEUED}
    assert back == {(State.RUNNING, State.QUEUED)}


def test_three_states_are_ends() -> None:
    assert [state for state in State if state.ended] == [State.SUCCEEDED, State.FAILED, State.CANCELLED]
