"""When a capture pays: never more is lost than twice what whoever knew the future would lose."""

import pytest

from weftune.run.measure.timers import DeviceSpan
from weftune.run.passes.payback import Payback, WatchedPass

CAPTURE, REPLAYED, PLAIN = 0.25, 0.125, 0.1875
ROWS = 1024


@pytest.fixture
def payback():
    """After its first capture, and a replay of it."""
    made = Payback(always_captures=False)
    made.record_capture(CAPTURE)
    made.record_pass("first", ROWS, REPLAYED, is_replayed=True)
    return made


def test_the_first_capture_is_made_to_learn_what_captures_take_and_give():
    assert Payback(always_captures=False).should_capture("anything")


def test_at_once_every_capture_is_made():
    made = Payback(always_captures=True)
    made.record_capture(CAPTURE)
    assert made.should_capture("another")


def test_a_pass_that_waits_for_the_host_is_captured_when_it_has_lost_a_capture(payback):
    runs = 0
    while not payback.should_capture("small"):
        payback.record_pass("small", ROWS, PLAIN, is_replayed=False)
        runs += 1
    assert runs == round(CAPTURE / (PLAIN - REPLAYED))


def test_a_pass_that_keeps_the_device_busy_is_never_captured(payback):
    for _ in range(1000):
        payback.record_pass("large", 10 * ROWS, 10 * REPLAYED, is_replayed=False)
    assert not payback.should_capture("large")


def test_a_pass_that_comes_once_more_is_not_captured(payback):
    payback.record_pass("rare", ROWS, PLAIN, is_replayed=False)
    assert not payback.should_capture("rare")


def test_losses_of_one_pass_are_not_those_of_another(payback):
    for _ in range(10):
        payback.record_pass("small", ROWS, PLAIN, is_replayed=False)
    assert payback.should_capture("small")
    assert not payback.should_capture("another")


def test_a_capture_costs_what_captures_have_taken_on_average(payback):
    payback.record_capture(5 * CAPTURE)
    for _ in range(11):
        payback.record_pass("small", ROWS, PLAIN, is_replayed=False)
    assert not payback.should_capture("small")
    payback.record_pass("small", ROWS, PLAIN + 1e-6, is_replayed=False)
    assert payback.should_capture("small")


def test_before_a_replay_has_been_timed_nothing_is_known_to_be_lost():
    made = Payback(always_captures=False)
    made.record_capture(CAPTURE)
    made.record_pass("small", ROWS, 100.0, is_replayed=False)
    assert not made.should_capture("small")


def test_a_pass_counts_once_its_backward_is_over(payback):
    timed = WatchedPass("small", ROWS, is_replayed=False, spans=[DeviceSpan(0.0, 1.0)])
    payback.watch(timed)
    assert not payback.should_capture("small")
    timed.spans.append(DeviceSpan(2.0, 4.0))
    assert payback.should_capture("small")
