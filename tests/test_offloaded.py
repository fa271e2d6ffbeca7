"""A whole run with master weights and moments in host memory: its results are those of any other, and it goes
on where the other was broken off. On a CPU no run chooses it, so the choice is changed."""

from dataclasses import replace

import pytest

from tests import bench
from tests.outputs import Crash, assert_same_results, assert_whole, events_of, rich_run
from weftune.plan.layout.choose import choose_layout
from weftune.plan.layout.offloaded import offload_optimizer
from weftune.trainer import engine


@pytest.fixture
def offloaded(monkeypatch):
    """Runs offload the optimizer from now on, or until told otherwise."""

    def switch(on):
        def chosen(*asked):
            found = choose_layout(*asked)
            memory = offload_optimizer(found.memory, host_budget=1 << 50)
            layout = replace(found.layout, offloads_optimizer=True)
            return replace(found, layout=layout, memory=memory) if on else found

        monkeypatch.setattr(engine, "choose_layout", chosen)

    switch(True)
    return switch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    output, _ = rich_run(tmp_path_factory.mktemp("offloaded") / "want")
    return output


def test_a_run_has_the_results_of_state_on_the_device(tmp_path, undisturbed, offloaded):
    events_of(tmp_path / "out", bench.base())
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", undisturbed)


@pytest.mark.parametrize("first", [True, False], ids=["host, then device", "device, then host"])
def test_a_run_goes_on_wherever_the_optimizer_was(tmp_path, undisturbed, offloaded, first):
    offloaded(first)
    with pytest.raises(Crash):
        events_of(tmp_path / "out", bench.base(), at=13)
    offloaded(not first)
    events_of(tmp_path / "out", bench.base(), resume=True)
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", undisturbed)
