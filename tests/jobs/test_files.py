"""Lines are whole or gone, and JSON is valid whatever the numbers are."""

import json
import math
import os

import numpy as np
import pytest

from weftune.errors import OutputError
from weftune.jobs.files import LineFile, json_text, kept_lines, replace_file, temporary


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
    assert kept_lines(path, lambda line: line["n"] != 1) == b'{"n": 2}\n'
    assert kept_lines(tmp_path / "nowhere", lambda line: True) == b""
    lines = LineFile(path)
    lines.append({"n": 4})
    lines.keep(lambda line: True)
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
    lines.append({"n": 5})
    lines.close()
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 5}\n'


def test_a_file_of_which_every_line_is_wanted_is_not_written_anew(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n')
    before = os.stat(path).st_ino
    LineFile(path).keep(lambda line: True)
    assert os.stat(path).st_ino == before
    LineFile(tmp_path / "nowhere").keep(lambda line: True)
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
    assert temporary(path) == tmp_path / ".status.json.new"
    with pytest.raises(OutputError, match=r"cannot write .*status.json: No such file or directory"):
        replace_file(tmp_path / "gone" / "status.json", b"new")
