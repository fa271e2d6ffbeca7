"""Lines are whole or gone, and JSON is valid whatever the numbers are."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.faults import Disk
from weftune.core.files import (
    LineFile,
    cache_folder,
    dump_yaml,
    filtered_lines,
    json_text,
    load_yaml,
    refuse_full_folder,
    replace_file,
    temporary_path,
)
from weftune.errors import OutputError


def test_what_json_has_no_word_for_becomes_null_and_numbers_of_numpy_plain_ones():
    value = {1: math.nan, "b": [np.int64(3), np.float32(0.5), math.inf], "c": (True, None, "ü")}
    assert json.loads(json_text(value)) == {"1": None, "b": [3, 0.5, None], "c": [True, None, "ü"]}
    assert "ü" in json_text(value)
    assert json_text({"a": 1}, indent=2) == '{\n  "a": 1\n}'
    assert json_text({"a": True}) == '{"a": true}'


def test_an_object_has_no_place_in_a_json_file():
    with pytest.raises(TypeError, match="object has no place in a JSON file"):
        json_text({"a": object()})


def test_lines_are_appended_to_those_that_are_there(tmp_path):
    path = tmp_path / "lines.jsonl"
    for number in range(2):
        lines = LineFile(path)
        lines.append({"n": number})
        lines.append({"n": number, "more": 1})
        lines.sync()
        lines.close()
        lines.close()
    assert path.read_text() == '{"n": 0}\n{"n": 0, "more": 1}\n{"n": 1}\n{"n": 1, "more": 1}\n'


def test_torn_lines_and_those_that_nobody_wants_are_dropped(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\nnot json\n[1]\n{"n": 2}\n{"n": 3}')
    assert filtered_lines(path, lambda line: line["n"] != 1) == b'{"n": 2}\n'
    assert filtered_lines(tmp_path / "nowhere", lambda line: True) == b""
    lines = LineFile(path)
    lines.append({"n": 4})
    lines.filter_lines(lambda line: True)
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    lines.append({"n": 5})
    lines.close()
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 5}\n'


def test_a_file_of_which_every_line_is_wanted_is_not_written_anew(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n')
    before = os.stat(path).st_ino
    LineFile(path).filter_lines(lambda line: True)
    assert os.stat(path).st_ino == before
    LineFile(tmp_path / "nowhere").filter_lines(lambda line: True)
    assert not (tmp_path / "nowhere").exists()


def test_half_a_line_is_taken_back_when_the_disk_is_full_and_comes_with_the_next_one(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    lines = LineFile(path)
    lines.append({"n": 1})
    write = os.write
    calls = []

    def full(handle, content):
        calls.append(content)
        if len(calls) == 1:
            return write(handle, content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match=r"cannot write .*lines.jsonl: No space left on device"):
        lines.append({"n": 2})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"n": 1}\n'
    assert calls == [b'{"n": 2}\n', b'": 2}\n'], "the rest is written where the first part ended"
    lines.append({"n": 3})
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 3}\n', "what could not be written has waited"
    lines.close()


def test_a_file_is_replaced_whole_and_a_folder_that_is_gone_is_a_sentence(tmp_path):
    path = tmp_path / "status.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert temporary_path(path) == tmp_path / ".status.json.new"
    with pytest.raises(OutputError, match=r"cannot write .*status.json: No such file or directory"):
        replace_file(tmp_path / "gone" / "status.json", b"new")


def test_a_file_is_on_the_disk_before_it_takes_its_name_and_its_name_after(tmp_path, monkeypatch):
    sizes = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (sizes.append(os.fstat(handle).st_size), sync(handle)))
    with Disk(tmp_path).watched() as disk:
        replace_file(tmp_path / "a", b"12345")
    new = ".a.new"
    assert disk.calls == [("open", new), ("write", new), ("fsync", new), ("replace", new), ("fsync", ".")]
    assert sizes[0] == 5, "nothing waits in memory when it is synced"


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_no_file_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    replace_file(tmp_path / "a", b"1")
    lines = LineFile(tmp_path / "lines.jsonl")
    lines.append({"n": 1})
    lines.append({"n": 2})
    assert len(os.listdir("/proc/self/fd")) == before + 1, "one for all lines"
    lines.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sync_brings_what_waits_and_what_is_written_to_the_disk(tmp_path):
    lines = LineFile(tmp_path / "lines.jsonl")
    lines.sync()
    assert not lines.path.exists(), "there is nothing to write yet"
    lines.append({"n": 1})
    with Disk(tmp_path).watched() as disk:
        lines.sync()
    lines.close()
    assert disk.calls == [("fsync", "lines.jsonl")]


@pytest.mark.skipif(sys.platform != "linux", reason="what else cannot be synced differs")
def test_lines_that_cannot_be_synced_are_a_sentence():
    lines = LineFile(Path("/dev/null"))
    lines.append({"n": 1})
    with pytest.raises(OutputError, match="cannot write /dev/null: Invalid argument"):
        lines.sync()
    lines.close()


def test_lines_are_for_whoever_the_umask_lets_read_and_write_them(tmp_path):
    before = os.umask(0)
    try:
        lines = LineFile(tmp_path / "lines.jsonl")
        lines.append({"n": 1})
        lines.close()
    finally:
        os.umask(before)
    assert lines.path.stat().st_mode & 0o777 == 0o666


def test_a_folder_of_its_own_is_new_or_empty(tmp_path):
    refuse_full_folder(tmp_path / "new")
    refuse_full_folder(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(OutputError, match=r"is not empty; name a folder that is new or empty"):
        refuse_full_folder(tmp_path)
    with pytest.raises(OutputError, match=r"a is a file; name a folder that is new or empty"):
        refuse_full_folder(tmp_path / "a")


def test_the_cache_lies_where_the_user_says_else_where_caches_lie(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("WEFTUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/weftune")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/weftune")
    monkeypatch.setenv("WEFTUNE_CACHE", "~/mine")
    assert cache_folder() == Path("/home/someone/mine")


VALUES = {
    "job": {"name": "ä-1", "rate": 2e-4, "big": 1e22, "text": "no", "empty": "", "none": None},
    "long": "word " * 60,
    "lines": "a\nb: c\n# d",
    "list": [1, [2.5, True], {"k": []}],
}


def test_what_is_written_is_read_back_by_either_reader() -> None:
    text = dump_yaml(VALUES).decode()
    assert load_yaml(text) == yaml.safe_load(text) == VALUES
    assert list(load_yaml(text)) == list(VALUES)


@pytest.mark.parametrize("text", ["- " * 8000 + "x", "[" * 3000 + "]" * 3000])
def test_what_is_nested_deeply_is_refused_as_before(text: str) -> None:
    with pytest.raises(RecursionError):
        load_yaml(text)


def test_what_is_no_yaml_is_said_alike() -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml("a: [1, 2")
