from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data import families
from weftune.data.prepare import prepare
from weftune.data.samples import Samples
from weftune.data.spec import DataSpec

SHARED = Path(__file__).parents[2].parent / "shared"


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    return families.smollm2()


@pytest.fixture(scope="session")
def gpt2() -> PreTrainedTokenizerFast:
    return families.gpt2()


@pytest.fixture(scope="session")
def stories() -> PreTrainedTokenizerFast:
    folder = SHARED / "models" / "stories15m"
    if not folder.exists():
        pytest.skip("stories15m is not here")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def samples_of(tmp_path: Path) -> Callable[..., Samples]:
    """Rows and a tokenizer to samples."""

    def make(rows: list[Any], tokenizer: Any, **spec: Any) -> Samples:
        return prepare(DataSpec(rows=rows, **spec), None, tokenizer, tmp_path / "cache").train

    return make


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def supervised_runs(samples: Samples, i: int, tokenizer: Any) -> list[str]:
    """The decoded text of every unbroken run of supervised tokens."""
    tokens, mask = samples.tokens(i).tolist(), samples.mask(i).tolist()
    runs: list[list[int]] = []
    for at, token in enumerate(tokens):
        if mask[at]:
            if at == 0 or not mask[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def whole_text(samples: Samples, i: int, tokenizer: Any) -> str:
    return tokenizer.decode(samples.tokens(i).tolist(), clean_up_tokenization_spaces=False)
