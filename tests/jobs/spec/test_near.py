"""Suggestions are near or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftune.jobs.spec.keys import unknown_key
from weftune.jobs.spec.near import nearest
from weftune.jobs.spec.paths import missing


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
    assert nearest(word, known) == near


def test_a_key_that_is_like_none_is_answered_with_the_keys_that_there_are() -> None:
    assert unknown_key("job", "learning_rat").endswith("did you mean learning_rate?")
    assert "its keys are" in unknown_key("adapter", "bank")


def test_a_file_is_near_by_its_name_and_not_by_its_ending(tmp_path: Path) -> None:
    for name in ("train.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    assert missing(tmp_path, "trian.jsonl").endswith("did you mean train.jsonl?")
    assert missing(tmp_path, "train.json").endswith("did you mean train.jsonl?")
    assert "did you mean" not in missing(tmp_path, "a.jsonl")
