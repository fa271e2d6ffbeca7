"""Jobs made ready, divided over devices by the time that they have still to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import bench
from weftune import JobSpec, Options
from weftune.core.files import cache_folder
from weftune.errors import PlanError
from weftune.launch.split import SAMPLED_BATCHES, divide_jobs, fitting_jobs, remaining_work
from weftune.plan.cost.memory import SLACK_BYTES, MemoryModel
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.layout.choose import Machine
from weftune.report.read import JobRecord
from weftune.run.measure.memory import bytes_before_base
from weftune.run.training.state import Progress
from weftune.trainer.job import PreparedJob, prepare_job
from weftune.trainer.machine import launcher_machine

SHAPE = bench.base("llama").shape
ROWS = bench.rows(bench.samples(24, seed=1))


class Heard:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, row: JobRecord) -> None:
        raise AssertionError("nobody moves while jobs are divided")

    def note(self, text: str) -> None:
        self.notes.append(text)


def ready(name: str = "a", **keys: object) -> PreparedJob:
    job = JobSpec(name=name, data=ROWS, batch_size=4, **keys)
    return prepare_job(job, 0, bench.tokenizer(), SHAPE, cache_folder() / "tokens")


def machine(count: int, memory: int | None = None) -> Machine:
    return launcher_machine(Options(memory=memory), bench.CPU, SHAPE, count)


def names(jobs: list[PreparedJob]) -> frozenset[str]:
    return frozenset(job.name for job in jobs)


def test_jobs_of_different_lengths_become_even_shares_whatever_the_clock_says(tmp_path: Path) -> None:
    jobs = [ready(f"job{steps}", steps=steps) for steps in (10, 20, 30, 40, 50, 60, 70)]
    cost = uncalibrated_cost_model(SHAPE)
    for count in (2, 3):
        shares = divide_jobs(jobs, cost, machine(count), count, tmp_path, names(jobs))
        seconds = [share.seconds for share in shares]
        assert max(seconds) < 1.1 * min(seconds)
        assert shares == divide_jobs(jobs, cost, machine(count), count, tmp_path, names(jobs))
        assert shares != divide_jobs(jobs, cost, machine(count + 1), count + 1, tmp_path, names(jobs))


def test_with_fewer_jobs_than_devices_nobody_is_started_for_nothing(tmp_path: Path) -> None:
    jobs = [ready("a", steps=3), ready("b", steps=9)]
    shares = divide_jobs(jobs, uncalibrated_cost_model(SHAPE), machine(4), 4, tmp_path, names(jobs))
    assert sorted(share.jobs for share in shares) == [("a",), ("b",)]


def test_only_what_is_left_of_a_job_counts() -> None:
    job = ready(steps=40, eval={"fraction": 0.2, "every": 10})
    whole, half = remaining_work(job, Progress()), remaining_work(job, Progress(step=20, evaluated=20))
    assert (whole.steps, whole.evaluations) == (40, 5)
    assert (half.steps, half.evaluations) == (20, 2)
    assert {batch.step for batch in half.batches} <= set(range(21, 41))
    assert len(whole.batches) == len(half.batches) == SAMPLED_BATCHES
    assert remaining_work(job, Progress(step=40, evaluated=40)).steps == 0


def test_a_job_too_large_for_a_share_is_named_with_its_numbers_and_weighs_nothing(tmp_path: Path) -> None:
    jobs = [ready("a", steps=5), ready("b", steps=5), ready("large", steps=500, adapter={"rank": 8192})]
    state = MemoryModel(SHAPE, 0).state_bytes([jobs[-1].shape])
    assert state > 100 << 20
    # For two processes: what any job needs, and half of what the large one needs for itself.
    budget = 2 * (bytes_before_base(bench.CPU) + SHAPE.base_bytes + SLACK_BYTES + state // 2)
    heard = Heard()
    fits = fitting_jobs(SHAPE, machine(2, budget), jobs, heard)
    assert fits == {"a", "b"}
    (note,) = heard.notes
    assert note.startswith("warning: large: beside the base on one device it needs ")
    assert note.endswith(" GiB are available")
    shares = divide_jobs(jobs, uncalibrated_cost_model(SHAPE), machine(2, budget), 2, tmp_path, fits)
    assert shares[0].seconds == pytest.approx(shares[1].seconds)


def test_where_nobody_fits_the_sentence_says_what_to_do() -> None:
    jobs = [ready("a"), ready("b")]
    with pytest.raises(
        PlanError, match=r"job b: beside the base on one device it needs .*stages with --pipeline"
    ):
        fitting_jobs(SHAPE, machine(2, 1 << 20), jobs, Heard())
