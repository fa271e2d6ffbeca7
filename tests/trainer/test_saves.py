"""Saving beside the training: no slow disk is waited for; a job has succeeded when its adapter is there."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests import bench
from tests.outputs import Crash, assert_same_results, assert_whole, states
from tests.trainer.test_results import ready
from weftune import JobSpec, Options
from weftune.run.events import Stepped
from weftune.run.training import checkpoint
from weftune.trainer.results import TokenizerFiles

SOON = 30.0


@pytest.fixture(scope="module")
def model():
    return bench.base()


def job(name, steps, **keys):
    rows = bench.rows(bench.samples(10, seed=3))
    settings = {"batch_size": 3, "adapter": {"rank": 2}} | keys
    return JobSpec(name=name, data=rows, steps=steps, **settings)


class SlowDisk:
    """Where a file whose path ends like this is synced, the disk waits until the training has gone on."""

    def __init__(self, monkeypatch, *endings):
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.waited = []
        real = os.fsync

        def fsync(handle):
            if os.readlink(f"/proc/self/fd/{handle}").endswith(endings):
                self.began.set()
                self.waited.append(self.goes_on.wait(SOON))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)


def test_training_goes_on_while_a_slow_disk_takes_a_checkpoint(model, tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch, ".step-00000002.partial/tensors.safetensors")
    output, seen = tmp_path / "out", []

    def callback(event):
        if isinstance(event, Stepped) and event.step == 3:
            assert disk.began.wait(SOON)
            seen.append(checkpoint.newest_progress(output / "a" / "checkpoints"))
            disk.goes_on.set()

    bench.trainer(model, output, [job("a", 6, save_every=4)]).run(callback)
    assert disk.waited == [True], "step 3 was made while the checkpoint of step 2 was being written"
    assert seen == [None], "what is not written does not count"
    assert_whole(output)


def test_a_job_has_succeeded_when_its_adapter_is_on_disk_and_others_train_on_meanwhile(
    model, tmp_path, monkeypatch
):
    disk = SlowDisk(monkeypatch, "short/.adapter.partial/adapter_config.json")
    output, seen = tmp_path / "out", []
    trainer = bench.trainer(model, output, [job("short", 2, save_every=1), job("long", 40)])

    def callback(event):
        if isinstance(event, Stepped) and event.job == "long" and disk.began.is_set() and not seen:
            seen.append((states(output)["short"], (output / "short" / "adapter_config.json").exists()))
            seen.append((output / "short" / "checkpoints" / "step-00000001").is_dir())
            disk.goes_on.set()

    trainer.run(callback)
    assert disk.waited == [True]
    assert seen == [("running", False), True]
    assert_whole(output)


def test_a_bug_while_a_checkpoint_is_written_ends_the_run_and_it_can_be_resumed(model, tmp_path, monkeypatch):
    jobs = [job("a", 9, save_every=3)]
    bench.train(model, tmp_path / "want", jobs)

    def broken(path, tensors):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_hashed_tensors", broken)
        with pytest.raises(Crash):
            bench.train(model, tmp_path / "out", jobs)
    bench.trainer(model, tmp_path / "out", jobs, options=Options(resume=True)).run()
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", tmp_path / "want")


def steps_written(monkeypatch):
    """Will have the steps of all checkpoints that are written."""
    written = []

    def write(folder, snapshot, real=checkpoint.write):
        written.append(snapshot.progress.step)
        return real(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", write)
    return written


def test_a_job_that_does_not_say_how_often_is_not_saved_every_moment(model, tmp_path, monkeypatch):
    """Of a run of a few seconds there is nothing to lose, however many steps it has."""
    written = steps_written(monkeypatch)
    bench.train(model, tmp_path / "short", [job("silent", 60), job("told", 60, save_every=50)])
    assert written == [25, 50]
    written.clear()
    monkeypatch.setattr("weftune.trainer.loop.MIN_SAVE_SECONDS", 0.0)
    bench.train(model, tmp_path / "long", [job("silent", 60)])
    assert written == [12, 25, 37, 50]


def test_a_job_saves_no_training_state_at_its_last_step(model, tmp_path, monkeypatch):
    written = steps_written(monkeypatch)
    bench.train(model, tmp_path / "out", [job("a", 4, save_every=2)])
    assert written == [1, 2, 3]


def test_the_tokenizer_is_serialised_once_for_each_chat_template(model, tmp_path, monkeypatch):
    made = []

    def save_pretrained(self, *arguments, real=PreTrainedTokenizerFast.save_pretrained, **keys):
        made.append(self.chat_template)
        return real(self, *arguments, **keys)

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_pretrained)
    bench.train(model, tmp_path / "out", [job("a", 1), job("b", 1), job("c", 2)])
    assert made == [None]
    folders = [tmp_path / "out" / name for name in "abc"]
    files = [{path.name: path.read_bytes() for path in folder.glob("*token*")} for folder in folders]
    assert "tokenizer.json" in files[0]
    assert files[0] == files[1] == files[2]
    plain = ready()
    chat = replace(plain, spec=replace(plain.spec, data=replace(plain.spec.data, chat_template="chatml")))
    tokenizer = TokenizerFiles(bench.tokenizer())
    for _ in range(2):
        assert Path("chat_template.jinja") in tokenizer.files_with_template(chat)
        assert Path("chat_template.jinja") not in tokenizer.files_with_template(plain)
    assert len(made) == 3
