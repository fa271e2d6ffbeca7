"""What the driver makes of the reports of its workers."""

from __future__ import annotations

from weftune.plan.program.program import Backward, Evaluate, Forward, Step
from weftune.run.workers.agreed import TimedAction, WorkerReport
from weftune.run.workers.driver import shares


def test_a_microbatch_takes_the_mean_of_what_its_passes_take_on_the_workers():
    """So that the times of all microbatches add up to that of the window and not to a multiple of it."""
    first = [
        TimedAction(Forward(0), 0.0, 2.0),
        TimedAction(Backward(0), 2.0, 5.0),
        TimedAction(Evaluate(1), 5.0, 6.0),
        TimedAction(Step("a", 1), 6.0, 9.0),
    ]
    second = [TimedAction(Forward(0, stage=1), 2.0, 6.0), TimedAction(Forward(2, stage=1), 6.0, 7.0)]
    reports = [WorkerReport(times=first), WorkerReport(times=second)]
    assert shares(reports, Forward | Evaluate) == {0: 3.0, 1: 0.5, 2: 0.5}
    assert shares(reports, Backward) == {0: 1.5}
