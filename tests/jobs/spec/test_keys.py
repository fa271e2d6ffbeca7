"""Names that a job may have, suggestions for misspelt ones, and keys written in the wrong section."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftune.core.bounds import format_value
from weftune.jobs.spec.build import missing_path_message
from weftune.jobs.spec.keys import name_fault, nearest_word, repeated_names, unknown_key


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "x" * 64, "com10", "con-1", "metrics", "9"])
def test_a_plain_name_is_taken(name):
    assert name_fault(name) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (None, "must be text, got nothing"),
        (["a"], "must be text, got a list"),
        (("a",), "must be text, got a list"),
        ({"a": 1}, "must be text, got a mapping"),
        (7, "must be text, got 7; write it in quotes"),
        (True, "must be text, got true; write it in quotes"),
        ("", "must not be empty"),
        ("x" * 65, "must have at most 64 letters, got 65"),
        ("a/b", 'must be a plain name and no path, got "a/b"'),
        ("a\\b", "must be a plain name and no path"),
        (".", "must be a plain name and no path"),
        ("..", "must be a plain name and no path"),
        (".a", 'must not start with a dot or a dash, got ".a"'),
        ("-a", "must not start with a dot or a dash"),
        ("a b", "must be made of ASCII letters, digits, . _ and - and not end with a dot"),
        ("a.", "must be made of ASCII letters, digits, . _ and - and not end with a dot"),
        ("ä", "must be made of ASCII letters, digits, . _ and - and not end with a dot"),
        ("Con", '"Con" is a reserved name; choose another'),
        ("nul.txt", '"nul.txt" is a reserved name'),
        ("com0", "is a reserved name"),
        ("LPT9.x", "is a reserved name"),
        ("Metrics.jsonl", '"Metrics.jsonl" is a reserved name'),
        ("ranks", "is a reserved name"),
    ],
)
def test_a_name_that_is_no_folder_everywhere_is_refused(name, sentence):
    fault = name_fault(name)
    assert fault is not None
    assert fault.startswith(sentence) or sentence in fault


def test_quotes_are_advised_only_where_they_mend():
    for name, got in ((None, "nothing"), ([], "an empty list"), ({"a": 1}, "a mapping")):
        assert name_fault(name) == f"must be text, got {got}"


def test_a_name_is_taken_once_whatever_its_case():
    assert list(repeated_names(["a", "b", 3, 3, "A", "a", "c"])) == [
        (4, '"A" differs from the name of jobs[0] only by case; choose another'),
        (5, '"a" is already the name of jobs[0]; choose another'),
    ]
    assert list(repeated_names(["x", "b", "b"])) == [
        (2, '"b" is already the name of jobs[1]; choose another')
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "nothing"),
        (True, "true"),
        (False, "false"),
        ("a\n  b", '"a b"'),
        ("x" * 40, '"' + "x" * 40 + '"'),
        ("x" * 41, '"' + "x" * 39 + '…"'),
        (10**40 - 1, "9" * 40),
        (10**40, "a number of many digits"),
        (-(10**40), "a number of many digits"),
        (1.5, "1.5"),
        ({}, "an empty mapping"),
        ({"a": 1}, "a mapping"),
        ([], "an empty list"),
        ((1,), "a list"),
        (1j, "1j"),
    ],
)
def test_a_value_is_quoted_short_and_as_yaml_writes_it(value, shown):
    assert format_value(value) == shown


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("dora", ["lora"], None),
        ("vera", ["lora"], None),
        ("dpo", ["sft"], None),
        ("rnak", ["rank", "kind"], "rank"),
        ("bst", ["best", "last"], "best"),
        ("cosin", ["linear", "cosine", "constant"], "cosine"),
        ("lin", ["linear", "cosine", "constant"], "linear"),
        ("c", ["linear", "cosine", "constant"], None),
        ("co", ["linear", "cosine", "constant"], None),
        ("li", ["linear", "cosine", "constant"], None),
        ("con", ["constant", "continuous"], None),
        ("ncosie", ["linear", "cosine", "constant"], "cosine"),
        ("learning_rat", ["learning_rates", "learning_rate", "rank"], "learning_rate"),
    ],
)
def test_a_name_is_near_by_a_slip_or_as_an_abbreviation_and_not_by_rhyme(
    word: str, known: list[str], near: str | None
) -> None:
    assert nearest_word(word, known) == near


def test_a_key_that_is_like_none_is_answered_with_the_keys_that_there_are() -> None:
    assert unknown_key("job", "learning_rat").endswith("did you mean learning_rate?")
    assert "its keys are" in unknown_key("adapter", "bank")


def test_a_file_is_near_by_its_name_and_not_by_its_ending(tmp_path: Path) -> None:
    for name in ("train.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    assert missing_path_message(tmp_path, "trian.jsonl").endswith("did you mean train.jsonl?")
    assert missing_path_message(tmp_path, "train.json").endswith("did you mean train.jsonl?")
    assert "did you mean" not in missing_path_message(tmp_path, "a.jsonl")


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
        ("base", "zzz", "is not a key of base; its keys are model, dtype, revision, quantize, rope_scaling"),
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
