"""Reference log-probabilities of jobs: shared by equal jobs, read from disk, lost only with both files."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import bench
from tests.run import executors
from weftune.adapters.registry import get_kind
from weftune.run.events import Scored
from weftune.trainer.references import COPY_FILE, References


@pytest.fixture
def base():
    return bench.base("llama")


def job_of(base, name, seed=1, **keys):
    """A job with nine training samples and three held-out samples."""
    job = executors.prepare(base, name, seed=seed, eval={"fraction": 0.25}, **keys)
    return replace(job, reference_data=job.data)


@pytest.fixture
def start(base, tmp_path):
    """A folder with an adapter."""
    job = executors.prepare(base, "start")
    made = executors.job_training(base, job)
    folder, spec = tmp_path / "start", job.spec.adapter
    get_kind("lora").save(
        folder, spec, made.layout.parameter_views(made.master), base.shape.sites, "tiny/llama"
    )
    return folder


def score(references, name, count=None):
    """Score the first `count` samples that the job still needs: sample n gets -n - 1."""
    chosen = references.pending_scores()[name][:count].tolist()
    references.record_scores(Scored(name, 0, tuple(chosen), tuple(-index - 1.0 for index in chosen)))


def numbers_of(job):
    return [part.references.tolist() for part in job.data.parts]


def test_a_job_without_a_reference_policy_does_not_wait(base, tmp_path):
    references = References(base, tmp_path / "cache", print)
    job = executors.prepare(base, "plain")
    assert references.add_job(job, tmp_path / "plain", None, has_begun=False) is job
    assert references.pending_scores() == {}
    assert references.finish_window() == {}
    assert not (tmp_path / "cache").exists()


def test_of_equal_jobs_one_is_scored_for_all_and_later_ones_read_the_cache(base, tmp_path):
    references = References(base, tmp_path / "cache", print)
    jobs = [job_of(base, "a"), job_of(base, "b", learning_rate=1.0), job_of(base, "c", seed=2)]
    for job in jobs:
        assert references.add_job(job, tmp_path / job.name, None, has_begun=False) is job
    pending = references.pending_scores()
    count = sum(map(len, jobs[0].data.parts))
    assert {name: len(found) for name, found in pending.items()} == {"a": count, "b": 0, "c": 12}
    score(references, "a")
    score(references, "c", 5)
    found = references.finish_window()
    assert found.keys() == {"a", "b"}
    assert references.pending_scores().keys() == {"c"}
    expected = (-np.arange(count) - 1.0).tolist()
    train, held_out = numbers_of(jobs[0].with_references(found["a"]))
    assert train + held_out == expected
    later = References(base, tmp_path / "cache", print)
    read = later.add_job(job_of(base, "later"), tmp_path / "later", None, has_begun=False)
    assert numbers_of(read) == [train, held_out]
    assert later.pending_scores() == {}
    assert later.add_job(read, tmp_path / "later", None, has_begun=False) is read


def test_a_kill_in_the_middle_keeps_what_earlier_windows_scored(base, tmp_path):
    first = References(base, tmp_path / "cache", print)
    first.add_job(job_of(base, "a"), tmp_path / "a", None, has_begun=False)
    score(first, "a", 5)
    assert first.finish_window() == {}
    score(first, "a", 2)
    killed = References(base, tmp_path / "cache", print)
    killed.add_job(job_of(base, "a"), tmp_path / "a", None, has_begun=False)
    assert killed.pending_scores()["a"].tolist() == list(range(5, 12))
    assert not (tmp_path / "a" / COPY_FILE).exists()


def test_who_leaves_hands_its_scoring_to_the_next_job(base, tmp_path):
    references = References(base, tmp_path / "cache", print)
    for name in "ab":
        references.add_job(job_of(base, name), tmp_path / name, None, has_begun=False)
    references.remove_job("a")
    assert {name: len(found) for name, found in references.pending_scores().items()} == {"b": 12}
    references.remove_job("b")
    assert references.pending_scores() == {}


def test_another_base_dtype_sample_or_adapter_has_scores_of_its_own(base, start, tmp_path):
    def is_scored(base, job, folder=None):
        references = References(base, tmp_path / "cache", print)
        found = references.add_job(job, tmp_path / "other", folder, has_begun=False)
        if references.pending_scores():
            score(references, job.name)
            references.finish_window()
            (tmp_path / "other" / COPY_FILE).unlink()
        return found.data.train.references is not None

    from_adapter = {"adapter": {"rank": 4, "init_from": str(start)}}
    cases = [
        (base, job_of(base, "a"), None),
        (bench.base("llama", seed=1), job_of(base, "a"), None),
        (bench.base("llama", torch.float32), job_of(base, "a"), None),
        (base, job_of(base, "a", seed=2), None),
        (base, job_of(base, "a", **from_adapter), start),
        (base, job_of(base, "a", adapter={"rank": 4, "alpha": 99, "init_from": str(start)}), start),
    ]
    assert [is_scored(*case) for case in cases] == [False] * 6
    (tmp_path / "other" / COPY_FILE).unlink(missing_ok=True)
    assert [is_scored(*case) for case in cases] == [True] * 6


def test_a_job_that_has_begun_reads_its_own_copy_and_is_lost_without_it(base, start, tmp_path):
    job, checkpoints = job_of(base, "a", adapter={"rank": 4, "init_from": str(start)}), tmp_path / "a"
    references = References(base, tmp_path / "cache", print)
    references.add_job(job, checkpoints, start, has_begun=False)
    score(references, "a")
    expected = numbers_of(job.with_references(references.finish_window()["a"]))
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    again = References(base, tmp_path / "cache", print)
    assert numbers_of(again.add_job(job, checkpoints, None, has_begun=True)) == expected
    (checkpoints / COPY_FILE).unlink()
    assert again.add_job(job, checkpoints, None, has_begun=True) is None
    # At step 0 its adapter, read from a checkpoint, still is the one that it started from.
    assert again.add_job(job, checkpoints, None, has_begun=False) is job
    assert len(again.pending_scores()["a"]) == 12
    # The base alone can always score.
    bare = job_of(base, "bare")
    assert again.add_job(bare, tmp_path / "bare", None, has_begun=True) is bare


def test_a_full_disk_is_told_and_training_does_not_wait_for_it(base, tmp_path):
    (tmp_path / "cache").write_text("")
    told = []
    references = References(base, tmp_path / "cache", told.append)
    references.add_job(job_of(base, "a"), tmp_path / "a", None, has_begun=False)
    score(references, "a")
    assert references.finish_window().keys() == {"a"}
    assert len(told) == 1
    assert told[0].startswith("warning: cannot write")
