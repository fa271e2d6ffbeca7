"""A damaged GGUF file is loaded or refused with a sentence; it never hangs, swells or ends in a traceback."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.base.packs import CPU
from tests.base.test_gguf import write_gguf
from tests.cases import is_within
from tests.families import tiny
from weftune.base.gguf import read_header
from weftune.base.load import load_base, load_tokenizer
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError

pytest.importorskip("gguf")


def mutated(whole: bytes, seed: int) -> bytes:
    """One to four changes, most of them in the header: bits, whole numbers, cuts, pieces moved."""
    rng = random.Random(seed)
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(8, min(len(data), 4000)) if rng.random() < 0.9 else rng.randrange(len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            number = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1])
            data[at : at + 8] = number.to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            del data[rng.randrange(len(data) // 2, len(data)) :]
    return bytes(data)


def try_all(tmp_path: Path, seeds: range, seconds: float) -> int:
    """How many were loaded; each within `seconds`."""
    whole = write_gguf(tmp_path / "whole.gguf", tiny("llama", torch.float32)).read_bytes()
    before = psutil.Process().memory_info().rss
    loaded, said = 0, []
    for seed in seeds:
        file = tmp_path / f"{seed}.gguf"
        file.write_bytes(mutated(whole, seed))
        started = time.process_time()
        try:
            load_tokenizer(BaseSpec(model=str(file)))
            load_base(BaseSpec(model=str(file)), CPU)
            loaded += 1
        except BaseModelError as error:
            said.append(str(error))
        assert is_within(time.process_time() - started, seconds), seed
        assert psutil.Process().memory_info().rss - before < 500 * 2**20, seed
    assert not [sentence for sentence in said if "\n" in sentence]
    return loaded


def test_damaged_files_are_loaded_or_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    try_all(tmp_path, range(40), 10.0)


@pytest.mark.slow
def test_hundreds_of_damaged_files_are_loaded_or_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    try_all(tmp_path, range(40, 340), 10.0)


def test_no_header_hangs_or_raises_anything_but_its_reason(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "whole.gguf", tiny("llama", torch.float32))
    whole = file.read_bytes()
    assert (
        read_header(file).integers["llama.block_count"]
        == tiny("llama", torch.float32).config.num_hidden_layers
    )
    started = time.process_time()
    for seed in range(200):
        file.write_bytes(mutated(whole, seed))
        try:
            read_header(file)
        except ValueError:
            continue
    assert is_within(time.process_time() - started, 20)
