"""Streamed stages as a Program: legal, loaded before use, never more in memory than the device has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.works import work
from weftune.plan.cost.layers import StageCost
from weftune.plan.outlook.streamed_program import Streams, stream_program
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, PricedDevice, Prices
from weftune.plan.program.program import Evict, Forward, Load, Reduce, Step
from weftune.plan.program.simulate import simulate


def streams(count: int, gpus: int, resident: set[int] = frozenset(), room: int = 20, **keys) -> Streams:
    stages = tuple(StageCost(one, one + 1, 1.0, 2.0, 10, 1, 1, 0, 0) for one in range(count))
    bits = tuple(stage in resident for stage in range(count))
    return Streams(stages, bits, tuple(range(gpus)), (room,) * gpus, **keys)


def prices(microbatches: int, count: int) -> Prices:
    return Prices(((PassPrice(1.0, 2.0),) * count,) * microbatches, weight_bytes=(10,) * count)


def cluster(gpus: int, bandwidth: float = 10.0) -> PricedCluster:
    devices = tuple(PricedDevice(1 << 40, Link(bandwidth), 0) for _ in range(gpus))
    return PricedCluster(devices, roots=(bandwidth * gpus,))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.sets(st.integers(0, 8)),
    st.sampled_from([0, 10, 20]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_streamed_program_is_legal_and_runs_to_its_end(
    count, gpus, resident, room, steps, microbatches, dice
):
    gpus = min(gpus, count)
    order = list(range(gpus))
    dice.shuffle(order)
    made = replace(streams(count, gpus, resident, room), order=tuple(order))
    todo = work(2, steps, microbatches)
    program = stream_program(todo, made)
    timeline = simulate(program, prices(len(todo.microbatches), count), cluster(gpus))
    passes = [one for actions in program.devices for one in actions if isinstance(one, Forward)]
    assert len(passes) == count * len(todo.microbatches)
    assert timeline.makespan >= steps * 3.0 * count


def test_a_step_uploads_each_streamed_stage_twice_save_the_ends_on_each_device():
    program = stream_program(work(1, 3, 2), streams(6, 2))
    loads = [one.stage for actions in program.devices for one in actions if isinstance(one, Load)]
    assert sorted(loads) == sorted(3 * [2, 4, 3, 5] + 3 * [2, 0, 3, 1])


def test_what_stays_is_never_loaded_nor_given_up():
    program = stream_program(work(1, 2, 2), streams(6, 2, resident={2, 3}))
    moved = [one.stage for actions in program.devices for one in actions if isinstance(one, Load | Evict)]
    assert not {2, 3} & set(moved)


@pytest.mark.parametrize(("room", "most"), [(20, 20), (19, 10)])
def test_a_stage_is_loaded_ahead_only_where_both_have_room(room, most):
    todo = work(1, 2, 3)
    program = stream_program(todo, streams(6, 2, room=room))
    timeline = simulate(program, prices(len(todo.microbatches), 6), cluster(2))
    assert max(timeline.peaks) == most


def test_loading_ahead_hides_uploads_behind_compute():
    todo = work(1, 3, 4)
    ahead, late = (
        simulate(
            stream_program(todo, streams(4, 1, prefetch=prefetch)),
            prices(len(todo.microbatches), 4),
            cluster(1),
        ).makespan
        for prefetch in (True, False)
    )
    assert ahead == 3 * 4 * 4 * 3.0, "an upload takes a second, and four passes hide it"
    assert late == ahead + 3 * 6 * 1.0


def test_devices_with_several_stages_agree_on_every_step():
    todo = work(2, 2, 2)
    for order in ((0, 1), (1, 0)):
        program = stream_program(todo, replace(streams(5, 2), order=order))
        for actions in program.devices:
            told = [(one.job, one.step) for one in actions if isinstance(one, Reduce)]
            made = [(one.job, one.step) for one in actions if isinstance(one, Step)]
            assert sorted(told) == sorted(made) == sorted((one.job, one.step) for one in todo.batches)
