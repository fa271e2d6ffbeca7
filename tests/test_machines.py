"""torchrun over two machines, here two network namespaces: the same pipeline, also with the network cut."""

import time

import pytest

from tests.launches import copied
from tests.machines import two_machines
from tests.outputs import assert_same_results, assert_whole

NOTICED = 10.0


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    return copied(trained_deep, tmp_path_factory.mktemp("machines"))


@pytest.fixture
def machines():
    with two_machines() as made:
        yield made


def logs(place):
    return "\n".join(path.read_text() for path in sorted(place.glob("machine-*.log")))


def wait_until(true, seconds, place):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, logs(place)
        time.sleep(0.01)


@pytest.mark.slow
def test_two_machines_train_to_the_adapters_of_one_process(place, machines):
    agents = machines.torchrun(place, "train", "jobs.yaml", "--output", "two")
    assert [agent.wait(120) for agent in agents] == [0, 0], logs(place)
    assert_whole(place / "two")
    assert_same_results(place / "two", place / "undisturbed")


@pytest.mark.slow
def test_a_cut_network_is_noticed_in_ten_seconds_and_once_mended_nothing_is_lost(place, machines):
    """Every worker ends by itself; torchrun starts all again when its agents can speak to each other."""
    agents = machines.torchrun(place, "train", "jobs.yaml", "--output", "cut")
    metrics = place / "cut" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 8, 120, place)
    assert len(machines.workers()) == 2
    machines.link("down")
    began = time.monotonic()
    wait_until(lambda: not machines.workers(), NOTICED, place)
    print(f"network cut: all workers ended after {time.monotonic() - began:.1f} s")
    written = metrics.read_bytes()
    time.sleep(3)
    assert metrics.read_bytes() == written, "somebody still trains"
    machines.link("up")
    assert [agent.wait(180) for agent in agents] == [0, 0], logs(place)
    told = logs(place)
    assert "has given no sign of life for 7 seconds" in told
    assert "the store that all workers share has not answered for 7 seconds" in told
    assert_whole(place / "cut")
    assert_same_results(place / "cut", place / "undisturbed")
