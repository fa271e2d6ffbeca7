"""The sentence that the page leads with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.report.example import SWEEP, Job, write_example
from weftune.report.read import Run, read_run
from weftune.report.verdict import verdicts


def run_of(folder: Path, *jobs: Job) -> Run:
    return read_run(write_example(folder, jobs))


def few_rows(run: Run) -> Run:
    return replace(run, jobs=tuple(replace(job, data={"evaluation_samples": 4}) for job in run.jobs))


def test_it_names_the_best_adapter_its_loss_against_the_base_and_the_rows(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, *SWEEP))
    assert found.lead == "r64-best is the best of 3 adapters."
    assert (found.change, found.tone) == ("50.0 % below the base", "good")
    assert found.losses == "validation loss 1.2256, base 2.4500"
    assert found.basis == "96 held-out rows, 9,000 tokens"
    assert found.caution == ""


def test_of_too_few_rows_it_says_so_and_calls_nothing_best(tmp_path: Path) -> None:
    (found,) = verdicts(few_rows(run_of(tmp_path, *SWEEP)))
    assert found.lead == "r64-best has the lowest loss of 3 adapters."
    assert found.caution.startswith(
        "Too few to tell which adapter is better: that takes at least 20 held-out"
    )


def test_a_loss_above_that_of_the_recorded_base_is_worse(tmp_path: Path) -> None:
    (found,) = verdicts(
        run_of(tmp_path, Job(name="a", base_loss=1.0), Job(name="b", base_loss=1.0, floor=1.1))
    )
    assert found.lead == "No adapter beats the base; b comes closest."
    assert found.tone == "worse"
    assert found.change.endswith("% above the base")


def test_each_set_of_rows_has_its_own_verdict(tmp_path: Path) -> None:
    found = verdicts(run_of(tmp_path, Job(name="a", path="a.jsonl"), Job(name="b", path="b.jsonl")))
    assert [verdict.basis.partition(" of ")[2] for verdict in found] == ["a.jsonl", "b.jsonl"]


def test_before_a_second_evaluation_only_the_base_is_told(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, Job(name="half", done=5, state="interrupted")))
    assert found.lead == "No adapter has been evaluated yet."
    assert found.losses == "validation loss of the base 2.4500"
    assert found.change == ""


def test_where_every_job_failed_no_adapter_was_trained(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, Job(name="hot", done=1, state="failed", reason="x")))
    assert (found.lead, found.tone) == ("No adapter was trained: the job failed.", "bad")


def test_without_held_out_rows_it_says_how_to_have_some(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, Job(name="a", evaluate=False)))
    assert "No job has held-out rows" in found.lead
    assert "eval: {fraction: 0.1}" in found.caution
