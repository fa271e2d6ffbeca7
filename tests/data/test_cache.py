from __future__ import annotations

import contextlib
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.run.processes import context
from weftune.data import build
from weftune.data.cache import StoreWriter, Tally, open_store
from weftune.data.formats import Sample
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec
from weftune.errors import OutputError

ROWS = [{"text": f"the cat sat {n}"} for n in range(20)]


def add(writer: StoreWriter, tokens: np.ndarray, mask: np.ndarray, row: int) -> None:
    writer.extend(build._to_arrays([Sample(tokens, mask)], [row]))


def write(folder: Path) -> None:
    with StoreWriter(folder) as writer:
        for n in range(1, 6):
            add(writer, np.arange(n + 1, dtype=np.int32), np.ones(n + 1, dtype=bool), 2**63 + n)
        writer.commit(Tally(rows=5))


def test_a_store_reads_back_what_was_written(tmp_path):
    write(tmp_path / "a")
    store = open_store(tmp_path / "a")
    assert store.lengths.tolist() == [2, 3, 4, 5, 6]
    assert store.supervised.tolist() == [1, 2, 3, 4, 5]
    assert store.rows.tolist() == [2**63 + n for n in range(1, 6)]
    assert store.tokens[:5].tolist() == [0, 1, 0, 1, 2]
    assert store.mask.all()
    assert store.tally == Tally(rows=5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_store_larger_than_memory_can_be_written(tmp_path):
    tokens, mask = np.zeros(10_000, dtype=np.int32), np.ones(10_000, dtype=bool)
    tracemalloc.start()
    with StoreWriter(tmp_path / "a") as writer:
        for _ in range(1200):
            add(writer, tokens, mask, 0)
        writer.commit(Tally())
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "a" / "tokens").stat().st_size == 48_000_000
    assert peak < 8_000_000


def test_a_flipped_byte_anywhere_is_found(tmp_path):
    folder = tmp_path / "a"
    write(folder)
    files = sorted(folder.iterdir())
    assert len(files) == 7
    chance = random.Random(0)
    for _ in range(100):
        file = chance.choice(files)
        content = file.read_bytes()
        at = chance.randrange(len(content))
        flipped = bytes([content[at] ^ (1 << chance.randrange(8))])
        file.write_bytes(content[:at] + flipped + content[at + 1 :])
        found = open_store(folder)
        assert found is None, (file.name, at)
        file.write_bytes(content)
    assert open_store(folder) is not None


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_built_anew(damage, gpt2, tmp_path):
    spec = DataSpec(rows=ROWS)
    first = prepare(spec, None, gpt2, tmp_path).train
    expected = [first.tokens(i).tolist() for i in range(len(first))]
    (folder,) = tmp_path.iterdir()
    content = (folder / "tokens").read_bytes()
    if damage == "remove":
        (folder / "tokens").unlink()
    else:
        (folder / "tokens").unlink()  # the first samples keep their map of the old file
        (folder / "tokens").write_bytes(content[:-4] if damage == "cut" else b"\x01" + content[1:])
    seen: list[int] = []
    again = prepare(spec, None, gpt2, tmp_path, progress=seen.append).train
    assert seen == [len(ROWS)]
    assert [again.tokens(i).tolist() for i in range(len(again))] == expected
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with contextlib.suppress(KeyboardInterrupt), StoreWriter(tmp_path / "a") as writer:
        add(writer, np.zeros(3, dtype=np.int32), np.ones(3, dtype=bool), 1)
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def open_files(folder: Path) -> list[str]:
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [link for link in links if link.startswith(f"{folder}/")]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files are only listed on Linux")
def test_a_writer_leaves_no_file_open_whether_it_fails_or_commits(tmp_path):
    with contextlib.suppress(KeyboardInterrupt), StoreWriter(tmp_path / "a") as writer:
        assert len(open_files(tmp_path)) == 6
        raise KeyboardInterrupt
    assert open_files(tmp_path) == []
    with StoreWriter(tmp_path / "a") as writer:
        add(writer, np.zeros(3, dtype=np.int32), np.ones(3, dtype=bool), 1)
        writer.commit(Tally())
        assert open_files(tmp_path) == []
    assert open_store(tmp_path / "a") is not None


def test_everything_is_on_the_disk_before_the_store_has_its_name(tmp_path, monkeypatch):
    settled: dict[str, int] = {}
    real, rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        settled[path.name if path.is_file() else str(path)] = os.fstat(handle).st_size
        real(handle)

    def named(old: Path, new: Path) -> None:
        sizes = {file.name: file.stat().st_size for file in Path(old).iterdir()}
        assert sizes.items() <= settled.items()
        assert len(sizes) == 7
        assert str(old) in settled
        assert str(tmp_path) not in settled
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", named)
    write(tmp_path / "a")
    assert str(tmp_path) in settled


def test_a_store_of_no_samples_can_be_opened(tmp_path):
    with StoreWriter(tmp_path / "a") as writer:
        writer.commit(Tally(rows=3, reasons=["torn"]))
    store = open_store(tmp_path / "a")
    assert [len(part) for part in (store.tokens, store.mask, store.lengths)] == [0, 0, 0]
    assert (store.tokens.dtype, store.tally.reasons) == (np.int32, ["torn"])
    assert open_store(tmp_path / "b") is None


def test_a_store_that_is_there_and_damaged_gives_way_and_a_whole_one_stays(tmp_path):
    write(tmp_path / "a")
    first = (tmp_path / "a").stat().st_ino
    write(tmp_path / "a")
    assert (tmp_path / "a").stat().st_ino == first
    (tmp_path / "a" / "store.json").write_text("{}")
    write(tmp_path / "a")
    assert open_store(tmp_path / "a") is not None
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_only_supervised_tokens_behind_the_first_are_counted(tmp_path):
    with StoreWriter(tmp_path / "a") as writer:
        add(writer, np.zeros(3, dtype=np.int32), np.array([True, False, True]), 1)
        writer.commit(Tally())
    assert open_store(tmp_path / "a").supervised.tolist() == [1]


def test_what_a_killed_builder_left_is_swept_after_a_day(tmp_path):
    left, fresh = tmp_path / ".a.0123", tmp_path / ".a.4567"
    left.mkdir()
    fresh.mkdir()
    os.utime(left, (0, 0))
    other = tmp_path / ".b.0123"
    other.mkdir()
    os.utime(other, (0, 0))
    write(tmp_path / "a")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".a.4567", ".b.0123", "a"]


def test_builders_at_the_same_time_do_not_disturb_one_another(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: write(tmp_path / "a"), range(40)))
    assert open_store(tmp_path / "a") is not None
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def write_often(folder: Path) -> None:
    for _ in range(30):
        write(folder)


def test_processes_at_the_same_time_build_one_store(tmp_path):
    running = [context().Process(target=write_often, args=(tmp_path / "a",)) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert open_store(tmp_path / "a") is not None
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_cache_folder_that_cannot_be_written_is_a_sentence(gpt2, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"the cache folder .* cannot be written"):
        prepare(DataSpec(rows=ROWS), None, gpt2, tmp_path / "file" / "cache")


def test_tokens_made_by_an_older_version_are_not_taken_for_these(gpt2, tmp_path, monkeypatch):
    spec, seen = DataSpec(rows=ROWS), []
    monkeypatch.setattr(build, "VERSION", 1)  # chats had a BOS that their template did not print
    older = prepare(spec, None, gpt2, tmp_path, progress=seen.append).train.fingerprint
    monkeypatch.undo()
    assert build.VERSION > 1
    assert prepare(spec, None, gpt2, tmp_path, progress=seen.append).train.fingerprint != older
    assert seen == [len(ROWS)] * 2
