"""Which process of a pipeline this is, as the environment says it; half of that is a sentence. The interface
that gloo and NCCL are told to bind."""

import os
import socket

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from weftune.errors import UserError
from weftune.run.workers.groups import (
    INTERFACE_VARIABLES,
    NCCL_RULES,
    WorkerPosition,
    bind_interface,
    choose_library,
    find_interface,
    loopback_store,
    read_position,
)

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
    assert read_position() is None
    put(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    assert read_position() is None


def test_a_worker_finds_its_place(monkeypatch):
    put(monkeypatch, WHOLE | ADDRESS)
    assert read_position() == WorkerPosition(1, 4, 1, 2)


@pytest.mark.parametrize("missing", ADDRESS)
def test_a_worker_without_an_address_is_a_sentence(monkeypatch, missing):
    put(monkeypatch, WHOLE | {name: value for name, value in ADDRESS.items() if name != missing})
    with pytest.raises(UserError, match=rf"worker 1 of 4, but not {missing}; .* unset RANK and WORLD_SIZE"):
        read_position()


@pytest.mark.parametrize("name", WHOLE)
def test_a_worker_that_is_no_number_is_a_sentence(monkeypatch, name):
    put(monkeypatch, WHOLE | ADDRESS | {name: "four"})
    with pytest.raises(UserError, match=f"{name} is 'four'"):
        read_position()


def test_the_workers_of_a_replica_stand_together_in_the_order_of_stages():
    places = [WorkerPosition(worker, 6, replicas=3) for worker in range(6)]
    assert {place.stages for place in places} == {2}
    assert [place.stage for place in places] == [0, 1, 0, 1, 0, 1]
    assert [place.replica for place in places] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("kind", "gpus", "rules", "library"),
    [
        ("cuda", 2, "0", "nccl"),
        ("cuda", 4, "1", "nccl"),
        ("cuda", 1, "0", "gloo"),
        ("cuda", 1, "1", "gloo"),
        ("cpu", 0, "0", "gloo"),
        ("cpu", 2, "0", "gloo"),
        ("cpu", 0, "1", "ordered"),
    ],
)
def test_nccl_is_used_where_every_worker_has_a_gpu_and_gloo_elsewhere(
    monkeypatch, kind, gpus, rules, library
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv(NCCL_RULES, rules)
    assert choose_library(WorkerPosition(1, 4, 1, 2), torch.device(kind)) == library


# -- the network interface -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    # Set before it is deleted, so that the monkeypatch undoes what the function sets.
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def outward():
    return {
        name: [one.address for one in found if one.family is socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
        if any(one.family is socket.AF_INET and not one.address.startswith("127.") for one in found)
    }


def test_on_the_first_machine_it_is_the_one_that_has_its_address():
    if not outward():
        pytest.skip("this machine has no network")
    for name, addresses in outward().items():
        assert find_interface(addresses[0]) == name


def test_it_is_never_the_loopback():
    assert find_interface("127.0.0.1") in {None, *outward()}


def test_a_host_that_nobody_knows_is_no_reason_to_fall():
    assert find_interface("no-such-host.invalid") in {None, *outward()}


def test_workers_of_one_machine_meet_on_its_loopback():
    bind_interface(WorkerPosition(0, 2, 0, 2))
    addresses = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert any(one.address.startswith("127.") for one in addresses)
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_the_store_of_a_local_run_is_reached_from_this_machine_alone():
    store = loopback_store()
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    for addresses in outward().values():
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((addresses[0], store.port), timeout=5)


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", next(iter(outward().values()), ["127.0.0.1"])[0])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    bind_interface(WorkerPosition(0, 2, 0, 1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine0"
