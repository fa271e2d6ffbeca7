"""job.yaml: read back as it was written, or known to be damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from weftune.errors import OutputError
from weftune.jobs.store.job_file import CHECKPOINTS, JOB_FILE, DamagedJobFile, read_job_file, write_job_file

VALUES = {
    "format": 1,
    "job": {"name": "a", "learning_rate": 0.01, "data": {"path": "rows.jsonl"}},
    "steps": 8,
    "base": {"model": "demo"},
}


def flipped(content: bytes, rng: random.Random) -> bytes:
    place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def test_what_was_written_is_read_back_and_is_plain_yaml(tmp_path: Path) -> None:
    assert read_job_file(tmp_path) is None
    write_job_file(tmp_path, VALUES)
    found = read_job_file(tmp_path)
    assert found is not None
    assert (found.values, found.is_copy) == (VALUES, False)
    assert yaml.safe_load((tmp_path / JOB_FILE).read_text()) == VALUES


def test_whatever_bit_flips_the_values_are_those_that_were_written(tmp_path: Path) -> None:
    write_job_file(tmp_path, VALUES)
    path = tmp_path / JOB_FILE
    whole, rng = path.read_bytes(), random.Random(3)
    copies = 0
    for _ in range(100):
        path.write_bytes(flipped(whole, rng))
        found = read_job_file(tmp_path)
        assert found is not None
        assert found.values == VALUES
        copies += found.is_copy
    assert copies >= 90, "the others fell into the mark before the checksum"


def test_with_its_copy_damaged_too_it_is_a_sentence(tmp_path: Path) -> None:
    write_job_file(tmp_path, VALUES)
    for folder in (tmp_path, tmp_path / CHECKPOINTS):
        (folder / JOB_FILE).write_bytes(b"job: [\xff")
    with pytest.raises(DamagedJobFile, match=rf"{tmp_path}/job.yaml cannot be used \(it is no YAML"):
        read_job_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a: [1\n", "it is no YAML: while parsing a flow sequence"),
        ("- 1\n", "it is no job file"),
        ("a: 1\n", "it is no job file"),
        ("job: {}\nbase: demo\n", "it is no job file"),
        ("format: 1\njob: {}\nbase: {}\n", "it has lost its checksum"),
        ("job: {}\nbase: {}\n# crc32: 00000000\n", "it does not match its checksum"),
    ],
)
def test_what_no_weftune_has_written_is_told_in_one_line(
    tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / JOB_FILE).write_text(content)
    with pytest.raises(DamagedJobFile) as told:
        read_job_file(tmp_path)
    assert str(told.value) == f"{tmp_path / JOB_FILE} cannot be used ({complaint})"


def test_a_job_file_can_be_read_by_people_who_write_other_letters(tmp_path: Path) -> None:
    values = {"job": {"name": "a", "data": "überzahl.jsonl"}, "base": {}, "also": {}}
    write_job_file(tmp_path / "not" / "there" / "yet", values)
    text = (tmp_path / "not" / "there" / "yet" / JOB_FILE).read_text(encoding="utf-8")
    assert text.startswith("job:\n  name: a\n  data: überzahl.jsonl\nbase: {}\nalso: {}\n# crc32: ")


def test_a_job_file_that_is_gone_is_read_from_its_copy(tmp_path: Path) -> None:
    write_job_file(tmp_path, VALUES)
    (tmp_path / JOB_FILE).unlink()
    found = read_job_file(tmp_path)
    assert found is not None
    assert (found.values, found.is_copy) == (VALUES, True)


def test_a_later_format_is_refused_and_a_file_from_before_formats_is_read(tmp_path: Path) -> None:
    write_job_file(tmp_path, {**VALUES, "format": 7})
    with pytest.raises(OutputError, match=r"job.yaml has the format 7, and .* formats up to 1:"):
        read_job_file(tmp_path)
    before = {key: value for key, value in VALUES.items() if key != "format"}
    (tmp_path / JOB_FILE).write_text(yaml.safe_dump(before))
    found = read_job_file(tmp_path)
    assert found is not None
    assert found.values == before
