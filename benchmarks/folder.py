"""What a benchmark gives `weftune train`: a base in a real shape with random weights, rows, a jobs file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weftune.bench.sizes import Size, build
from weftune.bench.timing import Hardware

SPECIAL = ("<pad>", "<s>", "</s>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Random tokens, all of them supervised."""

    samples: int
    shortest: int
    longest: int


def write_base(folder: Path, size: Size, hardware: Hardware) -> None:
    """A folder as it comes from the Hub; a word of the tokenizer is a token."""
    build(size, hardware).save_pretrained(folder)
    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(words), size.vocabulary)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def write_rows(path: Path, size: Size, rows: Rows, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(rows.shortest, rows.longest, rows.samples, endpoint=True)
    write_lengths(path, lengths.tolist(), size.vocabulary, rng)


def write_lengths(path: Path, lengths: Sequence[int], vocabulary: int, rng: np.random.Generator) -> None:
    """Rows of these lengths, of the first `vocabulary` tokens of the base."""
    drawn = (rng.integers(len(SPECIAL), vocabulary, length).tolist() for length in lengths)
    path.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in drawn))


def ranked_jobs(ranks: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"name": f"job{at}-r{rank}", "seed": at, "adapter": {"rank": rank}} for at, rank in enumerate(ranks)
    ]


def write_jobs(
    path: Path, base: Path, hardware: Hardware, jobs: Sequence[dict[str, Any]], **defaults: object
) -> None:
    """A jobs file; all jobs have the keys of `defaults`."""
    whole = {
        "base": {"model": str(base), "dtype": str(hardware.dtype).removeprefix("torch.")},
        "defaults": defaults,
        "jobs": list(jobs),
    }
    path.write_text(yaml.safe_dump(whole, sort_keys=False))


def lines_of(path: Path) -> list[str]:
    """The lines of a file that are not empty. Texts may hold other characters that Python ends a line at."""
    return [line for line in path.read_text().split("\n") if line]


def read_lines(path: Path) -> Iterable[dict[str, Any]]:
    return map(json.loads, lines_of(path))
