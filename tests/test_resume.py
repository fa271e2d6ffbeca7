"""`--resume` and `--restart`: what goes on, what is left alone, and what is refused."""

import json
import shutil
import signal

import pytest

from tests import bench
from tests.cases import slow_but
from tests.launches import copied
from tests.outputs import (
    Crash,
    assert_same_results,
    assert_whole,
    events_of,
    jobs_folder,
    lines,
    rich_jobs,
    rich_run,
    states,
    write_rows,
)
from weftune import Options
from weftune.jobs.store.job_file import write_job_file
from weftune.run.training import checkpoint

SHORT = {"name": "short", "steps": 4, "adapter": {"rank": 4}}
LONG = {"name": "long", "steps": 28, "adapter": {"rank": 3, "dropout": 0.1}, "seed": 2}
NEWCOMER = {"name": "newcomer", "steps": 5, "data": "b.jsonl", "adapter": {"rank": 2}}


def said(folder):
    return (folder / "log").read_text()


@pytest.fixture(scope="module")
def killed(tmp_path_factory, forks):
    folder = jobs_folder(tmp_path_factory.mktemp("killed"), [SHORT, LONG])
    forks.start("train", "jobs.yaml", cwd=folder)
    while forks.running():
        log = folder / "out" / "metrics.jsonl"
        if log.exists() and log.read_text().count('"long"') >= 7:
            forks.signal(signal.SIGKILL)
            break
    assert forks.wait() == -signal.SIGKILL
    assert states(folder / "out") == {"short": "succeeded", "long": "running"}
    return folder


@pytest.fixture
def started(killed):
    """`short` has succeeded, and `long` was killed on its way; behind each test the folder is as it was."""
    kept = copied(killed, killed.with_name("kept"))
    yield killed
    shutil.rmtree(killed)
    kept.rename(killed)


def test_an_output_that_holds_something_is_refused_without_resume(started, forks):
    before = {path: path.read_bytes() for path in (started / "out").rglob("*") if path.is_file()}
    assert forks.weftune("train", "jobs.yaml", cwd=started) == 2
    assert (
        "out is not empty; continue it with weftune train jobs.yaml --resume, or choose another --output"
        in said(started)
    )
    assert "Traceback" not in said(started)
    assert before == {path: path.read_bytes() for path in (started / "out").rglob("*") if path.is_file()}


def test_restart_without_resume_is_refused(started, forks):
    assert forks.weftune("train", "jobs.yaml", "--restart", "long", cwd=started) == 2
    assert "--restart goes with --resume" in said(started)
    assert forks.weftune("train", "jobs.yaml", "--resume", "--restart", "nobody", cwd=started) == 2
    assert "--restart nobody: there is no such job; known: short, long" in said(started)


def test_finished_jobs_are_skipped_and_new_ones_start(started, forks):
    finished = (started / "out" / "short" / "adapter_model.safetensors").stat()
    jobs_folder(started, [SHORT, LONG, NEWCOMER])
    # As if the kill had come between its success and the end of its checkpoints.
    (started / "out" / "short" / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=started) == 0, said(started)
    assert_whole(started / "out")
    again = (started / "out" / "short" / "adapter_model.safetensors").stat()
    assert (again.st_ino, again.st_mtime_ns) == (finished.st_ino, finished.st_mtime_ns)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=started) == 0
    assert_same_results(started / "out", started / "undisturbed")
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=started) == 0, (
        "nothing is left to do, and that is fine"
    )
    assert_same_results(started / "out", started / "undisturbed")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"learning_rate": 2e-2},
            "learning_rate changed; put them back, or resume with weftune train jobs.yaml --resume "
            "--retry long --set learning_rate=0.02\n",
        ),
        (
            {"adapter": {"rank": 5, "dropout": 0.1}, "batch_size": 3},
            "adapter.rank, batch_size changed; put them back, or restart it with weftune train jobs.yaml "
            "--resume --restart long",
        ),
    ],
)
def test_a_changed_key_of_a_started_job_is_refused_by_name(started, forks, change, named):
    jobs_folder(started, [SHORT, LONG | change])
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=started) == 2
    assert f"Job long has already started and cannot resume with other settings: {named}" in said(started)
    assert states(started / "out")["long"] == "running"


def test_a_changed_key_of_a_finished_job_is_refused_with_both_values(started, forks):
    jobs_folder(started, [SHORT | {"steps": 12, "learning_rate": 0.5}, LONG])
    before = (started / "out" / "status.json").read_bytes()
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=started) == 2
    assert (
        "Job short has already finished with other settings: learning_rate 0.01, now 0.5; steps 4, now 12; "
        "put them back, or restart it with weftune train jobs.yaml --resume --restart short\n"
    ) in said(started)
    assert (started / "out" / "status.json").read_bytes() == before
    remedy = said(started).rpartition("restart it with weftune ")[2].split()
    assert forks.weftune(*remedy, cwd=started) == 0, said(started)
    assert states(started / "out") == {"short": "succeeded", "long": "succeeded"}
    assert sum(line["job"] == "short" for line in lines(started / "out")) == 12


def test_another_number_of_steps_or_other_rows_are_refused(started, forks):
    assert forks.weftune("train", "jobs.yaml", "--resume", "--max-steps", "9", cwd=started) == 2
    assert "Job long has already started and cannot resume with other settings: --max-steps" in said(started)
    write_rows(started / "a.jsonl", seed=7)
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=started) == 2
    assert "cannot resume with other settings: the rows of its data changed" in said(started)


@pytest.mark.slow
def test_restart_trains_one_job_anew_and_leaves_the_others(started, forks):
    jobs_folder(started, [SHORT | {"learning_rate": 1e-3}, LONG])
    checkpoints = sorted(path.name for path in (started / "out" / "long" / "checkpoints").glob("step-*"))
    assert forks.weftune("train", "jobs.yaml", "--resume", "--restart", "short", cwd=started) == 0, said(
        started
    )
    assert_whole(started / "out")
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=started) == 0
    assert_same_results(started / "out", started / "undisturbed")
    times = {line["step"]: line["time"] for line in lines(started / "out") if line["job"] == "long"}
    anew = min(line["time"] for line in lines(started / "out") if line["job"] == "short")
    kept = int(checkpoints[-1].removeprefix("step-"))
    assert kept > 0
    assert times[kept] < anew < times[kept + 1], "long went on from its checkpoint"


def test_a_mistake_elsewhere_costs_the_job_to_restart_nothing(started, forks):
    jobs_folder(started, [SHORT, LONG | {"seed": 77}])
    before = (started / "out" / "short" / "adapter_model.safetensors").read_bytes()
    assert forks.weftune("train", "jobs.yaml", "--resume", "--restart", "short", cwd=started) == 2
    assert (started / "out" / "short" / "adapter_model.safetensors").read_bytes() == before
    assert states(started / "out")["short"] == "succeeded"


class Seen:
    """A view that keeps the first row of each job."""

    def __init__(self):
        self.first = {}

    def update(self, row):
        self.first.setdefault(row.name, row)

    def note(self, text):
        pass


def test_a_resumed_job_is_shown_at_the_step_that_it_resumes_from(tmp_path):
    model, seen = bench.base(), Seen()
    with pytest.raises(Crash):
        events_of(tmp_path / "out", model, 12)
    folders = {name: tmp_path / "out" / name / "checkpoints" for name in ("drops", "stops")}
    saved = {name: checkpoint.newest_progress(folder) for name, folder in folders.items()}
    bench.trainer(model, tmp_path / "out", rich_jobs(), options=Options(resume=True), view=seen).run()
    assert {name: (row.step, row.trained_tokens) for name, row in seen.first.items()} == {
        name: (one.step, one.trained_tokens) for name, one in saved.items()
    }
    assert all(row.step > 0 for row in seen.first.values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return rich_run(tmp_path_factory.mktemp("resume") / "out")


@pytest.mark.parametrize("stride", slow_but([5, 11], [11]))
def test_a_run_that_crashed_at_any_event_resumes_to_the_undisturbed_curve(undisturbed, tmp_path, stride):
    want, count = undisturbed
    model = bench.base()
    for at in range(1, count, stride):
        output = tmp_path / str(at)
        with pytest.raises(Crash):
            events_of(output, model, at)
        events_of(output, model, resume=True)
        assert_whole(output)
        assert_same_results(output, want)


def test_a_run_that_crashed_again_and_again_still_ends_the_same(undisturbed, tmp_path):
    want, _ = undisturbed
    model = bench.base()
    for at in (3, 9, 7, 11):
        with pytest.raises(Crash):
            events_of(tmp_path / "out", model, at, resume=(tmp_path / "out").exists())
    events_of(tmp_path / "out", model, resume=True)
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", want)


def test_a_run_that_ended_while_its_first_job_came_aboard_can_be_resumed(undisturbed, tmp_path, monkeypatch):
    want, _ = undisturbed
    model = bench.base()

    def written_then_killed(folder, description):
        write_job_file(folder, description)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("weftune.trainer.results.write_job_file", written_then_killed)
        with pytest.raises(Crash):
            events_of(tmp_path / "out", model)
    events_of(tmp_path / "out", model, resume=True)
    assert_same_results(tmp_path / "out", want)


def test_a_damaged_newest_checkpoint_costs_one_interval_and_no_equality(undisturbed, tmp_path):
    want, count = undisturbed
    output, model = tmp_path / "out", bench.base()
    with pytest.raises(Crash):
        events_of(output, model, count - 4)
    newest = {job: sorted((output / job / "checkpoints").glob("step-*"))[-1] for job in ("drops", "stops")
              if (output / job / "checkpoints").exists()}  # fmt: skip
    assert newest
    for folder in newest.values():
        content = bytearray((folder / "tensors.safetensors").read_bytes())
        content[-9] ^= 1
        (folder / "tensors.safetensors").write_bytes(content)
    events_of(output, model, resume=True)
    assert_whole(output)
    assert_same_results(output, want)


def test_a_job_added_from_a_callback_resumes_when_it_is_added_again(tmp_path):
    first, late = rich_jobs()
    model = bench.base()

    def run(output, crash_at=None, **options):
        trainer = bench.trainer(model, output, [first], options=Options(**options))

        def callback(event):
            if "stops" not in trainer.jobs:
                trainer.add(late)
            if (event.job, event.step) == crash_at:
                raise Crash

        trainer.run(callback)

    run(tmp_path / "want")
    with pytest.raises(Crash):
        run(tmp_path / "out", ("stops", 4))
    run(tmp_path / "out", resume=True)
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", tmp_path / "want")


def test_metrics_hold_one_line_a_step_with_every_key(undisturbed):
    want, _ = undisturbed
    assert_whole(want)
    for line in lines(want):
        trained = {"job", "step", "epoch", "loss", "tokens", "learning_rate", "grad_norm", "token_accuracy"}
        looked = {"job", "step", "eval_loss", "eval_tokens", "eval_token_accuracy"}
        assert set(line) - {"time"} in (trained, looked), json.dumps(line)
