"""Reference log-probabilities on disk: read back as written, and refused if anything differs."""

import numpy as np
import pytest

from weftune.data.references import read_references, reference_key, write_references
from weftune.errors import OutputError

NUMBERS = np.array([-1.5, np.nan, -(2.0**-40)])


def test_numbers_are_read_back_to_the_bit_with_unknown_ones(tmp_path):
    path = tmp_path / "new" / "references"
    write_references(path, "key", NUMBERS)
    assert read_references(path, "key", 3).tobytes() == NUMBERS.tobytes()
    assert [one.name for one in path.parent.iterdir()] == ["references"]
    write_references(path, "key", NUMBERS + 1)
    assert read_references(path, "key", 3)[0] == -0.5


def test_a_file_with_another_key_count_or_byte_is_not_read(tmp_path):
    path = tmp_path / "references"
    assert read_references(path, "key", 3) is None
    write_references(path, "key", NUMBERS)
    assert read_references(path, "other", 3) is None
    assert read_references(path, "key", 2) is None
    content = path.read_bytes()
    for at in (0, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert read_references(path, "key", 3) is None
    path.write_bytes(content[:-8])
    assert read_references(path, "key", 2) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*references"):
        write_references(tmp_path / "file" / "references", "key", NUMBERS)


def test_a_key_tells_everything_apart():
    assert len({reference_key(), reference_key("a"), reference_key("a", None), reference_key(["a"])}) == 4
    assert reference_key({"a": 1, "b": 2}) == reference_key({"b": 2, "a": 1})
