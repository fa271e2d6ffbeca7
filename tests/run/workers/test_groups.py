"""Which process of a pipeline this is, as the environment says it; half of that is a sentence."""

import pytest

from weftune.errors import UserError
from weftune.run.workers.groups import WorkerPosition, position_here

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in (*WHOLE, *ADDRESS):
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_process_by_itself_has_no_place(monkeypatch):
    assert position_here() is None
    put(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    assert position_here() is None


def test_a_worker_finds_its_place(monkeypatch):
    put(monkeypatch, WHOLE | ADDRESS)
    assert position_here() == WorkerPosition(1, 4, 1, 2)


@pytest.mark.parametrize("missing", ADDRESS)
def test_a_worker_without_an_address_is_a_sentence(monkeypatch, missing):
    put(monkeypatch, WHOLE | {name: value for name, value in ADDRESS.items() if name != missing})
    with pytest.raises(UserError, match=rf"worker 1 of 4, but not {missing}; .* unset RANK and WORLD_SIZE"):
        position_here()


@pytest.mark.parametrize("name", WHOLE)
def test_a_worker_that_is_no_number_is_a_sentence(monkeypatch, name):
    put(monkeypatch, WHOLE | ADDRESS | {name: "four"})
    with pytest.raises(UserError, match=f"{name} is 'four'"):
        position_here()


def test_the_workers_of_a_replica_stand_together_in_the_order_of_stages():
    places = [WorkerPosition(worker, 6, replicas=3) for worker in range(6)]
    assert {place.stages for place in places} == {2}
    assert [place.stage for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.replica for place in places] == [0, 0, 1, 1, 2, 2]
