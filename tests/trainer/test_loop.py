"""The loop at the edges: which job goes back when memory is short, which is paused, which is saved first."""

import pytest
import torch

from tests import bench
from tests.outputs import status
from tests.trainer.test_saves import job, steps_written
from weftune import Options
from weftune.run.events import Stepped
from weftune.run.training import checkpoint
from weftune.run.training.writer import Unsaved


def short_of_memory(base, is_short):
    """A device on which passes run out of memory while `is_short` returns True."""

    def hook(_module, _args):
        if is_short():
            raise torch.OutOfMemoryError("no room")

    base.model.base_model.register_forward_pre_hook(hook)


def test_when_memory_is_short_the_job_of_the_lowest_priority_goes_back(tmp_path, monkeypatch):
    sent_back = []

    def write(folder, snapshot, real=checkpoint.write):
        sent_back.append(folder.parent.name)
        return real(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", write)
    base = bench.base()
    jobs = [job("low", 3), job("urgent", 3, priority=5), job("middle", 3, priority=1)]
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(capacity=20))
    short_of_memory(base, lambda: len(trainer.loop.executor.aboard) > 1)
    results = trainer.run()
    assert sent_back == ["low", "middle", "low"], "from three jobs to one, and from the other two to one"
    assert {result.state for result in results.values()} == {"succeeded"}


def test_when_a_job_has_ended_as_many_come_aboard_again_as_memory_holds(tmp_path):
    """As long as `a` is aboard, two jobs fit."""
    base = bench.base()
    jobs = [job("a", 2), *(job(name, 6) for name in ("b", "c", "d"))]
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(capacity=20))
    aboard = []

    def is_short():
        present = trainer.loop.executor.aboard
        return "a" in present and len(present) > 2

    short_of_memory(base, is_short)
    trainer.run(lambda _: aboard.append(frozenset(trainer.loop.executor.aboard)))
    assert aboard[0] == {"a", "b"}
    assert frozenset("bcd") in aboard


@pytest.mark.parametrize(("step", "state"), [(2, "paused"), (3, "succeeded")])
def test_a_job_whose_checkpoint_is_lost_is_paused_unless_it_has_made_its_last_step(tmp_path, step, state):
    trainer = bench.trainer(bench.base(), tmp_path / "out", [job("a", 3)])

    def callback(event):
        if isinstance(event, Stepped) and event.step == step:
            trainer.loop._pause_unsaved(Unsaved("a", step - 1, "No space left on device"))

    assert trainer.run(callback)["a"].state == state
    if state == "paused":
        assert "step 1 cannot be written: No space left" in status(tmp_path / "out")["jobs"]["a"]["reason"]


def test_a_job_that_starts_from_a_folder_is_saved_before_its_first_step(tmp_path, monkeypatch):
    """The folder may be gone when the job is to resume; jobs that start anew need no checkpoint for that."""
    base = bench.base()
    bench.train(base, tmp_path / "before", [job("source", 1)])
    written = steps_written(monkeypatch)
    start = {"rank": 2, "init_from": str(tmp_path / "before" / "source")}
    bench.trainer(base, tmp_path / "out", [job("from", 10, adapter=start), job("anew", 10)]).run()
    assert written == [0]
