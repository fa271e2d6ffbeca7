"""Mutated safetensors are refused or loaded sanely, by whatever opens them; nothing runs, nothing swells."""

from __future__ import annotations

import json
import random
from pathlib import Path

import psutil
import pytest
import torch

from tests.base.folders import model_folder
from tests.base.packs import CPU
from tests.families import tiny
from tests.oracle import lora_config, write_start
from weftune.adapters.lora.files import read_adapter
from weftune.base.host.source import MappedFile
from weftune.base.load import load_plain
from weftune.base.spec import BaseSpec
from weftune.base.weights import weight_files
from weftune.errors import AdapterError, BaseModelError

MOST_GROWTH = 50 * 2**20
NUMBERS = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def mutated(whole: bytes, seed: int) -> bytes:
    """A few changes, most of them in the header: bits, bytes, lengths, numbers in its JSON, cuts."""
    rng = random.Random(seed)
    data = bytearray(whole)
    stop = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(stop, len(data))) if rng.random() < 0.8 else rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice(b'0123456789[]{},:"-e.\\\0')
        elif kind == 2:
            data[:8] = rng.choice(NUMBERS).to_bytes(8, "little")
        elif kind == 3:
            digits = [n for n in range(8, min(stop, len(data))) if chr(data[n]).isdigit()]
            where = rng.choice(digits) if digits else at
            data[where : where + 1] = str(rng.choice(NUMBERS)).encode()
        elif kind == 4:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 5:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            del data[rng.randrange(len(data)) :]
        if not data:
            break
    return bytes(data)


def adapter_folder(folder: Path) -> Path:
    model = tiny("llama", torch.float32)
    return write_start(folder, model, lora_config(model, 4, 8.0, ["q_proj"]))


def resident() -> int:
    return psutil.Process().memory_info().rss


def try_adapters(folder: Path, seeds: range) -> int:
    start = adapter_folder(folder)
    file = start / "adapter_model.safetensors"
    whole = file.read_bytes()
    read_adapter(start)
    before, loaded = resident(), 0
    for seed in seeds:
        file.unlink()
        file.write_bytes(mutated(whole, seed))
        try:
            _, weights = read_adapter(start)
        except AdapterError:
            continue
        loaded += 1
        assert all(a.isfinite().all() and b.isfinite().all() for a, b in weights.values()), seed
        assert all(a.shape[0] == b.shape[1] == 4 for a, b in weights.values()), seed
    assert resident() - before < MOST_GROWTH
    return loaded


def try_bases(folder: Path, seeds: range) -> int:
    file = model_folder(folder) / "model.safetensors"
    whole = file.read_bytes()
    before, loaded = resident(), 0
    for seed in seeds:
        file.unlink()
        file.write_bytes(mutated(whole, seed))
        try:
            weight_files(str(folder), None)
            tensors = MappedFile(file).tensors
        except (BaseModelError, OSError, ValueError):
            continue
        loaded += 1
        size = file.stat().st_size
        assert all(0 <= one.start <= one.stop <= size for one in tensors.values()), seed
    assert resident() - before < MOST_GROWTH
    return loaded


def test_500_mutated_adapters_are_refused_or_loaded_sanely(tmp_path: Path) -> None:
    assert 0 < try_adapters(tmp_path, range(500)) < 400


def test_500_mutated_bases_are_refused_or_mapped_within_their_files(tmp_path: Path) -> None:
    assert 0 < try_bases(tmp_path, range(500)) < 400


def test_a_mutated_base_is_loaded_or_one_sentence(tmp_path: Path) -> None:
    file = model_folder(tmp_path) / "model.safetensors"
    whole, said = file.read_bytes(), []
    for seed in range(20):
        file.unlink()
        file.write_bytes(mutated(whole, seed))
        try:
            load_plain(BaseSpec(model=str(tmp_path)), CPU)
        except BaseModelError as error:
            said.append(str(error))
    assert said
    assert not any("\n" in sentence for sentence in said)


@pytest.mark.slow
def test_10_000_mutated_files_are_refused_or_loaded_sanely(tmp_path: Path) -> None:
    try_adapters(tmp_path / "adapter", range(500, 5500))
    try_bases(tmp_path / "base", range(500, 5500))


def test_a_header_of_a_deep_nest_is_a_sentence(tmp_path: Path) -> None:
    start = adapter_folder(tmp_path)
    huge = {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}}
    for text in ("[" * 100_000, json.dumps(huge)):
        header = text.encode()
        whole = len(header).to_bytes(8, "little") + header + bytes(8)
        (start / "adapter_model.safetensors").write_bytes(whole)
        with pytest.raises(AdapterError, match="is damaged"):
            read_adapter(start)
