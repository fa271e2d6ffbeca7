"""The process that plans the windows of a pipeline."""

import os
import signal
from contextlib import closing

import pytest

from tests.plan.program.test_check import course
from weftune.core.shapes import LayerRange
from weftune.plan.cost.time import Line
from weftune.plan.program.handover import FINISHED
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import NOTHING
from weftune.plan.window.pace import StagePace
from weftune.plan.window.window import Pacing, plan_window
from weftune.trainer.planner import PlannerProcess

PACING = Pacing((StagePace(Line(0.0, 1.0), Line(0.0, 2.0)),) * 2, hands_over=True)
LAYOUT = pipeline_layout([LayerRange(0, 2, 4), LayerRange(2, 4, 4)])


def arguments(capacity=20):
    windows = [course(name, [[9, 4, 7], [3, 8]], save_at={2}) for name in "ab"]
    return windows, LAYOUT, capacity, False, NOTHING, PACING, FINISHED


@pytest.fixture
def process():
    with closing(PlannerProcess()) as process:
        yield process


def test_a_window_is_the_one_that_the_caller_would_plan(process):
    assert process.plan_window(*arguments()) == plan_window(*arguments())


def test_a_process_that_is_killed_costs_no_window(process):
    process.plan_window(*arguments())
    first = process._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert process.plan_window(*arguments(30)) == plan_window(*arguments(30))
    os.kill(process._process.pid, signal.SIGSTOP)
    process._process.kill()  # between two calls, unnoticed by then
    assert process.plan_window(*arguments(40)) == plan_window(*arguments(40))


def test_an_error_is_raised_as_if_the_caller_had_planned(process):
    wrong = (*arguments()[:5], Pacing(PACING.paces[:1]))
    with pytest.raises(AssertionError, match="a pace for every stage"):
        process.plan_window(*wrong)
    assert process.plan_window(*arguments()) == plan_window(*arguments()), "the process goes on"


def test_without_a_process_the_caller_plans(process, monkeypatch):
    def refuse(*_):
        raise OSError("no process can be started")

    monkeypatch.setattr("weftune.trainer.planner.start_server", refuse)
    assert process.plan_window(*arguments()) == plan_window(*arguments())
