"""Rungs that judge the mean of a trial's last weights: what they see, and that nothing else changes."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from peft import get_peft_model, set_peft_model_state_dict

from tests import bench, oracle
from tests.cases import slow_but
from tests.families import tiny
from tests.outputs import Crash, assert_same_job, lines, numbers, states, status
from tests.trainer.sweeps.test_running import (
    JobLimit,
    assert_same_sweep,
    assert_same_trial,
    decided,
    record,
    sweep_of,
    sweeping,
    trial,
)
from weftune.adapters.lora.spec import A, weight_names
from weftune.core.files import cache_folder
from weftune.errors import OutputError
from weftune.jobs.sweeps.running import RunningSweep
from weftune.jobs.sweeps.spec import Halving
from weftune.report.read import read_run
from weftune.run.events import Evaluated, Stepped
from weftune.run.training import checkpoint
from weftune.trainer.job import prepare_job
from weftune.trainer.sweeps import Sweeps

STEPS = 16
AT = (0.5, 0.75)
SPANS = {8: (7, 8), 12: (10, 12)}
"""Rung → the steps whose weights it judges."""
RATES = [0.2, 3e-2, 3e-3, 1e-4]


@pytest.fixture(scope="module")
def base():
    return bench.base("opt")


@pytest.fixture(scope="module")
def jobs():
    keys = {"steps": STEPS, "save_every": 1, "eval": {"fraction": 0.25, "every": 4}}
    return [trial(rate, **keys) for rate in RATES]


def halved(jobs, judge="mean", keep=1):
    sweep = sweep_of(jobs, at=AT, keep=keep)
    return replace(sweep, spec=replace(sweep.spec, halving=Halving(AT, 0.5, judge)))


def run(base, output, jobs, callback=None, judge="mean", **options):
    trainer = sweeping(base, output, jobs, halved(jobs, judge), **options)
    trainer.run(callback)
    return trainer


@pytest.fixture(scope="module")
def undisturbed(base, jobs, tmp_path_factory):
    """The output, the events that the callback heard, and every trial's adapter after each step."""
    output, heard, adapters = tmp_path_factory.mktemp("means") / "out", [], {}
    trainer = sweeping(base, output, jobs, halved(jobs))

    def callback(event):
        heard.append(event)
        training = trainer.loop.executor.attached[event.job]
        if isinstance(event, Stepped):
            adapters[event.job, event.step] = named(training)

    trainer.run(callback)
    return output, heard, adapters


def named(training):
    """The master weights under PEFT's names."""
    found = {}
    for (site, name), value in training.layout.parameter_views(training.master).items():
        a_name, b_name = weight_names(site)
        found[a_name if name == A else b_name] = (value if name == A else value.T).clone()
    return found


def rung_lines(output):
    return {(one["job"], one["step"]): one for one in lines(output) if "rung_loss" in one}


@pytest.mark.slow
def test_a_rung_judges_what_peft_finds_of_the_mean_of_the_last_adapters(base, jobs, undisturbed):
    output, _, adapters = undisturbed
    judged = rung_lines(output)
    assert {step for _, step in judged} == set(SPANS)
    assert len(judged) == 4 + 2
    model = tiny("opt", torch.float64, 0)
    held_out, by_name = held_out_samples(base, jobs[0]), {job.name: job for job in jobs}
    for (name, step), line in judged.items():
        first, last = SPANS[step]
        steps = [adapters[name, at] for at in range(first, last + 1)]
        mean = {key: torch.stack([one[key] for one in steps]).mean(0) for key in steps[0]}
        assert line["rung_loss"] == pytest.approx(peft_loss(model, by_name[name], mean, held_out), rel=1e-9)
        assert line["rung_loss"] != pytest.approx(
            peft_loss(model, by_name[name], steps[-1], held_out), rel=1e-7
        )
        assert 0 <= line["rung_token_accuracy"] <= 1
        assert line["rung_tokens"] > 0


def held_out_samples(base, job):
    held_out = prepare_job(job, 0, bench.tokenizer(), base.shape, cache_folder()).data.evaluation
    found = [held_out.tokens_and_mask(index) for index in range(len(held_out))]
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in found]


def peft_loss(model, job, weights, samples):
    config = oracle.lora_config(model, job.adapter.rank, job.adapter.alpha, "all-linear")
    peft_model = get_peft_model(copy.deepcopy(model), config)
    set_peft_model_state_dict(peft_model, weights)
    return oracle.mean_loss(peft_model.to(model.dtype).eval(), samples)


def test_its_values_decide_and_stand_in_the_record(undisturbed):
    output, _, _ = undisturbed
    judged = rung_lines(output)
    for one in record(output)["trials"]:
        assert one["at_rungs"] == {
            str(step): line["rung_loss"] for (job, step), line in judged.items() if job == one["name"]
        }
    first, second = decided(output)
    ranked = sorted((line["rung_loss"], name) for (name, step), line in judged.items() if step == 8)
    assert [name for _, name in ranked] == first[1] + first[2]
    assert second[0] == 12
    assert record(output)["judge"] == "mean"


def test_own_evaluations_stay_as_they_are_and_only_they_reach_callbacks_curves_and_the_best(
    base, jobs, undisturbed, tmp_path
):
    output, heard, _ = undisturbed
    (winner,) = record(output)["best"]
    bench.train(base, tmp_path / "solo", [job for job in jobs if job.name == winner])
    assert_same_trial(output, tmp_path / "solo", winner)
    assert [item[:2] for item in numbers(output, winner)] == [
        item[:2] for item in numbers(tmp_path / "solo", winner)
    ]
    own = [(one["job"], one["step"], one["eval_loss"]) for one in lines(output) if "eval_loss" in one]
    assert [(one.job, one.step, one.loss) for one in heard if isinstance(one, Evaluated)] == own
    assert {step for name, step, _ in own if name == winner} == {0, 4, 8, 12, 16}
    (shown,) = [one for one in read_run(output).jobs if one.name == winner]
    assert [point.loss for point in shown.evaluations] == [loss for name, _, loss in own if name == winner]
    assert len(shown.losses) == STEPS
    (row,) = [one for one in record(output)["trials"] if one["name"] == winner]
    assert row["score"] == shown.evaluations[-1].loss


def test_a_trial_alone_in_its_sweep_has_the_bits_of_the_job_alone(base, jobs, tmp_path):
    job = replace(jobs[1], keep="best", early_stop=3)
    run(base, tmp_path / "out", [job])
    bench.train(base, tmp_path / "solo", [job])
    assert len(rung_lines(tmp_path / "out")) == 2
    mine, theirs = (bench.adapter(tmp_path / folder / job.name) for folder in ("out", "solo"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert numbers(tmp_path / "out", job.name) == numbers(tmp_path / "solo", job.name)


CRASHES = {
    "inside a span": (Stepped, 11),
    "behind a span": (Stepped, 8),
    "between its own evaluation and the rung's": (Evaluated, 12),
}


@pytest.mark.parametrize(
    ("most", "when"),
    slow_but(product((4, 1), CRASHES), [(4, "between its own evaluation and the rung's")]),
)
def test_crashed_there_it_resumes_to_the_same_means_decisions_and_adapters(
    base, jobs, undisturbed, tmp_path, monkeypatch, when, most
):
    JobLimit(monkeypatch, most)

    def callback(event):
        if (type(event), event.step) == CRASHES[when]:
            raise Crash

    with pytest.raises(Crash):
        run(base, tmp_path / "out", jobs, callback)
    run(base, tmp_path / "out", jobs, resume=True)
    assert_same_rungs(tmp_path / "out", undisturbed[0])


def test_a_trial_that_resumes_before_a_rung_is_not_judged_there_again(base, jobs, undisturbed, tmp_path):
    seldom = [replace(job, save_every=12) for job in jobs]

    def callback(event):
        if event.step == 9:
            raise Crash

    with pytest.raises(Crash):
        run(base, tmp_path / "out", seldom, callback)
    kept = decided(tmp_path / "out")[0][1]
    assert all(checkpoint.newest_progress(tmp_path / "out" / name / "checkpoints").step == 6 for name in kept)
    run(base, tmp_path / "out", seldom, resume=True)
    assert_same_rungs(tmp_path / "out", undisturbed[0])


def assert_same_rungs(output, want):
    assert_same_sweep(output, want)
    mine, theirs = rung_lines(output), rung_lines(want)
    assert mine.keys() == theirs.keys()
    assert len(mine) == sum("rung_loss" in line for line in lines(output)), "judged once"
    for key, line in theirs.items():
        assert mine[key]["rung_loss"] == pytest.approx(line["rung_loss"], rel=1e-10), key


@pytest.mark.parametrize(
    ("count", "what"),
    slow_but(
        product((1, 3, 5), ("record_mean_evaluation", "_decide_rungs")),
        [(5, "_decide_rungs")],
    ),
)
def test_crashed_while_trials_are_judged_it_resumes_to_the_same_decisions(
    base, jobs, undisturbed, tmp_path, monkeypatch, count, what
):
    """Where the line is written but nobody has heard it, or nothing is recorded."""
    place = Sweeps if what == "record_mean_evaluation" else RunningSweep
    real, calls = getattr(place, what), []

    def crashes(self, *arguments):
        of_rung = what == "record_mean_evaluation" or any(self.rungs.values.values())
        calls.extend([1] if of_rung else [])
        if len(calls) == count and of_rung:
            raise Crash
        return real(self, *arguments)

    monkeypatch.setattr(place, what, crashes)
    with pytest.raises(Crash):
        run(base, tmp_path / "out", jobs)
    monkeypatch.undo()
    run(base, tmp_path / "out", jobs, resume=True)
    assert_same_rungs(tmp_path / "out", undisturbed[0])


def test_trials_that_rest_or_give_way_come_back_with_their_means(
    base, jobs, undisturbed, tmp_path, monkeypatch
):
    JobLimit(monkeypatch, 2)
    run(base, tmp_path / "out", jobs)
    assert_same_rungs(tmp_path / "out", undisturbed[0])


def test_a_damaged_record_is_rebuilt_from_what_was_judged(base, jobs, undisturbed, tmp_path):
    shutil.copytree(undisturbed[0], tmp_path / "out")
    (tmp_path / "out" / "s" / "sweep.json").write_text("{")
    run(base, tmp_path / "out", jobs, resume=True)
    assert [one[:2] for one in decided(tmp_path / "out")] == [one[:2] for one in decided(undisturbed[0])]
    rows = [{one["name"]: one["at_rungs"] for one in record(folder)["trials"]}
            for folder in (tmp_path / "out", undisturbed[0])]  # fmt: skip
    assert rows[0] == rows[1]


@pytest.fixture(scope="module")
def by_last(base, jobs, tmp_path_factory):
    output = tmp_path_factory.mktemp("last") / "out"
    run(base, output, jobs, judge="last")
    return output


def test_judge_last_evaluates_the_weights_that_are_trained(by_last):
    assert not rung_lines(by_last)
    own = {(one["job"], one["step"]): one["eval_loss"] for one in lines(by_last) if "eval_loss" in one}
    for one in record(by_last)["trials"]:
        assert one["at_rungs"] == {step: own[one["name"], int(step)] for step in one["at_rungs"]} != {}
    assert record(by_last)["judge"] == "last"
    assert [one[0] for one in decided(by_last)] == [8, 12]


def test_with_judge_last_rungs_count_neither_for_the_early_stop_nor_for_the_best_weights(base, tmp_path):
    keys = {"early_stop": 2, "keep": "best", "eval": {"fraction": 0.25, "every": 4}}
    jobs = [trial(0.2, **keys), trial(1e-3, **keys)]
    sweep = sweep_of(jobs, at=(0.1, 0.4, 0.6), share=0.9)
    sweep = replace(sweep, spec=replace(sweep.spec, halving=replace(sweep.spec.halving, judge="last")))
    sweeping(base, tmp_path / "out", jobs, sweep).run()
    for job in jobs:
        bench.train(base, tmp_path / job.name, [job])
        assert_same_trial(tmp_path / "out", tmp_path / job.name, job.name)


def test_a_record_from_before_goes_on_with_the_last_weights(base, jobs, by_last, tmp_path):
    output = tmp_path / "out"

    def callback(event):
        if event.step == 10:
            raise Crash

    with pytest.raises(Crash):
        run(base, output, jobs, callback, judge="last")
    older = record(output)
    del older["judge"], older["checksum"]
    (output / "s" / "sweep.json").write_text(json.dumps(older))
    run(base, output, jobs, resume=True)
    assert_same_sweep(output, by_last)
    assert not rung_lines(output)
    assert record(output)["judge"] is None
    assert sum("rungs judge the last weights" in note for note in status(output)["notes"]) == 1


def test_a_sweep_that_has_begun_cannot_judge_otherwise(base, jobs, by_last, tmp_path):
    shutil.copytree(by_last, tmp_path / "out")
    with pytest.raises(OutputError, match=r"other settings: halving\.judge changed"):
        run(base, tmp_path / "out", jobs, resume=True)


def test_the_mean_is_counted_in_the_memory_of_trials_and_of_nobody_else(base, jobs, tmp_path):
    other = replace(trial(1e-2, steps=2), name="other", eval=None)
    seen = {}

    def shapes(judge):
        trainer = sweeping(base, tmp_path / judge, jobs, halved(jobs, judge), others=[other])

        def callback(event):
            loop = trainer.loop
            seen[judge] = {name: job.shape.mean_weight_count for name, job in loop.jobs.items()}
            seen[judge, "bytes"] = loop.fitted_models.memory.state_bytes(
                job.shape for job in loop.jobs.values()
            )
            seen[judge, "mean"] = loop.executor.attached[jobs[0].name].mean_weights
            seen["sizes"] = [loop.jobs[job.name].shape.trainable_parameters for job in jobs]
            raise Crash

        with pytest.raises(Crash):
            trainer.run(callback)

    shapes("mean")
    shapes("last")
    assert seen["mean"] == {job.name: 1 for job in jobs} | {"other": 0}
    assert set(seen["last"].values()) == {0}
    assert seen["mean", "bytes"] - seen["last", "bytes"] == 8 * sum(seen["sizes"])
    assert len(seen["mean", "mean"]) == seen["sizes"][0]
    assert seen["last", "mean"] is None


def test_a_job_beside_the_sweep_keeps_no_mean_and_is_trained_as_ever(base, jobs, tmp_path):
    other = replace(trial(1e-2, steps=9), name="other")
    sweeping(base, tmp_path / "out", jobs, halved(jobs), others=[other]).run()
    bench.train(base, tmp_path / "solo", [other])
    assert_same_job(tmp_path / "out", tmp_path / "solo", "other")
    assert states(tmp_path / "out")["other"] == "succeeded"
