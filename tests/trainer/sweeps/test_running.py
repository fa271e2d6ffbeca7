"""Sweeps inside a run: trials rest at rungs and come back, leave, and the winners are in `best`."""

import json
import shutil
from dataclasses import fields, replace

import pytest
import torch

from tests import bench, oracle
from tests.outputs import Crash, assert_same_job, lines, numbers, states, status
from weftune import JobSpec, Options
from weftune.errors import OutputError, SpecError
from weftune.jobs.spec.layer import keys_from_keywords
from weftune.jobs.store.store import open_store
from weftune.jobs.sweeps.record import best_folder
from weftune.jobs.sweeps.running import RunningSweep
from weftune.jobs.sweeps.spec import Halving, Sweep, SweepSpec, Trial
from weftune.run.events import Stepped

STEPS = 12
RATES = [3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4]


@pytest.fixture(scope="module")
def base():
    return bench.base("opt")


ROWS = bench.rows(bench.samples(24, seed=7))


def trial(rate, **keys):
    settings = {
        "batch_size": 4,
        "steps": STEPS,
        "save_every": 4,
        "adapter": {"rank": 3, "dropout": 0.1},
        "eval": {"fraction": 0.25, "every": 6},
    }
    return JobSpec(name=f"s-lr{rate:g}".replace("+", ""), data=ROWS, learning_rate=rate, **settings | keys)


def sweep_of(jobs, name="s", at=(0.25, 0.5), share=0.5, keep=2, **keys):
    spec = SweepSpec(over={"learning_rate": tuple(RATES)}, halving=Halving(at, share), keep=keep, **keys)
    return Sweep(name, spec, tuple(Trial(job.name, {"learning_rate": job.learning_rate}) for job in jobs))


def sweeping(base, output, jobs, sweep=None, others=(), **options):
    made = bench.trainer(base, output, [*jobs, *others], options=Options(**options))
    return made.add_sweep(sweep or sweep_of(jobs))


def record(output, name="s"):
    return json.loads((output / name / "sweep.json").read_text())


def decided(output):
    return [(one["step"], one["kept"], one["left"]) for one in record(output)["decisions"]]


@pytest.fixture(scope="module")
def jobs():
    return [trial(rate) for rate in RATES]


@pytest.fixture(scope="module")
def undisturbed(base, jobs, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    trainer = sweeping(base, output, jobs)
    trainer.run()
    return output, trainer.programs


def test_halving_trains_the_best_of_each_rung_on_and_leaves_the_winners_in_best(undisturbed):
    output, programs = undisturbed
    (first, second) = decided(output)
    assert (first[0], len(first[1]), len(first[2])) == (3, 3, 3)
    assert (second[0], len(second[1]), len(second[2])) == (6, 2, 1)
    assert set(second[1]) | set(second[2]) == set(first[1])
    found = record(output)
    for one in found["trials"]:
        job = status(output)["jobs"][one["name"]]
        if one["name"] in first[2]:
            assert (job["state"], job["step"], one["state"], one["left_at"]) == ("cancelled", 3, "left", 3)
            assert job["reason"].startswith("left the sweep at step 3: ")
            assert job["reason"].endswith(" of 6, the best 3 continue")
            assert one["reason"] == job["reason"]
        elif one["name"] in second[1]:
            assert (job["state"], job["step"], one["state"]) == ("succeeded", STEPS, "finished")
        assert (output / one["name"] / "adapter_model.safetensors").exists() == (one["name"] in second[1])
        assert not (output / one["name"] / "checkpoints").exists()
    scores = {one["name"]: one["score"] for one in found["trials"]}
    assert found["best"] == sorted(second[1], key=scores.get)
    assert found["samples"] == {"trained": 4 * (3 * 3 + 6 + 2 * STEPS), "all": 4 * 6 * STEPS}
    assert {path.name for path in (output / "s" / "best").iterdir()} == set(found["best"])
    for name in found["best"]:
        winner = best_folder(output / "s", name)
        assert oracle.distance(bench.adapter(winner), bench.adapter(output / name)) == 0
        assert {"adapter_config.json", "job.yaml", "tokenizer.json"} <= {
            path.name for path in winner.iterdir()
        }
    assert len({frozenset(program.jobs) for program in programs}) <= 4


def test_when_all_are_aboard_nobody_is_saved_or_moved_for_a_rung(base, jobs, tmp_path, monkeypatch):
    from weftune.trainer.loop import Loop

    moved = []
    monkeypatch.setattr(Loop, "_save_and_detach", lambda self, names: moved.append(names) or [])
    sweeping(base, tmp_path / "out", [replace(job, save_every=None) for job in jobs]).run()
    assert moved == []
    assert sorted(states(tmp_path / "out").values()) == ["cancelled"] * 4 + ["succeeded"] * 2


def test_a_trial_equals_the_same_job_alone(base, jobs, undisturbed, tmp_path):
    output, _ = undisturbed
    winner = next(job for job in jobs if job.name == record(output)["best"][0])
    bench.train(base, tmp_path / "solo", [winner])
    assert_same_trial(output, tmp_path / "solo", winner.name)


def assert_same_trial(output, solo, name):
    """Equal in all that the job alone has; in the sweep it is evaluated at rungs too."""
    want = numbers(solo, name)
    keys = {item[:2] for item in want}
    got = [item for item in numbers(output, name) if item[:2] in keys]
    assert [item[:2] for item in got] == [item[:2] for item in want]
    for mine, theirs in zip(got, want, strict=True):
        assert abs(mine[2] - theirs[2]) <= 1e-9 * abs(theirs[2]), (name, mine[:2])
    assert oracle.distance(bench.adapter(output / name), bench.adapter(solo / name)) <= 1e-8
    for key in ("step", "steps", "trained_tokens", "best_step"):
        assert status(output)["jobs"][name][key] == status(solo)["jobs"][name][key]


class JobLimit:
    """At most so many jobs aboard: as if memory held no more."""

    def __init__(self, monkeypatch, most):
        from weftune.plan.cost.fitted import FittedModels

        real = FittedModels.misfit_reason
        monkeypatch.setattr(
            FittedModels,
            "misfit_reason",
            lambda self, jobs: "no seat" if len(jobs) > most else real(self, jobs),
        )


def test_trials_rest_at_a_rung_while_others_take_their_seats_and_come_back_to_the_same_curves(
    base, jobs, undisturbed, tmp_path, monkeypatch
):
    JobLimit(monkeypatch, 2)
    output, seen = tmp_path / "out", []

    def callback(event):
        if isinstance(event, Stepped):
            resting = [one["name"] for one in record(output)["trials"] if one["state"] == "resting"]
            seen.append((event.job, event.step, tuple(resting)))
            for name in resting:
                job = status(output)["jobs"][name]
                if job["state"] == "queued":
                    assert job["reason"] in (
                        "waits for the others at step 3",
                        "waits for the others at step 6",
                    )

    sweeping(base, output, jobs).run(callback)
    assert max(len(resting) for _, _, resting in seen) >= 4
    want, _ = undisturbed
    assert decided(output) == decided(want)
    assert record(output)["best"] == record(want)["best"]
    for name in record(want)["best"]:
        assert_same_job(output, want, name)
    assert {name: numbers_of(output, name) for name in states(want)} == {
        name: numbers_of(want, name) for name in states(want)
    }


def numbers_of(output, name):
    return [(step, what) for step, what, _ in numbers(output, name)]


def test_evaluations_at_rungs_count_neither_for_the_early_stop_nor_for_the_best_weights(base, tmp_path):
    keys = {"early_stop": 2, "keep": "best", "eval": {"fraction": 0.25, "every": 4}}
    jobs = [trial(0.2, **keys), trial(1e-3, **keys)]
    sweep = sweep_of(jobs, at=(0.1, 0.4, 0.6), share=0.9)
    sweeping(base, tmp_path / "out", jobs, sweep).run()
    for job in jobs:
        bench.train(base, tmp_path / job.name, [job])
        assert_same_trial(tmp_path / "out", tmp_path / job.name, job.name)


def test_a_trial_that_fails_is_a_row_with_a_reason_and_the_others_go_on(base, jobs, tmp_path):
    broken = trial(1e200, clip=None)
    sweeping(base, tmp_path / "out", [*jobs[:3], broken], sweep_of([*jobs[:3], broken])).run()
    row = next(one for one in record(tmp_path / "out")["trials"] if one["name"] == broken.name)
    assert row["state"] == "failed"
    assert row["reason"] == status(tmp_path / "out")["jobs"][broken.name]["reason"] != ""
    assert row["left_at"] is not None
    (first, *_) = decided(tmp_path / "out")
    assert len(first[1]) == 2, "it began the rung with the others"
    assert broken.name not in first[1] + first[2]


def test_a_trial_whose_training_loss_does_not_fall_leaves_between_rungs(base, tmp_path):
    jobs = [trial(1e-2, steps=40), trial(1e-30, steps=40, schedule="constant")]
    sweeping(base, tmp_path / "out", jobs, sweep_of(jobs, at=(0.9,), share=0.9)).run()
    job = status(tmp_path / "out")["jobs"]["s-lr1e-30"]
    row = record(tmp_path / "out")["trials"][1]
    assert job["state"] == "cancelled"
    assert 20 <= job["step"] < 36
    assert job["reason"].startswith(f"left the sweep at step {job['step']}: its training loss does not fall")
    assert (row["state"], row["reason"], row["left_at"]) == ("left", job["reason"], job["step"])
    assert not (tmp_path / "out" / "s-lr1e-30" / "checkpoints").exists()
    assert record(tmp_path / "out")["best"] == ["s-lr0.01"]
    (tmp_path / "out" / "status.json").write_text("{")
    sweeping(base, tmp_path / "out", jobs, sweep_of(jobs, at=(0.9,), share=0.9), resume=True).run()
    assert status(tmp_path / "out")["jobs"]["s-lr1e-30"]["reason"] == job["reason"], "the record knows it"


def test_a_sweep_beside_ordinary_jobs_changes_nothing_for_them(base, jobs, tmp_path):
    other = (
        trial(1e-2, steps=9).name,
        JobSpec(name="other", data=ROWS, steps=9, batch_size=4, adapter={"rank": 2}),
    )
    sweeping(base, tmp_path / "out", jobs, others=[other[1]]).run()
    bench.train(base, tmp_path / "solo", [other[1]])
    assert_same_job(tmp_path / "out", tmp_path / "solo", "other")


def events(output):
    return sum(1 for _ in lines(output))


@pytest.mark.parametrize(
    ("most", "parts"),
    [
        (6, (0.3, 0.7)),
        pytest.param(6, (0.55,), marks=pytest.mark.slow),
        pytest.param(2, (0.3, 0.55, 0.7), marks=pytest.mark.slow),
    ],
)
def test_crashed_at_any_event_it_resumes_to_the_same_decisions_and_adapters(
    base, jobs, undisturbed, tmp_path, monkeypatch, most, parts
):
    want, _ = undisturbed
    JobLimit(monkeypatch, most)
    output, total = tmp_path / "out", events(want)
    for part in parts:
        count = 0

        def callback(event, at=int(total * part)):
            nonlocal count
            count += 1
            if count == at:
                raise Crash

        shutil.rmtree(output, ignore_errors=True)
        with pytest.raises(Crash):
            sweeping(base, output, jobs).run(callback)
        sweeping(base, output, jobs, resume=True).run()
        assert_same_sweep(output, want)


def assert_same_sweep(output, want):
    assert decided(output) == decided(want)
    assert record(output)["best"] == record(want)["best"]
    assert states(output) == states(want)
    for name in record(want)["best"]:
        assert_same_job(output, want, name)
        assert (
            oracle.distance(
                bench.adapter(best_folder(output / "s", name)), bench.adapter(best_folder(want / "s", name))
            )
            < 1e-8
        )
    assert not list(output.glob("*/checkpoints"))


def test_interrupted_while_trials_rest_it_goes_on_with_resume(base, jobs, undisturbed, tmp_path, monkeypatch):
    import signal

    JobLimit(monkeypatch, 2)
    output = tmp_path / "out"

    def callback(event):
        if (event.job, event.step) == (jobs[3].name, 2):
            signal.raise_signal(signal.SIGINT)

    sweeping(base, output, jobs).run(callback)
    assert set(states(output).values()) == {"paused"}
    monkeypatch.undo()
    sweeping(base, output, jobs, resume=True).run()
    assert_same_sweep(output, undisturbed[0])


def test_killed_before_best_was_written_or_before_the_left_were_cancelled_resume_does_it(
    base, jobs, undisturbed, tmp_path
):
    output = tmp_path / "out"
    shutil.copytree(undisturbed[0], output)
    shutil.rmtree(output / "s" / "best")
    (output / "s" / ".best.partial" / "half").mkdir(parents=True)
    whole = status(output)
    left = decided(output)[1][2][0]
    whole["jobs"][left]["state"] = "running"
    del whole["checksum"]
    (output / "status.json").write_text(json.dumps(whole))
    sweeping(base, output, jobs, resume=True).run()
    assert_same_sweep(output, undisturbed[0])
    assert not (output / "s" / ".best.partial").exists()


def test_where_the_metrics_end_before_a_decided_rung_the_score_is_the_recorded_one(
    jobs, undisturbed, tmp_path
):
    """As after a kill behind a decision, before the next checkpoint."""
    output = tmp_path / "out"
    shutil.copytree(undisturbed[0], output)
    metrics = (output / "metrics.jsonl").read_text().splitlines(keepends=True)
    (output / "metrics.jsonl").write_text("".join(line for line in metrics if json.loads(line)["step"] == 0))
    name = decided(output)[0][1][0]
    (trial,) = [one for one in record(output)["trials"] if one["name"] == name]
    with open_store(output, resume=True) as store:
        sweep = RunningSweep(sweep_of(jobs), store, {job.name: job for job in jobs}, print, None)
        sweep.restore()
        sweep._scores.clear()
        assert sweep.score(name) == trial["at_rungs"]["6"] != trial["at_rungs"]["3"]


def test_a_damaged_record_is_rebuilt_from_the_metrics(base, jobs, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed[0], output)
    (output / "s" / "sweep.json").write_text("{")
    sweeping(base, output, jobs, resume=True).run()
    assert [one[:2] for one in decided(output)] == [one[:2] for one in decided(undisturbed[0])]
    assert record(output)["best"] == record(undisturbed[0])["best"]
    assert any("sweep.json was damaged" in note for note in status(output)["notes"])


def test_a_sweep_that_has_begun_cannot_go_on_with_other_settings(base, jobs, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed[0], output)
    with pytest.raises(OutputError, match=r"other settings: halving\.keep, its trials changed"):
        sweeping(base, output, jobs, sweep_of(jobs[:4], share=0.3), resume=True).run()


def test_a_trial_that_the_sweep_has_decided_against_is_not_trained_again(base, jobs, undisturbed, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(undisturbed[0], output)
    left = decided(output)[0][2][0]
    for option in ("restart", "retry"):
        with pytest.raises(SpecError, match=f"--{option} {left}: the sweep s has decided at step 3"):
            sweeping(base, output, jobs, resume=True, **{option: (left,)}).run()
    winner = record(output)["best"][0]
    sweeping(base, output, jobs, resume=True, restart=(winner,)).run()
    assert_same_sweep(output, undisturbed[0])


class Halves:
    """Proposes a part of the best learning rate so far, twice."""

    def next_generation(self, ended):
        if len(ended) >= 5:
            return ()
        best = min(ended, key=lambda one: one[1] if one[1] is not None else 1e9)[0]
        rate = best.values["learning_rate"] / len(ended)
        return (Trial(f"s-lr{rate:g}", {"learning_rate": rate}),)


@pytest.mark.slow
def test_later_generations_are_asked_when_the_one_before_has_ended_and_survive_a_crash(base, tmp_path):
    jobs = [trial(rate, steps=6) for rate in RATES[:3]]
    keys = keys_from_keywords({item.name: getattr(jobs[0], item.name) for item in fields(JobSpec)})
    sweep = replace(sweep_of(jobs, at=(0.5,), share=0.4, search="tpe", trials=5, keep=1), keys=keys)

    def run(output, callback=None, **options):
        made = bench.trainer(base, output, jobs, options=Options(**options))
        return made.add_sweep(sweep, Halves()).run(callback)

    results = run(tmp_path / "want")
    found = record(tmp_path / "want")
    assert [one["generation"] for one in found["trials"]] == [0, 0, 0, 1, 2]
    assert found["expected"] == len(results) == 5
    assert results[found["best"][0]].state == "succeeded"
    last = found["trials"][-1]["name"]

    def callback(event):
        if event.step == 1:
            assert record(tmp_path / "out")["expected"] == 5
        if event.job == last and event.step == 4:
            raise Crash

    with pytest.raises(Crash):
        run(tmp_path / "out", callback)
    assert len(run(tmp_path / "out", resume=True)) == 5
    assert decided(tmp_path / "out") == decided(tmp_path / "want")
    assert record(tmp_path / "out")["best"] == found["best"]

    before, steps = bench.adapter(tmp_path / "out" / last), len(bench.losses(tmp_path / "out", last))
    shutil.rmtree(tmp_path / "out" / last)
    assert run(tmp_path / "out", resume=True, restart=(last,))[last].state == "succeeded"
    assert oracle.distance(bench.adapter(tmp_path / "out" / last), before) == 0
    assert len(bench.losses(tmp_path / "out", last)) == steps == 6
    assert record(tmp_path / "out")["best"] == found["best"]
    with pytest.raises(SpecError, match=f"--restart nobody: there is no such job; known: .*{last}"):
        run(tmp_path / "out", resume=True, restart=("nobody",))


def test_a_resting_trial_can_be_cancelled(base, jobs, tmp_path, monkeypatch):
    JobLimit(monkeypatch, 2)
    output = tmp_path / "out"
    trainer = sweeping(base, output, jobs[:4], sweep_of(jobs[:4]))
    done = []

    def callback(event):
        resting = [one["name"] for one in record(output)["trials"] if one["state"] == "resting"]
        if resting and not done and status(output)["jobs"][resting[0]]["state"] == "queued":
            done.append(resting[0])
            trainer.cancel(resting[0])

    trainer.run(callback)
    row = next(one for one in record(output)["trials"] if one["name"] == done[0])
    assert row["state"] == "left"
    assert done[0] not in decided(output)[0][1]
    assert record(output)["best"]


def rough(rates, **keys):
    """Trials whose losses rise and fall from one evaluation to the next."""
    keys = {"schedule": "constant", "warmup": 0, "eval": {"fraction": 0.25, "every": 1}} | keys
    return [trial(rate, **keys) for rate in rates]


def test_a_dropped_trial_shows_what_its_rung_has_judged_although_it_keeps_its_best(base, tmp_path):
    """Its best evaluation is that of the base, before its first step."""
    jobs = rough([1e-3, 0.5, 1.0], keep="best")
    sweeping(base, tmp_path / "out", jobs, sweep_of(jobs, at=(0.5,), share=0.3)).run()
    dropped = [one for one in record(tmp_path / "out")["trials"] if one["state"] == "left"]
    assert len(dropped) == 2
    for one in dropped:
        assert status(tmp_path / "out")["jobs"][one["name"]]["best_step"] != 6, "the case tells them apart"
        assert (one["score"], one["score_step"]) == (one["at_rungs"]["6"], 6)


def test_a_finished_trial_shows_its_kept_adapter_and_its_step(base, tmp_path):
    jobs = rough([1e-3, 0.3], keep="best")
    sweeping(base, tmp_path / "out", jobs, sweep_of(jobs, at=(), share=0.5)).run()
    for one in record(tmp_path / "out")["trials"]:
        job = status(tmp_path / "out")["jobs"][one["name"]]
        assert (one["score"], one["score_step"]) == (job["eval_loss"], job["best_step"])


def collapsed_and_healthy():
    zeros = [{"input_ids": [5, *[0] * length], "labels": [-100, *[0] * length]} for length in range(3, 27)]
    keys = {"warmup": 0, "schedule": "constant", "adapter": {"rank": 3}}
    counting = [{"input_ids": [*range(4, 9 + length)]} for length in range(24)]
    return [replace(trial(1e6, **keys), data=zeros), replace(trial(1e-3, **keys), data=counting)]


def test_a_trial_that_has_collapsed_never_beats_a_healthy_one(tmp_path):
    """A collapsed adapter predicts token 0, which is always right here, and the metric is accuracy."""
    jobs = collapsed_and_healthy()
    sweep = sweep_of(jobs, at=(), keep=1, metric="eval_mean_token_accuracy", mode="max")
    sweeping(bench.base("llama", torch.float32), tmp_path / "out", jobs, sweep).run()
    dead, healthy = record(tmp_path / "out")["trials"]
    assert (dead["state"], dead["score"]) == ("finished", 1.0)
    assert dead["warning"].startswith("the adapter has collapsed")
    assert healthy["score"] < 1.0
    assert record(tmp_path / "out")["best"] == [healthy["name"]]


def test_a_trial_that_has_collapsed_is_the_worst_at_a_rung(tmp_path):
    jobs = collapsed_and_healthy()
    sweep = sweep_of(jobs, at=(0.5,), keep=1, metric="eval_mean_token_accuracy", mode="max")
    sweeping(bench.base("llama", torch.float32), tmp_path / "out", jobs, sweep).run()
    assert decided(tmp_path / "out") == [(6, [jobs[1].name], [jobs[0].name])]


def test_where_no_trial_improves_on_the_base_the_lowest_loss_is_kept_and_marked(base, tmp_path):
    jobs = rough([1.0, 0.5, 2.0], steps=4)
    sweep = sweep_of(jobs, at=(), keep=1, metric="eval_mean_token_accuracy", mode="max")
    made = sweeping(base, tmp_path / "out", jobs, sweep)
    made.run()
    found = record(tmp_path / "out")
    losses = {name: one["eval_loss"] for name, one in status(tmp_path / "out")["jobs"].items()}
    assert all("is above that of the base" in one["warning"] for one in found["trials"])
    assert found["best"] == [min(losses, key=losses.get)]
    assert any(
        "no trial of the sweep s improved on the base" in note for note in status(tmp_path / "out")["notes"]
    )


def test_the_last_trial_stays_although_its_training_loss_does_not_fall(base, tmp_path):
    jobs = [trial(rate, steps=40, schedule="constant") for rate in (1e-30, 1e-29)]
    sweeping(base, tmp_path / "out", jobs, sweep_of(jobs, at=())).run()
    assert sorted(one["state"] for one in record(tmp_path / "out")["trials"]) == ["finished", "left"]
    assert len(record(tmp_path / "out")["best"]) == 1
