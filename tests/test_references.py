"""DPO through the whole system: references are scored once, in every layout, and survive whatever happens."""

import json
import math
import random
from dataclasses import replace

import pytest

from tests import bench
from tests.cases import slow_but
from tests.launches import Launch, Shares, copied, deep_folder
from tests.outputs import Crash, assert_same_job, assert_same_results, assert_whole, lines, status
from tests.test_memory import strike_above
from weftune import JobSpec
from weftune.core.files import cache_folder
from weftune.plan.program.program import Score
from weftune.plan.window import pace
from weftune.run.events import Stepped
from weftune.trainer.references import COPY_FILE

LN_2 = pytest.approx(math.log(2), rel=1e-12)


def preferences(count=24, seed=0):
    rng = random.Random(seed)

    def words(low, high):
        return " ".join(f"w{rng.randrange(6, 97)}" for _ in range(rng.randrange(low, high)))

    return [
        {"prompt": f"{words(2, 6)} ", "chosen": words(2, 9), "rejected": words(2, 9)} for _ in range(count)
    ]


ROWS = preferences()
PAIRS = {"data": "pairs.jsonl", "eval": {"fraction": 0.25, "every": 3}}
JOBS = [
    {"name": "sft", "steps": 5, "adapter": {"rank": 4}},
    {"name": "dpo", "steps": 7, "objective": "dpo", "adapter": {"rank": 4, "dropout": 0.1}, **PAIRS},
    {"name": "after", "steps": 6, "objective": {"kind": "dpo", "beta": 0.3, "loss_type": "ipo"},
     "adapter": {"rank": 4, "init_from": {"job": "sft"}}, **PAIRS},
    {"name": "virtual", "steps": 4, "objective": {"kind": "dpo", "beta": 0.5},
     "adapter": {"kind": "prefix", "num_virtual_tokens": 3}, **PAIRS},
]  # fmt: skip


def forget_scores():
    """Delete the scores that earlier runs have left in the cache."""
    for path in (cache_folder() / "tokens").glob("references-*"):
        path.unlink()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forks):
    """A folder whose `undisturbed` is what one process makes of the jobs with a resident base."""
    folder = deep_folder(tmp_path_factory.mktemp("references"), JOBS)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    forget_scores()
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0, (
        folder / "log"
    ).read_text()
    assert_whole(folder / "undisturbed")
    return folder


@pytest.fixture
def place(tmp_path, trained):
    forget_scores()
    return copied(trained, tmp_path / "place")


def first_lines(output, job):
    """The first evaluation and the first step of a job."""
    own = [line for line in lines(output) if line["job"] == job]
    return next(x for x in own if "eval_loss" in x), next(x for x in own if "loss" in x)


def test_a_policy_begins_as_its_reference_with_and_without_another_adapter(trained):
    output = trained / "undisturbed"
    evaluated, stepped = first_lines(output, "dpo")
    assert evaluated["eval_loss"] == LN_2
    assert stepped["loss"] == LN_2
    evaluated, stepped = first_lines(output, "after")
    assert [evaluated["eval_loss"], stepped["loss"]] == pytest.approx([(1 / 0.6) ** 2] * 2, rel=1e-9)
    for line in (stepped, first_lines(output, "dpo")[1]):
        assert line["rewards/chosen"] == pytest.approx(0.0, abs=1e-12)
        assert line["rewards/rejected"] == pytest.approx(0.0, abs=1e-12)
    base_loss = status(output)["jobs"]["after"]["base_loss"]
    assert base_loss != pytest.approx(evaluated["eval_loss"], rel=1e-3), "its reference is not the base alone"
    assert status(output)["jobs"]["virtual"]["base_loss"] == LN_2, "its reference is the base alone"
    assert first_lines(output, "virtual")[0]["eval_loss"] != LN_2


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (4, 2)])
def test_pipelines_and_replicas_score_and_train_as_one_process(place, workers, replicas):
    assert Launch(place, "out", workers, replicas=replicas).wait() == 0
    assert_whole(place / "out")
    assert_same_results(place / "out", place / "undisturbed")
    events = json.loads((place / "out" / "trace.json").read_text())["traceEvents"]
    for worker in range(workers):
        assert any(one.get("cat") == "Score" and one["tid"] == worker for one in events)


@pytest.mark.slow
def test_a_streamed_base_scores_and_trains_as_a_resident_one(place, forks):
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", "out", "--gpu-memory", "960KiB")
    assert forks.weftune(*words, cwd=place) == 0
    assert_whole(place / "out")
    assert_same_results(place / "out", place / "undisturbed")
    assert "The base is streamed in" in " ".join(status(place / "out")["notes"])


@pytest.mark.slow
def test_shares_score_and_train_as_one_process(place):
    assert Shares(place, "out", 2).wait() == 0
    assert_whole(place / "out")
    assert_same_results(place / "out", place / "undisturbed")


# -- in one process -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base():
    return bench.base("opt")


def dpo_job(name, **keys):
    settings = {"steps": 5, "batch_size": 4, "learning_rate": 1e-2, "adapter": {"rank": 4}, "save_every": 2}
    settings |= {"objective": "dpo", "eval": {"fraction": 0.25, "every": 2}, "data": ROWS}
    return JobSpec(name=name, **settings | keys)


SFT = JobSpec(name="sft", data=bench.rows(bench.samples(12)), steps=60, batch_size=2, adapter={"rank": 4})


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of one round, in which one sample is scored."""
    monkeypatch.setattr(pace, "WINDOW_SECONDS", 1e-9)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The output of a run of one job."""
    forget_scores()
    output = tmp_path_factory.mktemp("alone")
    bench.train(base, output, [dpo_job("a")])
    return output


def scored_samples(trainer):
    """The samples of each job in the order in which they were scored."""
    return [
        (segment.job, placed.sample)
        for program in trainer.programs
        for action, plan in program.forward_passes()
        if isinstance(action, Score)
        for segment in plan.segments
        for placed in segment.samples
    ]


@pytest.mark.usefixtures("small_windows")
def test_other_jobs_train_while_a_job_is_scored_and_it_ends_as_if_it_were_alone(base, tmp_path, alone):
    forget_scores()
    jobs = [SFT, dpo_job("a"), dpo_job("b", objective={"kind": "dpo", "beta": 0.7}, seed=3)]
    trainer = bench.trainer(base, tmp_path / "out", jobs)
    trainer.run()
    assert_same_job(tmp_path / "out", alone, "a")
    order = [(line["job"], line["step"]) for line in lines(tmp_path / "out")]
    assert order.index(("sft", 40)) < order.index(("a", 1)) < order.index(("sft", 60))
    assert scored_samples(trainer) == [("a", sample) for sample in range(48)], "`b` has the same samples"
    again = bench.trainer(base, tmp_path / "again", [dpo_job("a", learning_rate=1e-3)])
    again.run()
    assert scored_samples(again) == [], "the scores are in the cache"


@pytest.mark.slow
@pytest.mark.usefixtures("small_windows")
def test_if_a_job_is_cancelled_while_it_is_scored_an_equal_job_scores_the_rest(base, tmp_path, alone):
    forget_scores()
    trainer = bench.trainer(base, tmp_path / "out", [SFT, dpo_job("first"), dpo_job("a")])

    def callback(event):
        if isinstance(event, Stepped) and (event.job, event.step) == ("sft", 20):
            trainer.cancel("first")

    results = trainer.run(callback)
    assert {name: result.state for name, result in results.items()} == {
        "sft": "succeeded", "first": "cancelled", "a": "succeeded",
    }  # fmt: skip
    assert_same_job(tmp_path / "out", alone, "a")
    scored = scored_samples(trainer)
    assert [sample for _, sample in scored] == list(range(48))
    assert {name for name, _ in scored} == {"first", "a"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_windows")
def test_broken_off_in_the_middle_of_scoring_it_goes_on_with_the_samples_that_are_left(base, tmp_path, alone):
    forget_scores()

    def callback(event):
        if isinstance(event, Stepped) and event.step == 20:
            raise Crash

    jobs = [SFT, dpo_job("a")]
    with pytest.raises(Crash):
        bench.trainer(base, tmp_path / "out", jobs).run(callback)
    resumed = bench.trainer(base, tmp_path / "out", jobs, options=bench.Options(resume=True))
    resumed.run()
    assert_same_job(tmp_path / "out", alone, "a")
    assert [sample for _, sample in scored_samples(resumed)] == list(range(19, 48))


def test_where_scoring_finds_no_memory_it_goes_on_in_smaller_passes(tmp_path, alone):
    forget_scores()
    base = bench.base("opt")
    struck = strike_above(base, 60)
    trainer = bench.trainer(base, tmp_path / "out", [dpo_job("a")], options=bench.Options(capacity=200))
    trainer.run()
    assert len(struck) == 2, "from 200 to 100 to 50"
    assert_same_job(tmp_path / "out", alone, "a")
    assert sorted(sample for _, sample in scored_samples(trainer)) == list(range(48))


@pytest.mark.parametrize("step", slow_but([1, 3], [3]))
def test_broken_off_later_it_scores_nothing_again_even_without_the_cache(base, tmp_path, alone, step):
    forget_scores()

    def callback(event):
        if isinstance(event, Stepped) and event.step == step:
            raise Crash

    with pytest.raises(Crash):
        bench.trainer(base, tmp_path / "out", [dpo_job("a")]).run(callback)
    forget_scores()
    resumed = bench.trainer(base, tmp_path / "out", [dpo_job("a")], options=bench.Options(resume=True))
    resumed.run()
    assert_same_job(tmp_path / "out", alone, "a")
    assert scored_samples(resumed) == []


def test_without_its_scores_a_job_that_started_from_an_adapter_is_paused_and_can_be_restarted(
    base, tmp_path, alone
):
    jobs = [dpo_job("b", adapter={"rank": 4, "init_from": str(alone / "a")})]

    def callback(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise Crash

    undisturbed, output = tmp_path / "undisturbed", tmp_path / "out"
    bench.train(base, undisturbed, jobs)
    with pytest.raises(Crash):
        bench.trainer(base, output, jobs).run(callback)
    forget_scores()
    copy = output / "b" / "checkpoints" / COPY_FILE
    kept = copy.read_bytes()
    copy.unlink()
    result = bench.train(base, output, jobs, resume=True)["b"]
    assert result.state == "paused"
    assert "its reference policy, the adapter that it started from, are gone" in result.reason
    copy.write_bytes(kept)
    bench.train(base, output, jobs, resume=True)
    assert_same_job(output, undisturbed, "b")
    restarted = bench.trainer(
        base, output, [replace(jobs[0])], options=bench.Options(resume=True, restart=("b",))
    )
    restarted.run()
    assert len(scored_samples(restarted)) == 48
    assert_same_job(output, undisturbed, "b")
