"""Training on random tokens before the first job: it leaves nothing behind."""

import torch

from tests import bench
from weftune import JobSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.run.events import OutOfMemory
from weftune.service.settings import Envelope
from weftune.service.training import expected_jobs
from weftune.trainer import warm_up as module
from weftune.trainer.loop import Loop
from weftune.trainer.warm_up import ROUNDS, warm_up

TOKENS = 8


def train(output, monkeypatch, warms_up, before=lambda loop: None):
    """Train a job, after a warm-up or not. Return the sizes of the warm-up's microbatches, and the job's
    losses and weights."""
    made, run, fetch = [], Loop.run, module.random_microbatch

    def run_after_warm_up(self, stop, callback=None):
        if warms_up:
            before(self)
            shapes = expected_jobs(Envelope(jobs=2, rank=4, sample_tokens=TOKENS), self.base.shape)
            warm_up(self, LoraSpec(rank=4), shapes, stop)
            assert not self.executor.attached
            monkeypatch.undo()
        run(self, stop, callback)

    def recorded(vocabulary, plan, kind):
        made.append(fetch(vocabulary, plan, kind))
        return made[-1]

    monkeypatch.setattr(Loop, "run", run_after_warm_up)
    monkeypatch.setattr(module, "random_microbatch", recorded)
    job = JobSpec(name="a", data=bench.rows(bench.samples(12)), steps=4, batch_size=4, learning_rate=1e-2)
    results = bench.trainer(bench.base(), output, [job]).run()
    assert results["a"].state == "succeeded"
    monkeypatch.undo()
    return made, bench.losses(output, "a"), bench.adapter(output / "a")


def test_a_job_after_a_warm_up_trains_as_without_one(tmp_path, monkeypatch):
    made, losses, weights = train(tmp_path / "out", monkeypatch, warms_up=True)
    assert {segment.step for one in made for segment in one.segments} == set(range(1, ROUNDS + 1))
    for one in made:
        assert {segment.job for segment in one.segments} == {"expected-0", "expected-1"}
        assert (one.targets_T != -100).sum() == one.rows - len(one.sample_lengths)
        assert set(one.sample_lengths) == {TOKENS}
    _, same_losses, same = train(tmp_path / "cold", monkeypatch, warms_up=False)
    assert losses == same_losses
    assert all(torch.equal(weights[name], same[name]) for name in same)


def test_a_warm_up_that_is_short_of_memory_ends_and_leaves_no_job(tmp_path, monkeypatch):
    def short(*_):
        raise OutOfMemory
        yield

    made, losses, _ = train(
        tmp_path / "out", monkeypatch, True, lambda loop: monkeypatch.setattr(loop.executor, "run", short)
    )
    assert not made
    assert len(losses) == 4
