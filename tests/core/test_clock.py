"""The wall time of a run, divided among its phases."""

import gc
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from tests.cases import is_within
from weftune.core import clock as clocks
from weftune.core.clock import (
    COMMAND_STARTED,
    Phase,
    PhaseClock,
    count_imports,
    current_clock,
    phase,
    process_clock,
    process_seconds,
    reassign_seconds,
    use_clock,
)


class Hands:
    """Moved by the test."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def hands():
    return Hands()


def spent(clock):
    return {name: seconds for name, seconds in clock.read().phases.items() if seconds}


def test_a_second_belongs_to_the_innermost_phase_and_all_of_them_are_the_wall_time(hands):
    clock = PhaseClock(read_clock=hands)
    with use_clock(clock):
        hands.time += 1
        with phase(Phase.TRAINING):
            hands.time += 2
            with phase(Phase.SAVING):
                hands.time += 4
            hands.time += 8
            with phase(Phase.SAVING):
                hands.time += 16
        hands.time += 32
    assert spent(clock) == {Phase.OTHER: 33, Phase.TRAINING: 10, Phase.SAVING: 20}
    assert clock.read().seconds == 63


def test_an_open_phase_is_counted_up_to_now(hands):
    clock = PhaseClock(read_clock=hands)
    with use_clock(clock), phase(Phase.LOADING):
        hands.time += 3
        assert spent(clock) == {Phase.LOADING: 3}
        hands.time += 4
    assert spent(clock) == {Phase.LOADING: 7}


def test_a_phase_ends_with_the_error_that_leaves_it(hands):
    clock = PhaseClock(read_clock=hands)
    with use_clock(clock):
        with suppress(ValueError), phase(Phase.LOADING):
            hands.time += 1
            raise ValueError
        hands.time += 2
    assert spent(clock) == {Phase.LOADING: 1, Phase.OTHER: 2}


def test_a_function_can_be_a_phase(hands):
    @phase(Phase.EXPORT)
    def export():
        hands.time += 5
        return "done"

    clock = PhaseClock(read_clock=hands)
    with use_clock(clock):
        assert [export(), export()] == ["done", "done"]
    assert spent(clock) == {Phase.EXPORT: 10}
    assert export() == "done"
    assert spent(clock)[Phase.EXPORT] == 10


def test_seconds_that_are_known_afterwards_are_taken_from_the_phase_around_them(hands):
    clock = PhaseClock(read_clock=hands)
    with use_clock(clock), phase(Phase.TRAINING):
        hands.time += 10
        reassign_seconds(Phase.COMPILING, 4)
        hands.time += 1
    assert spent(clock) == {Phase.TRAINING: 7, Phase.COMPILING: 4}


def test_what_another_thread_does_beside_is_not_counted(hands):
    clock = PhaseClock(read_clock=hands)

    def write():
        assert current_clock() is None
        with phase(Phase.SAVING):
            hands.time += 5
        reassign_seconds(Phase.COMPILING, 1)

    with use_clock(clock), phase(Phase.TRAINING):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert spent(clock) == {Phase.TRAINING: 5}


def test_threads_that_python_did_not_start_count_for_the_only_clock_there_is(monkeypatch):
    """As autograd's, in which a kernel of a backward is compiled while the owner waits for it."""
    clock = PhaseClock()
    found = []

    def look():
        monkeypatch.setattr(clocks, "_is_foreign_thread", lambda: True)
        found.append(current_clock())

    with use_clock(clock):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [clock]


@pytest.mark.gpu
def test_a_backward_on_a_gpu_counts_although_it_runs_in_a_thread_of_autograds():
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((threading.get_ident(), current_clock()))
            return gradient

    x = torch.ones(3, device="cuda", requires_grad=True)
    with use_clock(PhaseClock()) as clock:
        Asks.apply(x).sum().backward()
    ((thread, found),) = seen
    assert thread != threading.get_ident()
    assert found is clock


def test_a_run_inside_a_run_has_its_own_clock(hands):
    outer, inner = PhaseClock(read_clock=hands), PhaseClock(read_clock=hands)
    with use_clock(outer), phase(Phase.TRAINING):
        with use_clock(inner), phase(Phase.LOADING):
            hands.time += 2
        hands.time += 1
    assert spent(inner)[Phase.LOADING] == 2
    assert spent(outer) == {Phase.TRAINING: 3}
    assert current_clock() is None


def test_a_clock_of_the_process_counts_from_its_creation():
    code = (
        "import time; time.sleep(0.3)\n"
        "from weftune.core.clock import process_clock, use_clock\n"
        "with use_clock(process_clock()) as clock:\n"
        "    found = clock.read()\n"
        "print(found.phases['imports'], found.seconds, time.time() - found.started)"
    )
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    outside = time.monotonic() - began
    imports, seconds, ago = map(float, said.split())
    assert 0.3 <= imports <= seconds <= outside + 0.1
    assert abs(ago - seconds) < 0.1


def test_in_a_process_that_a_command_has_started_the_clock_counts_from_the_commands_start(monkeypatch):
    monkeypatch.setenv(COMMAND_STARTED, str(time.time() - process_seconds() - 100))
    found = process_clock().read()
    assert found.seconds == pytest.approx(process_seconds() + 100, abs=1)
    assert found.phases[Phase.IMPORTS] == pytest.approx(process_seconds(), abs=1)
    assert found.phases[Phase.OTHER] == pytest.approx(100, abs=1)
    monkeypatch.setenv(COMMAND_STARTED, "yesterday")
    assert process_clock().read().seconds == pytest.approx(process_seconds(), abs=1)


def test_where_the_system_does_not_tell_the_age_of_a_process_its_processor_time_stands_for_it(monkeypatch):
    def refuse(self):
        raise OSError

    monkeypatch.setattr(clocks.Path, "read_text", refuse)
    assert process_seconds() == pytest.approx(time.process_time(), abs=0.5)
    monkeypatch.setattr(clocks.Path, "read_text", lambda self: "1 (a (b) c) R " + " ".join(["0"] * 40))
    monkeypatch.setattr(clocks.time, "clock_gettime", lambda which: 1e9)
    assert process_seconds() == pytest.approx(time.process_time(), abs=0.5)


@pytest.mark.timed
def test_a_phase_is_cheap():
    with use_clock(PhaseClock()):
        began = time.process_time()
        for _ in range(10_000):
            with phase(Phase.CAPTURING):
                pass
    assert is_within(time.process_time() - began, 1.0)


def test_imports_are_a_phase_without_garbage_collection(hands):
    clock = PhaseClock(read_clock=hands)
    with use_clock(clock), count_imports():
        hands.time += 2
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()
    assert spent(clock) == {Phase.IMPORTS: 2}


def test_the_process_clock_starts_in_no_phase():
    clock = process_clock()
    assert clock.read().phases[Phase.OTHER] < 1.0
