"""A trainer around its loop: what a restart deletes, what a retry records, and what counts as whose time."""

from dataclasses import fields, replace

import pytest

from tests import bench
from tests.outputs import Crash, assert_same_job, assert_whole, status
from tests.trainer.sweeps.test_running import RATES, sweep_of, trial
from tests.trainer.test_saves import job
from tests.trainer.test_wall_time import Listener
from weftune import JobSpec, Options
from weftune.core.clock import Phase, PhaseClock, use_clock
from weftune.jobs.spec.layer import keys_from_keywords
from weftune.jobs.sweeps.spec import Trial
from weftune.report.read import read_wall_times


@pytest.fixture(scope="module")
def base():
    return bench.base()


def crashed_at(step):
    def callback(event):
        if event.step == step:
            raise Crash

    return callback


def test_a_restarted_job_begins_anew_although_it_has_checkpoints(base, tmp_path):
    with pytest.raises(Crash):
        bench.trainer(base, tmp_path / "out", [job("a", 5, save_every=1)]).run(crashed_at(4))
    assert list((tmp_path / "out" / "a" / "checkpoints").glob("step-*"))
    (tmp_path / "out" / "a" / "notes.txt").write_text("of the first try")
    other = job("a", 5, save_every=1, learning_rate=0.05)
    bench.train(base, tmp_path / "out", [other], resume=True, restart=("a",))
    bench.train(base, tmp_path / "want", [other])
    assert_same_job(tmp_path / "out", tmp_path / "want", "a")
    assert_whole(tmp_path / "out")
    assert not (tmp_path / "out" / "a" / "notes.txt").exists()


def test_the_retry_of_one_job_is_recorded_whichever_jobs_train_beside_it(base, tmp_path):
    wild = job("wild", 2, learning_rate=1e200, clip=None, schedule="constant")
    assert bench.train(base, tmp_path / "out", [wild])["wild"].state == "failed"
    options = Options(resume=True, retry=("wild",), changes={"learning_rate": 1e-3, "clip": 1.0})
    results = bench.trainer(base, tmp_path / "out", [job("new", 2), wild], options=options).run()
    assert {result.state for result in results.values()} == {"succeeded"}
    (note,) = status(tmp_path / "out")["jobs"]["wild"]["notes"]
    assert note.startswith("retried from step 0 with clip 1.0 (was None), learning_rate 0.001 (was 1e+200)")
    assert "retried" not in str(status(tmp_path / "out")["jobs"]["new"]["notes"])


class NextRate:
    """Proposes the learning rates in their order, one after another."""

    def next_generation(self, ended):
        rates = RATES[len(ended) : len(ended) + 1] if len(ended) < 5 else []
        return tuple(Trial(f"s-lr{rate:g}", {"learning_rate": rate}) for rate in rates)


def test_trials_that_an_earlier_run_has_proposed_are_jobs_of_the_resumed_one(tmp_path):
    model, keys = bench.base("opt"), {"steps": 2, "eval": {"fraction": 0.25, "every": 2}}
    jobs = [trial(rate, **keys) for rate in RATES[:3]]
    given = keys_from_keywords({item.name: getattr(jobs[0], item.name) for item in fields(JobSpec)})
    sweep = replace(sweep_of(jobs, at=(), search="tpe", trials=5, keep=1), keys=given)

    def run(callback=None, **options):
        made = bench.trainer(model, tmp_path / "out", jobs, options=Options(**options))
        return made.add_sweep(sweep, NextRate()).run(callback)

    first = {one.name for one in jobs}

    def callback(event):
        if event.job not in first and event.step == 1:
            raise Crash

    with pytest.raises(Crash):
        run(callback)
    results = run(resume=True)
    assert len(results) == 5
    assert {result.state for result in results.values()} == {"succeeded"}


def test_a_run_from_python_has_a_clock_of_its_own(base, tmp_path):
    view = Listener()
    bench.trainer(base, tmp_path / "out", [job(name, 1) for name in "abcdefgh"], view=view).run()
    (wall,) = read_wall_times(tmp_path / "out")
    for phase in (Phase.TOKENISING, Phase.TRAINING, Phase.EXPORT, Phase.REPORT):
        assert wall.phases[phase] > 0, phase
    assert sum(note.startswith("Wall time") for note in view.notes) == 1


def test_a_run_inside_a_command_counts_with_its_clock_and_leaves_the_last_line_to_it(base, tmp_path):
    view = Listener()
    with use_clock(PhaseClock()) as clock:
        bench.trainer(base, tmp_path / "out", [job("a", 1)], view=view).run()
    assert clock.read().phases[Phase.TRAINING] > 0
    assert not any(note.startswith("Wall time") for note in view.notes)
