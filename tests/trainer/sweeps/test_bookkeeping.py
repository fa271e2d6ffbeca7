"""A sweep's own bookkeeping, with a real store and no training: scores, ends, seats and failed writes."""

import pytest

from tests import bench
from tests.run import executors
from weftune import JobSpec
from weftune.errors import OutputError
from weftune.jobs.store.status import State
from weftune.jobs.store.store import open_store
from weftune.jobs.sweeps import running
from weftune.jobs.sweeps.halving import TrialEnd
from weftune.jobs.sweeps.record import read_record
from weftune.jobs.sweeps.running import RunningSweep
from weftune.jobs.sweeps.spec import Halving, Sweep, SweepSpec, Trial
from weftune.run.training import checkpoint
from weftune.trainer.sweeps import Sweeps

STEPS = 8
NAMES = ("s-a", "s-b", "s-c", "s-d")


def sweep_of(names=NAMES, at=(0.5,), **keys):
    spec = SweepSpec(over={"seed": tuple(range(4))}, halving=Halving(at, 0.5, judge="last"), **keys)
    return Sweep("s", spec, tuple(Trial(name, {"seed": number}) for number, name in enumerate(names)))


def running_sweep(store, sweep, jobs=None, search=None, told=None):
    made = RunningSweep(sweep, store, jobs or {}, [].append if told is None else told.append, search)
    made.restore()
    return made


def jobs_kept(keep):
    keys = {"data": [{"text": "one"}, {"text": "two"}], "eval": {"fraction": 0.5}, "keep": keep}
    return {name: JobSpec(name=name, **keys) for name in NAMES}


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "out", resume=False) as opened:
        yield opened


@pytest.mark.parametrize(("keep", "score"), [("last", 3.0), ("best", 1.0)])
def test_a_trial_is_ranked_by_the_step_whose_weights_it_keeps(store, keep, score):
    sweep = running_sweep(store, sweep_of(), jobs_kept(keep))
    store.add_job("s-a")
    store.evaluate_job("s-a", score, 2, 1.0)
    sweep.rungs.add_trial("s-a", STEPS)
    sweep.record_evaluation("s-a", 2, 1.0, 0.5)
    sweep.record_evaluation("s-a", 6, 3.0, 0.5)
    sweep.rungs.end_trial("s-a", TrialEnd.FINISHED, STEPS)
    assert sweep.score("s-a") == score


class OneMore:
    """Proposes one more trial, whenever it is asked."""

    def next_generation(self, ended):
        return (Trial(f"s-more{len(ended)}", {"seed": len(ended)}),)


def test_a_generation_that_could_not_be_recorded_is_proposed_again(store, monkeypatch):
    told = []
    sweep = sweep_of(search="tpe", trials=6)
    made = running_sweep(store, sweep, search=OneMore(), told=told)
    for name in NAMES:
        made.record_refusal(name, "no data")

    def full(folder, record):
        raise OutputError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(running, "write_record", full)
        assert made.propose_trials() == ()
    assert told == ["warning: no space left on device; training continues, and it is tried again."]
    assert read_record(made.folder) is None
    assert [one.name for one in made.propose_trials()] == ["s-more4"]
    assert [one.generation for one in read_record(made.folder).trials] == [0, 0, 0, 0, 1]


def test_a_retried_trial_is_not_ended_again_by_the_record_when_the_status_was_rebuilt(tmp_path):
    output = tmp_path / "out"
    with open_store(output, resume=False) as store:
        made = running_sweep(store, sweep_of())
        for name in NAMES:
            store.add_job(name)
            made.rungs.add_trial(name, STEPS)
            (output / name).mkdir()
            (output / name / "job.yaml").write_text(f"name: {name}\n")
        for name in NAMES[:2]:
            store.move_job(name, State.FAILED, "the loss is not finite")
        made.finish()
    (output / "status.json").write_text("{")
    with open_store(output, resume=True) as store:
        assert store.rebuild_note
        assert store.job("s-a").state is not State.FAILED
        again = RunningSweep(sweep_of(), store, {}, print, None)
        again.restore(retried_trials=["s-a"])
        assert not store.job("s-a").state.has_ended
        assert "s-a" not in again.rungs.ended_trials
        assert store.job("s-b").state is State.FAILED


def test_a_trial_that_leaves_is_told_the_step_of_its_own_rung(store):
    """Where the number of steps is searched over, every trial has rungs of its own."""
    sweep = running_sweep(store, sweep_of(NAMES[:2]))
    for name, steps, loss in zip(NAMES, (8, 20), (1.0, 2.0), strict=False):
        store.add_job(name)
        sweep.rungs.add_trial(name, steps)
        sweep.record_evaluation(name, steps // 2, loss, 0.5)
    orders = sweep.trial_orders(dict.fromkeys(NAMES[:2], 1), ())
    assert orders.leave_reasons == {"s-b": "left the sweep at step 10: 2nd of 2, the best continues"}
    assert read_record(sweep.folder).trials[1].left_at == 10


@pytest.mark.parametrize(("step", "rests"), [(3, False), (4, True)])
def test_a_trial_that_was_saved_at_its_rung_rests_without_being_loaded(store, step, rests):
    base = bench.base()
    ready = executors.prepare(base, "s-a", steps=STEPS)
    training = executors.job_training(base, ready)
    training.progress.step = step
    checkpoint.save(store.output / "s-a" / "checkpoints", training)
    sweep = running_sweep(store, sweep_of())
    sweep.rungs.add_trial("s-a", STEPS)
    sweep.record_evaluation("s-a", 4, 1.0, 0.5)
    entered = Sweeps([sweep]).add_trial(ready)
    assert entered.step_limit == 4
    assert sweep.resting == ({"s-a"} if rests else set())


def test_trials_that_had_ended_before_the_run_are_not_waited_for(store):
    for name in NAMES:
        store.add_job(name)
        store.move_job(name, State.FAILED, "the loss is not finite")
    sweep = sweep_of(search="tpe", trials=6)
    made = running_sweep(store, sweep, search=OneMore())
    assert [one.name for one in made.propose_trials()] == ["s-more4"]


def test_a_trial_that_rests_in_vain_is_told_which_other_has_not_come_as_far(store):
    sweep = running_sweep(store, sweep_of(NAMES[:3]))
    for name in NAMES[:3]:
        store.add_job(name)
        sweep.rungs.add_trial(name, STEPS)
    sweep.rungs.end_trial("s-b", TrialEnd.FAILED, 1)
    sweep.resting.add("s-a")
    ((name, reason),) = Sweeps([sweep]).stranded_trials()
    assert name == "s-a"
    assert reason.startswith("waits at step 4 for s-c, which ")


@pytest.mark.parametrize(("running", "state"), [({}, "waiting"), ({"s-a": 0}, "resting")])
def test_a_trial_of_one_step_has_its_rung_at_its_start_and_rests_there_once_it_is_aboard(
    store, running, state
):
    sweep = running_sweep(store, sweep_of(NAMES[:2]))
    for name in NAMES[:2]:
        store.add_job(name)
        sweep.rungs.add_trial(name, 1)
    sweep.record_evaluation("s-a", 0, 1.0, 0.5)
    sweep.trial_orders(running, ())
    assert read_record(sweep.folder).trials[0].state == state
