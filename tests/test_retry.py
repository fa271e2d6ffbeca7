"""`--retry JOB --set KEY=VALUE`: a job that failed goes on from its last good checkpoint, changed."""

import pytest
import yaml

from tests import bench
from tests.outputs import assert_same_job, jobs_folder, lines, states, status
from weftune import JobSpec, Options
from weftune.errors import OutputError, SpecError
from weftune.run.events import Stepped


def job(name="a", **keys):
    rows = bench.rows(bench.samples(12, seed=4))
    settings = {"batch_size": 3, "save_every": 4, "learning_rate": 1e-2, "schedule": "constant"}
    return JobSpec(name=name, data=rows, steps=7, adapter={"rank": 3}, **settings | keys)


@pytest.fixture(scope="module")
def model():
    return bench.base()


def run(output, model, *jobs, callback=None, **options):
    results = bench.trainer(model, output, jobs or [job()], options=Options(**options)).run(callback)
    return {name: result.state for name, result in results.items()}


@pytest.fixture
def failed(tmp_path, model):
    """A job whose weights broke after its third step; its checkpoint of step 2 is good."""
    output = tmp_path / "out"
    trainer = bench.trainer(model, output, [job()])

    def callback(event):
        if isinstance(event, Stepped) and event.step == 3:
            trainer.loop.executor.attached["a"].state.weights.fill_(float("nan"))

    assert trainer.run(callback)["a"].state == "failed"
    return output


def test_it_goes_on_from_its_last_good_checkpoint_and_that_is_recorded(failed, model):
    reason = status(failed)["jobs"]["a"]["reason"]
    assert run(failed, model, resume=True) == {"a": "failed"}, "by itself it stays failed"
    changes = {"learning_rate": 1e-3}
    assert run(failed, model, resume=True, retry=("a",), changes=changes) == {"a": "succeeded"}
    rates = {line["step"]: line["learning_rate"] for line in lines(failed) if "loss" in line}
    assert rates == {step: 1e-2 if step <= 2 else 1e-3 for step in range(1, 8)}
    said = f"retried from step 2 with learning_rate 0.001 (was 0.01), after: {reason}"
    assert said in status(failed)["jobs"]["a"]["notes"]
    assert said in (failed / "report.html").read_text()
    record = yaml.safe_load((failed / "a" / "job.yaml").read_text())
    assert record["job"]["learning_rate"] == 1e-3
    (retry,) = record["retries"]
    assert (retry["step"], retry["reason"]) == (2, reason)
    assert retry["changed"] == {"learning_rate": {"from": 1e-2, "to": 1e-3}}


def test_retried_from_its_start_it_equals_the_job_that_had_those_settings(tmp_path, model):
    output = tmp_path / "out"
    wild = job(learning_rate=1e200, clip=None)
    assert run(output, model, wild) == {"a": "failed"}
    changes = {"learning_rate": 1e-2, "clip": 1.0}
    assert run(output, model, wild, resume=True, retry=("a",), changes=changes) == {"a": "succeeded"}
    run(tmp_path / "want", model, job())
    assert_same_job(output, tmp_path / "want", "a")


def test_what_was_changed_holds_for_later_resumptions_too(failed, model):
    def interrupt(event):
        raise KeyboardInterrupt

    changes = {"learning_rate": 1e-3}
    with pytest.raises(KeyboardInterrupt):
        run(failed, model, callback=interrupt, resume=True, retry=("a",), changes=changes)
    with pytest.raises(
        OutputError, match=r"learning_rate changed; .* retry=\('a',\), changes={'learning_rate': 0.5}"
    ):
        run(failed, model, job(learning_rate=0.5), resume=True)
    assert run(failed, model, resume=True) == {"a": "succeeded"}
    assert [line["learning_rate"] for line in lines(failed)] == [1e-2] * 2 + [1e-3] * 5


def test_other_keys_of_the_file_still_may_not_change(failed, model):
    with pytest.raises(OutputError, match="batch_size changed"):
        run(failed, model, job(batch_size=2), resume=True, retry=("a",), changes={"learning_rate": 1e-3})
    assert states(failed) == {"a": "failed"}


def test_what_cannot_be_retried_is_refused(failed, model):
    with pytest.raises(SpecError, match="--retry b: it has not started yet"):
        run(failed, model, job(), job("b"), resume=True, retry=("b",))
    with pytest.raises(SpecError, match="choose one"):
        run(failed, model, resume=True, retry=("a",), restart=("a",))
    with pytest.raises(SpecError, match="--set learning_rate: must be"):
        run(failed, model, resume=True, retry=("a",), changes={"learning_rate": -1.0})
    assert run(failed, model, resume=True, retry=("a",)) == {"a": "succeeded"}, "by chance it goes well now"
    with pytest.raises(SpecError, match=r"--retry a: it has succeeded; restart it with .*restart=.'a',"):
        run(failed, model, resume=True, retry=("a",))


def test_the_command_line_takes_it(tmp_path, forks):
    wild = {"name": "wild", "steps": 6, "learning_rate": 1e200, "clip": None, "adapter": {"rank": 2}}
    folder = jobs_folder(tmp_path, [wild])
    assert forks.weftune("train", "jobs.yaml", cwd=folder) == 1
    words = ["train", "jobs.yaml", "--resume", "--retry", "wild"]
    assert forks.weftune(*words, "--set", "adapter.rank=3", cwd=folder) == 2
    assert "--set adapter.rank: a started job cannot change it" in (folder / "log").read_text()
    assert forks.weftune("train", "jobs.yaml", "--resume", "--set", "clip=1", cwd=folder) == 2
    assert "--set goes with --retry JOB" in (folder / "log").read_text()
    assert forks.weftune("train", "jobs.yaml", "--retry", "wild", cwd=folder) == 2
    assert "--retry goes with --resume" in (folder / "log").read_text()
    assert forks.weftune(*words, "--set", "learning_rate=1e-3", "--set", "clip=1", cwd=folder) == 0
    assert states(folder / "out") == {"wild": "succeeded"}
