"""Jobs that start from the adapters of others wait for them, and begin as if from their folders."""

import pytest
import yaml

from tests import bench
from tests.cases import slow_but
from tests.outputs import Crash, assert_same_job, assert_whole, lines, states, status
from weftune import JobSpec, Options
from weftune.errors import SpecError, UserError
from weftune.run.events import Stepped

ROWS = bench.rows(bench.samples(12, seed=5))


def job(name, steps=5, start=None, **keys):
    adapter = {"rank": 4, "dropout": 0.1} | ({} if start is None else {"init_from": start})
    settings = {"batch_size": 4, "learning_rate": 1e-2, "save_every": 2, "adapter": adapter}
    return JobSpec(name=name, data=ROWS, steps=steps, seed=sum(map(ord, name)), **settings | keys)


A, B, C = job("a", 6), job("b", 7, {"job": "a"}), job("c", 3, {"job": "b"})


@pytest.fixture(scope="module")
def base():
    return bench.base()


@pytest.fixture(scope="module")
def by_folders(base, tmp_path_factory):
    """`a`, `b` from the folder of `a`, and `c` from that of `b`, one after another."""
    output = tmp_path_factory.mktemp("starting")
    for name, steps, source in (("a", 6, None), ("b", 7, "a"), ("c", 3, "b")):
        start = None if source is None else str(output / source / source)
        bench.train(base, output / name, [job(name, steps, start)])
    return output


def assert_as_by_folders(output, by_folders, names=("a", "b", "c")):
    assert_whole(output)
    for name in names:
        assert_same_job(output, by_folders / name, name)


def test_a_job_waits_for_its_source_and_starts_as_from_its_folder(base, tmp_path, by_folders):
    output, reasons = tmp_path / "out", {}
    other = job("other", 12)
    trainer = bench.trainer(base, output, [C, B, other, A])

    def callback(event):
        for name, found in status(output)["jobs"].items():
            if found["state"] == "queued":
                reasons.setdefault(name, found["reason"])

    trainer.run(callback)
    assert reasons == {"b": "waits for a", "c": "waits for b"}
    order = [(line["job"], line["step"]) for line in lines(output)]
    assert order.index(("a", 6)) < order.index(("b", 1)) < order.index(("b", 7)) < order.index(("c", 1))
    assert order.index(("b", 1)) < order.index(("other", 12)), "it came aboard while another trained"
    assert yaml.safe_load((output / "b" / "job.yaml").read_text())["job"]["adapter"]["init_from"] == {
        "job": "a"
    }
    assert_as_by_folders(output, by_folders)


@pytest.mark.parametrize(
    ("name", "step"), slow_but([("a", 3), ("b", 1), ("b", 5), ("c", 2)], [("a", 3), ("b", 1)])
)
def test_broken_off_at_any_moment_it_goes_on_to_the_same_curve(base, tmp_path, by_folders, name, step):
    output, jobs = tmp_path / "out", [C, B, A]

    def callback(event):
        if isinstance(event, Stepped) and (event.job, event.step) == (name, step):
            raise Crash

    with pytest.raises(Crash):
        bench.trainer(base, output, jobs).run(callback)
    bench.train(base, output, jobs, resume=True)
    assert_as_by_folders(output, by_folders)


def test_once_begun_a_job_needs_its_source_no_more(base, tmp_path, by_folders):
    output = tmp_path / "out"

    def callback(event):
        if (event.job, event.step) == ("b", 5):
            raise Crash

    with pytest.raises(Crash):
        bench.trainer(base, output, [B, A]).run(callback)
    (output / "a" / "adapter_model.safetensors").unlink()
    bench.train(base, output, [B, A], resume=True)
    assert states(output) == {"a": "succeeded", "b": "succeeded"}
    assert_same_job(output, by_folders / "b", "b")


def test_if_the_source_is_cancelled_those_behind_it_are_paused_and_go_on_with_it(base, tmp_path, by_folders):
    output = tmp_path / "out"
    trainer = bench.trainer(base, output, [C, B, A])

    def callback(event):
        if (event.job, event.step) == ("a", 3):
            trainer.cancel("a")

    results = trainer.run(callback)
    assert {name: result.state for name, result in results.items()} == {
        "a": "cancelled", "b": "paused", "c": "paused",
    }  # fmt: skip
    assert results["b"].reason == (
        "it starts from a, which was cancelled; resume both: "
        "options=weftune.Options(resume=True, retry=('a',)) or "
        "options=weftune.Options(resume=True, restart=('a',))"
    )
    assert results["c"].reason == (
        "it starts from b, which is paused; resume both: options=weftune.Options(resume=True)"
    )
    again = bench.train(base, output, [C, B, A], resume=True)
    assert (again["b"].state, again["c"].state) == ("paused", "paused"), "nothing has changed"
    bench.train(base, output, [C, B, A], resume=True, restart=("a",))
    assert_as_by_folders(output, by_folders)


def test_if_the_source_fails_those_behind_it_are_paused_and_others_go_on(base, tmp_path):
    diverges = job("a", 4, learning_rate=1e300)
    results = bench.train(base, tmp_path / "out", [B, diverges, job("other", 9)])
    assert {name: result.state for name, result in results.items()} == {
        "a": "failed", "b": "paused", "other": "succeeded",
    }  # fmt: skip
    assert results["b"].reason.startswith("it starts from a, which has failed; resume both: ")


def test_a_job_that_is_added_may_start_from_one_that_has_ended_or_still_trains(base, tmp_path, by_folders):
    output = tmp_path / "out"
    trainer = bench.trainer(base, output, [A, job("other", 30)])
    refused = []

    def callback(event):
        if (event.job, event.step) == ("a", 2):
            trainer.add(B)
            try:
                trainer.add(job("d", 2, {"job": "nobody"}))
            except UserError as error:
                refused.append(str(error))
        if (event.job, event.step) == ("b", 7):
            trainer.add(C)

    trainer.run(callback)
    assert 'there is no job "nobody" in this run' in refused[0]
    assert_as_by_folders(output, by_folders)


def test_a_run_in_python_refuses_what_a_file_refuses(base, tmp_path):
    jobs = [job("a"), job("b", adapter={"rank": 8, "init_from": {"job": "a"}})]
    sentence = r"job b adapter\.init_from\.job: a has rank 4 at .*, the job asks for 8"
    with pytest.raises(SpecError, match=sentence):
        bench.train(base, tmp_path / "out", jobs)
    assert not (tmp_path / "out").exists()


def test_its_source_gives_way_to_a_higher_priority_and_both_go_on(base, tmp_path, by_folders, monkeypatch):
    monkeypatch.setattr(
        "weftune.plan.cost.fitted.FittedModels.misfit_reason",
        lambda self, jobs: "no" if len(jobs) > 1 else None,
    )
    output = tmp_path / "out"
    trainer = bench.trainer(base, output, [B, A], options=Options())

    def callback(event):
        if (event.job, event.step) == ("a", 2):
            trainer.add(job("urgent", 3, priority=9))

    trainer.run(callback)
    order = [line["job"] for line in lines(output)]
    assert list(dict.fromkeys(order)) == ["a", "urgent", "b"]
    assert_as_by_folders(output, by_folders, ("a", "b"))
