"""Jobs in the order of their results, and the sentence that the page leads with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.example import SWEEP, Job, write_example
from weftune.report.compare import (
    MIN_ROWS,
    MIN_TOKENS,
    base_accuracy,
    base_validation,
    best_jobs,
    differing_keys,
    held_out_rows,
    kept_validation,
    sort_by_result,
    validation_key,
    verdicts,
)
from weftune.report.read import JobRecord, Run, read_run


def jobs_of(folder: Path, *jobs: Job) -> tuple[JobRecord, ...]:
    return read_run(write_example(folder, jobs)).jobs


def test_jobs_are_sorted_by_validation_then_training_loss_with_the_failed_last(tmp_path: Path) -> None:
    ordered = [job.name for job in sort_by_result(jobs_of(tmp_path, *SWEEP))]
    assert ordered == ["r64-best", "r16", "r8-slow", "no-validation", "late", "hot"]


def test_only_keys_that_differ_are_named_with_dots(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, Job(name="a", rank=8), Job(name="b", rank=16, learning_rate=1e-3))
    assert differing_keys(jobs) == ("adapter.rank", "learning_rate")


def test_a_job_without_a_section_does_not_bring_in_its_empty_keys(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, Job(name="a"), Job(name="b", evaluate=False))
    assert differing_keys(jobs) == ("eval.every", "eval.fraction")


def test_one_job_differs_from_nobody(tmp_path: Path) -> None:
    assert differing_keys(jobs_of(tmp_path, Job(name="a"))) == ()


def test_the_validation_loss_that_counts_is_that_of_the_adapter_that_was_kept(tmp_path: Path) -> None:
    best, last = jobs_of(
        tmp_path, Job(name="best", rank=64, keep="best"), Job(name="last", rank=64, keep="last")
    )
    losses = {line.step: line.loss for line in best.evaluations}
    assert best.best_step not in (None, 60)
    assert kept_validation(best) == losses[best.best_step or 0]
    assert kept_validation(last) == losses[60]


def test_the_best_job_is_marked_once_where_all_share_their_validation_rows(tmp_path: Path) -> None:
    assert best_jobs(jobs_of(tmp_path, *SWEEP)) == {"r64-best": ""}


def test_each_set_of_validation_rows_has_its_own_best(tmp_path: Path) -> None:
    jobs = jobs_of(
        tmp_path,
        Job(name="a1", path="data/a.jsonl", floor=2.0),
        Job(name="a2", path="data/a.jsonl", floor=1.9),
        Job(name="b1", path="data/b.jsonl", floor=1.0),
        Job(name="b2", path="data/b.jsonl", floor=1.1),
        Job(name="alone", path="data/c.jsonl", floor=0.5),
    )
    assert best_jobs(jobs) == {"b1": "b.jsonl", "a2": "a.jsonl"}


def test_without_held_out_rows_no_job_is_best(tmp_path: Path) -> None:
    jobs = jobs_of(
        tmp_path,
        Job(name="a", evaluate=False, floor=2.0),
        Job(name="b", evaluate=False, floor=1.0),
    )
    assert best_jobs(jobs) == {}


@pytest.mark.parametrize(
    ("rows", "tokens", "best"),
    [
        (MIN_ROWS, MIN_TOKENS, {"low": ""}),
        (MIN_ROWS - 1, 90_000, {}),
        (900, MIN_TOKENS - 1, {}),
        (None, 90_000, {"low": ""}),
    ],
)
def test_best_needs_more_than_a_handful_of_held_out_rows_and_tokens(
    tmp_path: Path, rows: int | None, tokens: int, best: dict[str, str]
) -> None:
    jobs = [
        replace(
            job,
            data={"evaluation_samples": rows},
            evaluations=tuple(replace(line, tokens=tokens) for line in job.evaluations),
        )
        for job in jobs_of(tmp_path, Job(name="low", floor=1.0), Job(name="high"))
    ]
    assert best_jobs(jobs) == best


def test_an_adapter_that_is_worse_than_the_base_is_never_best(tmp_path: Path) -> None:
    low, high = jobs_of(tmp_path, Job(name="low", floor=1.0), Job(name="high"))
    assert best_jobs([replace(low, base_loss=1.0), replace(high, base_loss=1.0)]) == {}


def test_the_recorded_loss_of_the_base_counts_before_step_0(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, Job(name="a"))
    assert base_validation(job) == pytest.approx(2.45)
    assert base_validation(replace(job, base_loss=1.5)) == 1.5
    assert base_accuracy(job) == 0.55
    assert base_accuracy(replace(job, base_loss=1.5)) is None, "step 0 was not the base"


def test_a_job_that_was_evaluated_only_before_training_has_no_result(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, Job(name="a", done=5, state="interrupted"))
    assert [line.step for line in job.evaluations] == [0]
    assert kept_validation(job) is None


def test_a_failed_job_is_never_best(tmp_path: Path) -> None:
    low, high, higher = jobs_of(
        tmp_path, Job(name="low", floor=0.1), Job(name="high"), Job(name="higher", floor=2.0)
    )
    assert best_jobs([replace(low, state="failed"), high, higher]) == {"high": ""}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_that_ended_badly_is_no_rival(tmp_path: Path, state: str) -> None:
    low, high = jobs_of(tmp_path, Job(name="low", floor=0.1), Job(name="high"))
    assert best_jobs([low, high]) == {"low": ""}
    assert best_jobs([replace(low, state=state), high]) == {}


def test_of_equal_results_the_job_that_stands_first_in_the_file_is_best(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, Job(name="z"))
    again = replace(job, name="a")
    assert best_jobs([job, again]) == {"z": ""}
    assert best_jobs([again, job]) == {"a": ""}


def test_jobs_on_one_validation_file_can_be_compared_whatever_they_train_on(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, Job(name="a"))
    held_out = {"eval": {"path": "held-out.jsonl", "every": 0.1}}
    one = replace(job, spec={**job.spec, **held_out, "data": {"path": "a.jsonl", "max_length": 512}})
    two = replace(job, spec={**job.spec, **held_out, "data": {"path": "b.jsonl", "max_length": 512}})
    cut = replace(job, spec={**job.spec, **held_out, "data": {"path": "b.jsonl", "max_length": 64}})
    assert validation_key(one) == validation_key(two) != validation_key(cut)


def test_losses_of_different_objectives_are_not_compared(tmp_path: Path) -> None:
    floors = {"a": 2.0, "b": 1.9, "c": 1.0, "d": 1.1}
    jobs = jobs_of(tmp_path, *(Job(name=name, floor=floor) for name, floor in floors.items()))
    tuned = [
        replace(
            job, spec={**job.spec, "objective": {"kind": "dpo", "beta": 0.1 if job.name in "ab" else 0.5}}
        )
        for job in jobs
    ]
    assert held_out_rows(tuned[0]) == held_out_rows(jobs[0]) // 2
    best = best_jobs(tuned)
    assert set(best) == {"b", "c"}
    assert all(rows.endswith(" by dpo") for rows in best.values())


def run_of(folder: Path, *jobs: Job) -> Run:
    return read_run(write_example(folder, jobs))


def few_rows(run: Run) -> Run:
    return replace(run, jobs=tuple(replace(job, data={"evaluation_samples": 4}) for job in run.jobs))


def test_it_names_the_best_adapter_its_loss_against_the_base_and_the_rows(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, *SWEEP))
    assert found.introduction == "r64-best is the best of 3 adapters."
    assert (found.change, found.colour_class) == ("50.0 % below the base", "good")
    assert found.losses == "validation loss 1.2256, base 2.4500"
    assert found.basis == "96 held-out rows, 9,000 tokens"
    assert found.caution == ""


def test_of_too_few_rows_it_says_so_and_calls_nothing_best(tmp_path: Path) -> None:
    (found,) = verdicts(few_rows(run_of(tmp_path, *SWEEP)))
    assert found.introduction == "r64-best has the lowest loss of 3 adapters."
    assert found.caution.startswith(
        "Too few to tell which adapter is better: that takes at least 20 held-out"
    )


def test_a_loss_above_that_of_the_recorded_base_is_worse(tmp_path: Path) -> None:
    (found,) = verdicts(
        run_of(tmp_path, Job(name="a", base_loss=1.0), Job(name="b", base_loss=1.0, floor=1.1))
    )
    assert found.introduction == "No adapter beats the base; b comes closest."
    assert found.colour_class == "worse"
    assert found.change.endswith("% above the base")


def test_each_set_of_rows_has_its_own_verdict(tmp_path: Path) -> None:
    found = verdicts(run_of(tmp_path, Job(name="a", path="a.jsonl"), Job(name="b", path="b.jsonl")))
    assert [verdict.basis.partition(" of ")[2] for verdict in found] == ["a.jsonl", "b.jsonl"]


def test_before_a_second_evaluation_only_the_base_is_told(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, Job(name="half", done=5, state="interrupted")))
    assert found.introduction == "No adapter has been evaluated yet."
    assert found.losses == "validation loss of the base 2.4500"
    assert found.change == ""


def test_where_every_job_failed_no_adapter_was_trained(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, Job(name="hot", done=1, state="failed", reason="x")))
    assert (found.introduction, found.colour_class) == ("No adapter was trained: the job failed.", "bad")


def test_without_held_out_rows_it_says_how_to_have_some(tmp_path: Path) -> None:
    (found,) = verdicts(run_of(tmp_path, Job(name="a", evaluate=False)))
    assert "No job has held-out rows" in found.introduction
    assert "eval: {fraction: 0.1}" in found.caution
