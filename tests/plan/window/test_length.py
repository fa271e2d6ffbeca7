"""Windows are as long as ten predicted seconds allow, by what a run has recorded and never by the clock."""

import json

import pytest

from tests import bench
from tests.plan.costs import SHAPE, TRUTH
from weftune import JobSpec
from weftune.plan.cost.prior import arithmetic
from weftune.plan.program.program import GlobalBatch, PlacedSample
from weftune.plan.window.length import WINDOW_SECONDS, WindowPace, first_pace, shortened
from weftune.plan.window.rounds import JobWindow


def course(job, *lengths, evaluated=0):
    """One sample a batch; with `evaluated`, so many held-out rows after its second step."""
    batches = tuple(
        GlobalBatch(job, step, (PlacedSample(step, length, 0, length),), length)
        for step, length in enumerate(lengths, start=1)
    )
    held_out = (PlacedSample(0, evaluated, 0, evaluated),) if evaluated else ()
    return JobWindow(job, 0, batches, held_out, frozenset({2}), frozenset())


def rounds(courses, **pace):
    return [len(one.batches) for one in shortened(courses, WindowPace(**pace))]


def test_a_window_has_all_its_rounds_where_nothing_is_known_or_they_are_quick():
    courses = [course("a", 10, 10, 10, 10), course("b", 5, 5)]
    assert rounds(courses) == [4, 2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 50) == [4, 2]
    assert shortened(courses, WindowPace()) == courses, "where the bound does not bite nothing changes"


def test_a_window_ends_before_it_is_predicted_to_take_longer_but_has_one_round():
    courses = [course("a", 10, 10, 10, 10), course("b", 5, 5, 5)]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 30) == [2, 2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 40) == [2, 2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 45) == [3, 3]
    assert rounds(courses, row_seconds=1000.0) == [1, 1]
    assert rounds(courses, round_seconds=WINDOW_SECONDS / 3) == [3, 3], "stages that take turns all come"
    assert rounds([]) == []


def test_rows_that_are_evaluated_count_for_a_third():
    courses = [course("a", 10, 10, 10, evaluated=30)]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 30) == [2]
    assert rounds(courses, row_seconds=WINDOW_SECONDS / 29) == [1]


def test_before_anything_is_measured_a_profile_or_the_data_sheet_says_how_long_rows_take():
    by_sheet = first_pace(arithmetic(SHAPE), SHAPE, False, 1024)
    assert 0 < by_sheet.row_seconds < 1
    profiled = first_pace(TRUTH, SHAPE, False, 1024)
    assert profiled.row_seconds > 0
    assert profiled != by_sheet


@pytest.fixture
def jobs():
    rows = bench.rows(bench.samples(16))
    return [JobSpec(name="a", data=rows, steps=9, batch_size=4, adapter={"rank": 2}, save_every=1)]


def steps_of(programs):
    return [len(program.batches) for program in programs]


def test_a_slow_run_has_short_windows_and_a_resumed_one_the_same(jobs, tmp_path, monkeypatch):
    """The pace is pretended: no step takes so long."""
    model = bench.base()
    monkeypatch.setattr("weftune.plan.cost.learned.Outcome.row_seconds", lambda self: 1000.0)
    undisturbed = bench.trainer(model, tmp_path / "undisturbed", jobs)
    undisturbed.run()
    assert steps_of(undisturbed.programs) == [4, 1, 1, 1, 1, 1], "the first window was planned by the sheet"
    assert json.loads((tmp_path / "undisturbed" / "learned.json").read_text())["row_seconds"] == 1000.0
    output, seen = tmp_path / "out", []

    def crash(event):
        seen.append(event)
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.trainer(model, output, jobs).run(crash)
    monkeypatch.setattr("weftune.plan.cost.learned.Outcome.row_seconds", lambda self: None)
    resumed = bench.trainer(model, output, jobs, options=bench.Options(resume=True))
    resumed.run()
    assert steps_of(resumed.programs) == [1] * len(resumed.programs)
    assert resumed.programs == undisturbed.programs[-len(resumed.programs) :]
