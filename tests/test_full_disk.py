"""Disks that fill up or break while jobs train: a job is paused with the reason, or nobody notices."""

import errno
import os
import re
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests import bench
from tests.faults import Disk, largest_file
from tests.outputs import assert_same_results, assert_whole, jobs_folder, lines, states, status
from weftune import JobSpec, Options
from weftune.adapters.registry import adapter_layout
from weftune.errors import OutputError
from weftune.plan.cost.memory import format_bytes
from weftune.run.events import Stepped


def jobs(steps=5):
    rows = bench.rows(bench.samples(10, seed=3))
    keys = {"batch_size": 3, "save_every": 2, "learning_rate": 1e-2}
    return [
        JobSpec(name="looks", data=rows, steps=steps, adapter={"rank": 3, "dropout": 0.1},
                eval={"fraction": 0.3, "every": 2}, keep="best", **keys),
        JobSpec(name="plain", data=rows, steps=steps + 4, adapter={"rank": 2}, seed=1, **keys),
    ]  # fmt: skip


def layout_of_job(job):
    return adapter_layout(job.adapter, bench.base().shape.sites)


class Told:
    def __init__(self):
        self.notes = []

    def update(self, row):
        pass

    def note(self, text):
        self.notes.append(text)


def run(output, model, callback=None, **options):
    told = Told()
    results = bench.trainer(model, output, jobs(), options=Options(**options), view=told).run(callback)
    return {name: result.state for name, result in results.items()}, told.notes


@pytest.fixture(scope="module")
def model():
    return bench.base()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model):
    """A run on a good disk, and how many writes it made."""
    output = tmp_path_factory.mktemp("full") / "out"
    with Disk(output).watched() as disk:
        run(output, model)
    assert_whole(output)
    return output, len(disk.calls)


def survives(output, model, undisturbed, fails, error):
    """Train on a disk that fails, then once more on a good one, to the result of an undisturbed run."""
    disk = Disk(output, fails, error)
    try:
        with disk.watched():
            reached, _ = run(output, model)
    except OutputError:
        assert not (output / "metrics.jsonl").exists(), "a run is refused before its first step only"
    else:
        assert set(reached.values()) <= {"succeeded", "paused"}, reached
        for name, state in reached.items():
            if state == "paused" and states(output)[name] == "paused":
                assert os.strerror(error) in status(output)["jobs"][name]["reason"]
    assert list(output.rglob("*.partial")) == []
    run(output, model, resume=output.exists())
    assert_whole(output)
    assert_same_results(output, undisturbed)


def test_a_disk_that_is_full_once_at_a_write_costs_a_pause_at_most(tmp_path, model, undisturbed):
    want, count = undisturbed
    for at in range(count // 6, count, count // 3):
        survives(tmp_path / str(at), model, want, lambda number, at=at: number == at, errno.ENOSPC)


def test_a_disk_that_stays_full_pauses_jobs_that_go_on_when_space_returns(tmp_path, model, undisturbed):
    want, count = undisturbed
    survives(tmp_path / "out", model, want, lambda number: number >= count // 3, errno.ENOSPC)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "stays", "every"), [(errno.ENOSPC, False, 1), (errno.EIO, False, 4), (errno.ENOSPC, True, 4)]
)
def test_a_disk_that_fails_at_each_write_in_turn_never_costs_a_result(
    tmp_path, model, undisturbed, error, stays, every
):
    want, count = undisturbed
    for at in range(1, count + 1, every):
        fails = (lambda number, at=at: number >= at) if stays else (lambda number, at=at: number == at)
        survives(tmp_path / str(at), model, want, fails, error)
    print(f"{count} writes")


def test_a_failed_checkpoint_pauses_its_job_alone_and_resume_goes_on_from_the_last_whole_one(
    tmp_path, model, undisturbed
):
    output = tmp_path / "out"
    disk = Disk(output, error=errno.ENOSPC)
    disk.fails = lambda _: disk.calls[-1][1].startswith("plain/checkpoints/.step-00000004.partial/tensors")
    with disk.watched():
        reached, _ = run(output, model)
    assert reached == {"looks": "succeeded", "plain": "paused"}
    job = status(output)["jobs"]["plain"]
    assert job["reason"] == (
        "its checkpoint of step 4 cannot be written: No space left on device; "
        "correct that, and resume from step 3 with options=weftune.Options(resume=True)"
    )
    before = [line for line in lines(output) if line["job"] == "plain" and line["step"] <= 2]
    assert run(output, model, resume=True)[0] == {"looks": "succeeded", "plain": "succeeded"}
    assert [line for line in lines(output) if line["job"] == "plain"][: len(before)] == before
    assert_whole(output)
    assert_same_results(output, undisturbed[0])


def test_an_adapter_that_cannot_be_written_leaves_the_training_safe_and_resume_writes_it(
    tmp_path, model, undisturbed
):
    """By the real limit of the kernel: the weights and the tokenizer are written from Rust."""
    output = tmp_path / "out"
    ends = []

    def callback(event):
        if isinstance(event, Stepped) and (event.job, event.step) == ("plain", 9):
            ends.append(largest_file(2500))
            ends[0].__enter__()

    try:
        reached, _ = run(output, model, callback)
    finally:
        ends[0].__exit__(None, None, None)
    assert reached == {"looks": "succeeded", "plain": "paused"}
    assert sorted(path.name for path in (output / "plain").iterdir()) == ["checkpoints", "job.yaml"]
    assert "its adapter cannot be written: File too large" in status(output)["jobs"]["plain"]["reason"]
    assert run(output, model, resume=True)[0]["plain"] == "succeeded"
    assert_whole(output)
    assert_same_results(output, undisturbed[0])


def test_a_report_that_cannot_be_written_is_one_warning(tmp_path, model, undisturbed):
    sizes = {path.name: path.stat().st_size for path in undisturbed[0].rglob("*") if path.is_file()}
    page = sizes.pop("report.html")
    assert max(sizes.values()) < 0.9 * page, "the page alone must be too large"
    with ExitStack() as limits:

        def callback(event):
            # Checkpoints, which are larger and go with the jobs' ends, are written by then.
            if isinstance(event, Stepped) and (event.job, event.step) == ("plain", 9):
                limits.enter_context(largest_file(int(0.9 * page)))

        reached, notes = run(tmp_path / "out", model, callback)
    assert set(reached.values()) == {"succeeded"}
    assert [note for note in notes if "cannot" in note] == [
        f"warning: {tmp_path / 'out' / 'report.html'} cannot be written: File too large; "
        f"weftune report {tmp_path / 'out'} draws it again."
    ]
    assert not list((tmp_path / "out").glob("report.html*"))


def test_metrics_that_cannot_be_written_for_a_while_are_written_later_and_said_once(
    tmp_path, model, undisturbed
):
    output = tmp_path / "out"
    disk = Disk(output, error=errno.EIO)
    disk.fails = lambda _: disk.calls[-1] == ("write", "metrics.jsonl") and 3 < len(lines(output)) < 6
    tries = iter(range(4))
    fails = disk.fails
    disk.fails = lambda number: fails(number) and next(tries, None) is not None
    with disk.watched():
        reached, notes = run(output, model)
    assert set(reached.values()) == {"succeeded"}
    (told,) = [note for note in notes if "cannot" in note]
    assert "metrics.jsonl: Input/output error; training continues, and the write is tried again." in told
    assert next(tries, None) is None, "it has failed four times"
    assert_whole(output)
    assert_same_results(output, undisturbed[0])


def test_a_success_that_could_not_be_recorded_keeps_its_checkpoints(tmp_path, model, undisturbed):
    output = tmp_path / "out"
    disk = Disk(output, error=errno.ENOSPC)
    disk.fails = lambda _: (
        disk.calls[-1][1] == ".status.json.new" and (output / "looks" / "adapter_config.json").exists()
    )
    with disk.watched():
        reached, _ = run(output, model)
    assert set(reached.values()) == {"succeeded"}
    assert states(output) == {"looks": "running", "plain": "running"}
    for name in reached:
        assert list((output / name / "checkpoints").glob("step-*")), name
    run(output, model, resume=True)
    assert_whole(output)
    assert_same_results(output, undisturbed[0])


@pytest.mark.parametrize("away", [pytest.param(["head", "-n", "4"], marks=pytest.mark.slow), "/dev/full"])
def test_output_that_nobody_takes_does_not_end_the_run(tmp_path, forks, away):
    folder = jobs_folder(tmp_path, [{"name": "a", "steps": 12, "save_every": 5, "adapter": {"rank": 2}}])
    assert forks.weftune("train", "jobs.yaml", cwd=folder, away=away) == 0
    assert_whole(folder / "out")
    assert (folder / "out" / "report.html").exists()
    log = (folder / "log").read_text()
    assert "nothing more can be printed (" in log
    assert log.count("\n") == 1, log


def test_a_disk_without_room_for_adapters_and_checkpoints_is_refused_before_the_run(
    tmp_path, model, monkeypatch
):
    output, free = tmp_path / "out", 0
    monkeypatch.setattr(
        "weftune.trainer.results.shutil.disk_usage", lambda folder: SimpleNamespace(free=free)
    )
    with pytest.raises(OutputError, match=r"only 0\.00 GiB are free there; free .*, or choose another"):
        run(output, model)
    # Two checkpoints of three vectors of float64 each, a fourth vector with `keep: best`, and the adapter.
    sizes = [one.size for one in map(layout_of_job, jobs())]
    needed = 8 * (sizes[0] * (2 * 4 + 1) + sizes[1] * (2 * 3 + 1))
    free = needed - 1
    with pytest.raises(
        OutputError, match=re.escape(f"out needs {format_bytes(needed)} for adapters and checkpoints")
    ):
        run(output, model)
    assert not (output / "status.json").exists()
    free = needed
    assert run(output, model)[0] == {"looks": "succeeded", "plain": "succeeded"}, "nothing is in its way"


def test_paused_is_exit_1_and_the_table_says_how_to_go_on(tmp_path, forks):
    folder = jobs_folder(tmp_path, [{"name": "a", "steps": 6, "adapter": {"rank": 2}}])
    assert forks.weftune("train", "jobs.yaml", cwd=folder, file_bytes=2500) == 1
    log = (folder / "log").read_text()
    assert states(folder / "out") == {"a": "paused"}
    assert "its checkpoint of step 2 cannot be written: File too large" in log
    assert "resume from step 0 with weftune train jobs.yaml --resume" in log
    assert "report.html cannot be written" in log
    assert "Traceback" not in log
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=folder) == 0
    assert_whole(folder / "out")


def test_resuming_what_is_not_there_is_exit_2(tmp_path, forks):
    folder = jobs_folder(tmp_path, [{"name": "a", "steps": 6, "adapter": {"rank": 2}}])
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=folder) == 2
    assert "so there is nothing to resume" in (folder / "log").read_text()
    assert not (folder / "out").exists()
