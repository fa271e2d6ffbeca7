"""Jobs come and go while others train, and nobody else notices."""

import errno
from pathlib import Path

import pytest

from tests import bench, oracle
from tests.outputs import assert_same_job, assert_whole, lines, numbers, states, status
from tests.tensor_memory import tensor_bytes
from weftune import JobSpec
from weftune.errors import SpecError, UserError
from weftune.plan.layout.choose import WINDOW_ROUNDS
from weftune.run.events import Evaluated, Stepped
from weftune.run.executor import Executor
from weftune.run.measure.memory import bytes_before_base


def job(name, steps, **keys):
    rows = bench.rows(bench.samples(16, seed=sum(map(ord, name))))
    settings = {"batch_size": 4, "learning_rate": 1e-2, "adapter": {"rank": 4, "dropout": 0.1}}
    return JobSpec(name=name, data=rows, steps=steps, **settings | keys)


@pytest.fixture(scope="module")
def base():
    return bench.base()


def solo(base, tmp_path, spec):
    bench.train(base, tmp_path / f"solo-{spec.name}", [spec])
    return tmp_path / f"solo-{spec.name}"


def test_each_job_is_exported_when_it_ends_while_the_others_go_on(base, tmp_path):
    output = tmp_path / "out"
    jobs = [job("a", 3), job("b", 30), job("c", 7)]
    loaded = {}

    def callback(event):
        if isinstance(event, Stepped) and event.job == "b":
            for name in ("a", "c"):
                if name not in loaded and states(output)[name] == "succeeded":
                    loaded[name] = event.step, bench.adapter(output / name)

    trainer = bench.trainer(base, output, jobs)
    trainer.run(callback)
    # A job leaves at the end of the window in which it made its last step; a thread writes its adapter.
    assert loaded["a"][0] > WINDOW_ROUNDS
    assert loaded["c"][0] > 2 * WINDOW_ROUNDS
    for name, (_, weights) in loaded.items():
        assert oracle.distance(weights, bench.adapter(output / name)) == 0
    assert_whole(output)
    for spec in jobs:
        assert_same_job(output, solo(base, tmp_path, spec), spec.name)


def test_a_job_added_from_a_callback_runs_and_equals_its_solo_run(base, tmp_path):
    first, late = job("first", 14), job("late", 6, eval={"fraction": 0.3, "every": 2})
    trainer = bench.trainer(base, tmp_path / "out", [first])
    seen = []

    def callback(event):
        seen.append((event.job, event.step))
        if seen[-1] == ("first", 2):
            trainer.add(late)

    results = trainer.run(callback)
    assert set(results) == {"first", "late"}
    assert seen.index(("late", 1)) < seen.index(("first", 8)), "it came aboard while the first was training"
    assert any(len(program.jobs) == 2 for program in trainer.programs)
    assert_whole(tmp_path / "out")
    for spec in (first, late):
        assert_same_job(tmp_path / "out", solo(base, tmp_path, spec), spec.name)


def test_a_job_can_be_added_when_the_last_one_makes_its_last_step(base, tmp_path):
    first, late = job("first", 3), job("late", 3)
    trainer = bench.trainer(base, tmp_path / "out", [first])

    def callback(event):
        if (event.job, event.step) == ("first", 3):
            trainer.add(late)

    assert trainer.run(callback)["late"].state == "succeeded"
    assert_same_job(tmp_path / "out", solo(base, tmp_path, late), "late")


def test_a_job_that_cannot_be_added_is_refused_and_the_run_goes_on(base, tmp_path):
    trainer = bench.trainer(base, tmp_path / "out", [job("a", 6)])
    refused = []

    def callback(event):
        if event.step == 2:
            for bad in (job("a", 3), job("b", 3, adapter={"rank": 2, "targets": ["nothing"]})):
                try:
                    trainer.add(bad)
                except UserError as error:
                    refused.append(str(error))

    results = trainer.run(callback)
    assert list(results) == ["a"]
    assert results["a"].state == "succeeded"
    assert "there is already a job of that name" in refused[0]
    assert "nothing" in refused[1]


def test_an_early_stop_ends_the_job_inside_its_window_and_the_others_equal_the_run_without_it(base, tmp_path):
    eager = {"eval": {"fraction": 0.3, "every": 1}, "early_stop": 1, "learning_rate": 0.3}
    stops, other = job("stops", 30, **eager), job("other", 13)
    seen = []
    trainer = bench.trainer(base, tmp_path / "out", [stops, other])
    trainer.run(seen.append)
    ended = status(tmp_path / "out")["jobs"]["stops"]
    last = ended["step"]
    assert ended["reason"] == f"stopped early at step {last}: no better validation loss in 1 evaluation"
    assert last % WINDOW_ROUNDS != 0, "the test wants an end inside a window"
    of_it = [event for event in seen if event.job == "stops"]
    assert isinstance(of_it[-1], Evaluated)
    assert of_it[-1].step == max(event.step for event in of_it if isinstance(event, Stepped)) == last
    assert_whole(tmp_path / "out")
    for spec in (stops, other):
        assert_same_job(tmp_path / "out", solo(base, tmp_path, spec), spec.name)


def test_a_cancelled_job_makes_no_further_step_and_the_others_equal_the_run_without_it(base, tmp_path):
    victim, other, waiting = job("victim", 20), job("other", 9), job("waiting", 9)
    trainer = bench.trainer(base, tmp_path / "out", [victim, other])

    def callback(event):
        if (event.job, event.step) == ("victim", 2) and isinstance(event, Stepped):
            trainer.cancel("victim")
            trainer.add(waiting)
            trainer.cancel("waiting")

    results = trainer.run(callback)
    assert {name: result.state for name, result in results.items()} == {
        "victim": "cancelled", "other": "succeeded", "waiting": "cancelled",
    }  # fmt: skip
    assert [line["step"] for line in lines(tmp_path / "out") if line["job"] == "victim"] == [1, 2]
    assert [line for line in lines(tmp_path / "out") if line["job"] == "waiting"] == []
    assert not (tmp_path / "out" / "victim" / "adapter_model.safetensors").exists()
    assert_same_job(tmp_path / "out", solo(base, tmp_path, other), "other")
    with pytest.raises(SpecError, match="There is no running job victim"):
        trainer.cancel("victim")


MOMENTS = {
    "waiting": lambda event: (event.job, event.step) == ("other", 1),
    "first step": lambda event: (event.job, event.step) == ("victim", 1),
    "evaluation": lambda event: isinstance(event, Evaluated) and event.job == "victim" and event.step == 2,
    "last step": lambda event: isinstance(event, Stepped) and event.job == "victim" and event.step == 7,
    "paused": lambda event: (event.job, event.step) == ("other", 6),
    "ended": lambda event: (event.job, event.step) == ("other", 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_cancelled_in_any_state_a_job_ends_within_two_steps_and_its_memory_returns(
    base, tmp_path, moment, monkeypatch
):
    """In the state that it is in when the moment comes; the other job trains on as if alone."""
    victim, other = job("victim", 7, eval={"fraction": 0.3, "every": 2}, save_every=3), job("other", 16)
    trainer = bench.trainer(base, tmp_path / "out", [other] if moment == "waiting" else [victim, other])
    seen, taken = [], []

    def unwritable(self, name, folder, save=Executor.save):
        if moment == "paused" and name == "victim":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, name, folder)

    def callback(event):
        seen.append(event)
        if MOMENTS[moment](event) and not any(isinstance(one, tuple) for one in taken):
            if moment == "waiting":
                trainer.add(victim)
            before = trainer.loop.store.job("victim").state
            trainer.cancel("victim")
            taken.append((before, len(seen)))
        if event.job == "other" and event.step in (1, 16):
            taken.append(tensor_bytes())

    monkeypatch.setattr(Executor, "save", unwritable)
    results = trainer.run(callback)
    ((state, at),) = [one for one in taken if isinstance(one, tuple)]
    expected = {"waiting": "queued", "paused": "paused", "ended": "succeeded"}
    assert state == expected.get(moment, "running")
    assert results["victim"].state == ("succeeded" if moment == "ended" else "cancelled")
    assert len([event for event in seen[at:] if event.job == "victim" and isinstance(event, Stepped)]) <= 2
    first, last = [one for one in taken if isinstance(one, int)]
    assert last <= first * 1.01
    assert results["other"].state == "succeeded"
    bench.train(base, tmp_path / "alone", [other])
    assert_same_job(tmp_path / "out", tmp_path / "alone", "other")


@pytest.mark.slow
@pytest.mark.parametrize("times", [10, 500])
def test_joins_and_leaves_keep_memory_and_open_files_flat(base, tmp_path, times):
    trainer = bench.trainer(base, tmp_path / "out", [job("anchor", 40 * times + 60)])
    joined, taken = [], []

    def callback(event):
        assert trainer.loop is not None
        if event.job != "anchor" or len(joined) == times:
            if len(joined) == times:
                trainer.cancel("anchor")
            return
        if not joined or trainer.loop.store.job(joined[-1]).state.has_ended:
            if len(joined) in (times // 5, times - 1):
                # What is written or deleted beside training has files open.
                for name in ("anchor", *joined):
                    trainer.loop.executor.finish_saves(name)
                files = len(list(Path("/proc/self/fd").iterdir()))
                taken.append((tensor_bytes(), files, bytes_before_base(base.device)))
            joined.append(f"late-{len(joined)}")
            trainer.add(job(joined[-1], 1))

    results = trainer.run(callback)
    assert [result.state for name, result in results.items() if name != "anchor"] == ["succeeded"] * times
    for before, after in zip(*taken, strict=True):
        assert after <= before * 1.02, taken


def test_a_job_that_always_breaks_off_stops_at_once_and_blocks_nobody(base, tmp_path, monkeypatch):
    cursed, others = job("cursed", 9, priority=9, save_every=2), [job("a", 6), job("b", 9)]
    tries = []

    def unwritable(self, name, folder, save=Executor.save):
        if name == "cursed":
            tries.append(self.attached[name].progress.step)
            raise OSError(errno.EIO, "Input/output error")
        save(self, name, folder)

    monkeypatch.setattr(Executor, "save", unwritable)
    output = tmp_path / "out"
    for attempt in range(1, 4):
        bench.train(base, output, [cursed, *others], resume=output.exists())
        assert states(output) == {"cursed": "paused", "a": "succeeded", "b": "succeeded"}
        assert tries == [1] * attempt, "one try a run, at its first checkpoint"
    for spec in others:
        assert_same_job(output, solo(base, tmp_path, spec), spec.name)


def test_a_job_cancelled_while_all_are_evaluated_reports_no_evaluation(base, tmp_path):
    evaluations = {"eval": {"fraction": 0.3, "every": 2}}
    trainer = bench.trainer(base, tmp_path / "out", [job("a", 4, **evaluations), job("b", 4, **evaluations)])
    seen = []

    def callback(event):
        seen.append(event)
        if isinstance(event, Evaluated) and (event.job, event.step) == ("a", 2):
            trainer.cancel("b")

    results = trainer.run(callback)
    assert results["b"].state == "cancelled"
    where = next(i for i, e in enumerate(seen) if isinstance(e, Evaluated) and (e.job, e.step) == ("a", 2))
    assert [event for event in seen[where:] if event.job == "b"] == []


def test_keep_best_exports_the_weights_of_the_best_evaluation(base, tmp_path):
    eager = {"eval": {"fraction": 0.3, "every": 1}, "learning_rate": 0.03, "schedule": "constant"}
    bench.train(base, tmp_path / "out", [job("a", 8, keep="best", **eager)])
    evaluations = {step: loss for step, what, loss in numbers(tmp_path / "out", "a") if what == "eval_loss"}
    best = min(evaluations, key=evaluations.__getitem__)
    assert 0 < best < 8, "the test wants a best that is neither the start nor the end"
    assert status(tmp_path / "out")["jobs"]["a"]["best_step"] == best
    trainer = bench.trainer(base, tmp_path / "again", [job("a", 8, **eager)])
    at_best = {}

    def callback(event):
        if isinstance(event, Evaluated) and event.step == best:
            training = trainer.loop.executor.attached["a"]
            at_best.update(
                {key: v.clone() for key, v in training.layout.parameter_views(training.master).items()}
            )

    trainer.run(callback)
    exported = bench.adapter(tmp_path / "out" / "a")
    for (site, name), value in at_best.items():
        part, want = ("lora_A", value) if name == "a_rK" else ("lora_B", value.T)
        assert (exported[f"base_model.model.{site}.{part}.weight"] - want).norm() <= 1e-12 * want.norm()
    assert oracle.distance(bench.adapter(tmp_path / "again" / "a"), exported) > 1e-3, "the last is another"


def test_a_run_without_jobs_is_refused(base, tmp_path):
    with pytest.raises(SpecError, match="There is no job to train"):
        bench.trainer(base, tmp_path / "out", []).run()
