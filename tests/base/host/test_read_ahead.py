"""The files of a base are in the system's cache when they are loaded."""

import threading

import pytest

from weftune.base.host import read_ahead
from weftune.base.host.read_ahead import base_read_ahead, read_files, weight_files
from weftune.base.spec import BaseSpec


@pytest.fixture
def folder(tmp_path):
    """A model folder of two files of weights."""
    made = tmp_path / "base"
    made.mkdir()
    (made / "config.json").write_text("{}")
    for part in range(2):
        (made / f"model-{part}.safetensors").write_bytes(bytes(1000 + part))
    return made


def test_all_files_are_read_to_their_ends(folder, monkeypatch):
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", 64)
    assert read_files(weight_files(BaseSpec(model=str(folder))), threading.Event()) == 2001


def test_whoever_is_told_to_stop_reads_no_more(folder):
    stop = threading.Event()
    stop.set()
    assert read_files(weight_files(BaseSpec(model=str(folder))), stop) == 0


def test_a_file_that_cannot_be_read_is_left_to_the_loader(folder):
    assert read_files([folder / "model-0.safetensors", folder / "absent"], threading.Event()) == 1000


def test_files_that_do_not_fit_the_free_memory_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(read_ahead, "MAX_FREE_FRACTION", 0.0)
    assert weight_files(BaseSpec(model=str(folder))) == []


def test_a_base_of_the_hub_is_found_in_its_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weight_files(BaseSpec(model="someone/small")) == []
    stored = tmp_path / "models--someone--small"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots").mkdir()
    folder.rename(stored / "snapshots" / "abc")
    assert [file.name for file in weight_files(BaseSpec(model="someone/small"))] == [
        "model-0.safetensors",
        "model-1.safetensors",
    ]


def test_nobody_reads_on_when_the_wait_is_over(folder):
    before = threading.active_count()
    with pytest.raises(RuntimeError), base_read_ahead(BaseSpec(model=str(folder))):
        raise RuntimeError
    assert threading.active_count() == before
