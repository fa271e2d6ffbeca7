"""A key that stands in the wrong place is answered with where it belongs."""

from __future__ import annotations

import pytest

from weftune.jobs.spec.keys import unknown_key


@pytest.mark.parametrize(
    ("section", "key", "sentence"),
    [
        ("job", "path", "is not a key of a job; write data.path"),
        ("job", "lr", "write learning_rate"),
        ("job", "Batch-Size ", "write batch_size"),
        ("job", "output", "is not a key of a job; write output at the top of the file, beside jobs"),
        ("job", "dtype", "is not a key of a job; write base.dtype at the top of the file, beside jobs"),
        ("job", "weight", "is not a key of a job; did you mean weight_decay?"),
        ("adapter", "max_length", "is not a key of adapter; write data.max_length"),
        ("adapter", "seed", "is not a key of adapter; write seed one level up, beside adapter"),
        (
            "adapter",
            "per_device_train_batch_size",
            "write batch_size one level up, beside adapter (the",
        ),
        ("eval", "max_lenght", "is not a key of eval; did you mean data.max_length?"),
        ("run", "rank", "is not a key of the file; write adapter.rank in each job, or under defaults"),
        ("run", "seed", "is not a key of the file; write seed in each job, or under defaults"),
        ("base", "rank", "is not a key of base; write adapter.rank in each job, or under defaults"),
        ("base", "zzz", "is not a key of base; its keys are model, dtype, revision, quantize"),
        ("source", "wieght", "is not a key of a source of data; did you mean weight?"),
        ("job", "tf32", "leave it out"),
    ],
)
def test_a_key_that_a_section_does_not_know_is_answered_with_its_place(
    section: str, key: str, sentence: str
) -> None:
    assert unknown_key(section, key).startswith(sentence)
    if not sentence.endswith("(the"):
        assert unknown_key(section, key) == sentence
