"""`--set`: which keys of a started job may change, and how that is remembered."""

from __future__ import annotations

import pytest

from weftune import JobSpec
from weftune.errors import SpecError
from weftune.jobs.spec.retry import apply_changes, apply_retries, new_retry, read_changes
from weftune.jobs.spec.spec import resolve_job

ROWS = [{"text": "a"}, {"text": "b"}]


def job(**keys: object) -> JobSpec:
    return JobSpec(name="a", data=ROWS, steps=8, **keys)


def test_values_are_read_as_the_jobs_file_reads_them() -> None:
    words = [
        "learning_rate=1e-5",
        "clip=null",
        "schedule=cosine",
        "adapter.dropout=0.2",
        "early_stop.patience=3",
    ]
    assert read_changes(words) == {
        "learning_rate": 1e-5, "clip": None, "schedule": "cosine", "adapter.dropout": 0.2,
        "early_stop.patience": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("learning_rate", r"--set learning_rate: write KEY=VALUE, such as learning_rate=1e-5"),
        ("lr=1", r"--set lr: write learning_rate"),
        ("batch_size=3", r"--set batch_size: a started job cannot change it: it decides the job's rows"),
        ("adapter.rank=3", r"--set adapter.rank: a started job cannot change it"),
        ("steps=300", r"--set steps: a started job cannot change it"),
        ("adapter.droput=0.1", r"--set adapter.droput: .*did you mean dropout"),
        ("flavour=mint", r"--set flavour: is not a key of a job"),
    ],
)
def test_other_keys_are_refused_with_a_sentence(word: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        read_changes([word])


def test_a_key_that_cannot_change_is_refused_with_the_command_that_trains_the_job_anew() -> None:
    with pytest.raises(SpecError, match=r"train it anew with weftune train j.yaml --resume --restart a, or"):
        read_changes(["steps=300"], "weftune train j.yaml --resume", ["a"])


def test_a_changed_value_is_checked_as_the_files_would_be() -> None:
    changed = apply_changes(job(adapter={"rank": 4}), {"learning_rate": 1e-5, "adapter.dropout": 0.5})
    assert (changed.learning_rate, changed.adapter.dropout, changed.adapter.rank) == (1e-5, 0.5, 4)
    assert changed.data == job().data
    for key, value in (("learning_rate", -1.0), ("learning_rate", "much"), ("adapter.dropout", 2.0)):
        with pytest.raises(SpecError, match=f"--set {key}: "):
            apply_changes(job(), {key: value})


def test_what_was_changed_is_remembered_unless_the_file_says_a_third_thing() -> None:
    changed = apply_changes(job(learning_rate=0.1), {"learning_rate": 0.01})
    retry = new_retry(resolve_job(job(learning_rate=0.1)), resolve_job(changed), 4, "its loss is nan")
    assert retry.changed == {"learning_rate": (0.1, 0.01)}
    assert retry.sentence() == "retried from step 4 with learning_rate 0.01 (was 0.1), after: its loss is nan"
    record = [retry.record()]
    assert apply_retries(job(learning_rate=0.1), record).learning_rate == 0.01
    assert apply_retries(job(learning_rate=0.01), record).learning_rate == 0.01
    assert apply_retries(job(learning_rate=0.7), record).learning_rate == 0.7
    again = new_retry(
        resolve_job(changed), resolve_job(apply_changes(changed, {"learning_rate": 1e-3})), 4, ""
    )
    assert apply_retries(job(learning_rate=0.1), [*record, again.record()]).learning_rate == 1e-3
