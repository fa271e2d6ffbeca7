"""Files of tensors: the bytes that safetensors writes, and their checksum."""

import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file, save

from weftune.core import tensor_file
from weftune.core.tensor_file import write_hashed_tensors, write_tensors

TENSORS = {
    "b": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "a": torch.randn(5, dtype=torch.float64),
    "half": torch.randn(3, 2).bfloat16(),
    "ä \"quoted\"": torch.randn(1, dtype=torch.float16),
    "none": torch.zeros(0),
}  # fmt: skip


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("piece_bytes", [7, 8 << 20])
def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path, monkeypatch, metadata, piece_bytes):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", piece_bytes)
    write_tensors(tmp_path / "file", TENSORS, metadata)
    assert (tmp_path / "file").read_bytes() == save(TENSORS, metadata)
    for name, tensor in load_file(tmp_path / "file").items():
        assert torch.equal(tensor, TENSORS[name])


def test_the_checksum_is_that_of_the_file_which_is_synced(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    found = write_hashed_tensors(tmp_path / "file", TENSORS)
    content = (tmp_path / "file").read_bytes()
    assert found == hashlib.sha256(content).hexdigest()
    assert sizes == [len(content)]


def test_a_tensor_that_is_not_contiguous_is_a_bug(tmp_path):
    with pytest.raises(AssertionError, match="a is not contiguous"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(2, 3).T})


def test_hundreds_of_small_tensors_are_one_write_and_a_large_one_is_not_copied(tmp_path, monkeypatch):
    written = []
    write_all = tensor_file._write_whole_piece
    monkeypatch.setattr(
        tensor_file, "_write_whole_piece", lambda file, piece: (written.append(piece), write_all(file, piece))
    )
    tensors = {f"{at:03d}": torch.full((8, 4), float(at)) for at in range(300)}
    write_tensors(tmp_path / "small", tensors)
    assert len(written) == 1
    written.clear()
    monkeypatch.setattr(tensor_file, "LARGE_BYTES", 4096)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 8192)
    tensors["large"] = torch.randn(4096)
    write_tensors(tmp_path / "large", tensors)
    assert sum(isinstance(piece, memoryview) for piece in written) == 2
    assert (tmp_path / "large").read_bytes() == save(tensors)


def test_what_a_write_leaves_over_is_written_by_the_next(tmp_path):
    class Hesitant:
        def __init__(self):
            self.taken = b""

        def write(self, content):
            self.taken += bytes(content[:3])
            return min(3, len(content))

    file = Hesitant()
    tensor_file._write_whole_piece(file, b"12345678")
    assert file.taken == b"12345678"
