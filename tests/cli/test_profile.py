"""`weftune doctor --profile` writes a file that training finds by itself, and says where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests import bench
from tests.families import tiny
from weftune.base.shape import model_shape
from weftune.base.spec import BaseSpec
from weftune.cli import profile
from weftune.cli.main import app
from weftune.errors import OutputError, UserError
from weftune.plan.cost.profile import Profile, find_local_profile, profile_folder, read_profile
from weftune.run.profile import measure_profile


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting the server that forks workers takes seconds."""
    monkeypatch.setattr(profile, "worker_bytes", lambda spec: (420, 360))


@pytest.fixture(scope="module", autouse=True)
def _one_measurement() -> Iterator[None]:
    """All of these tests profile the same model: the first profile is that of all."""
    made = []

    def measure_once(*arguments: Any) -> Profile:
        made.extend([] if made else [measure_profile(*arguments)])
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weftune.run.profile.measure_profile", measure_once)
        yield


WORKER_BYTES = profile.worker_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny("llama", torch.float32, 0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_profile_lies_in_the_cache_and_is_found_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["doctor", "--profile", "--base", str(model), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    (file,) = profile_folder().iterdir()
    assert file.name in done.output.replace("\n", "")
    for row in ("embedding", "layers", "head and loss", "adapter", "whole pass"):
        assert row in done.output
    found = find_local_profile(model_shape(tiny("llama", torch.float32, 0), torch.float32))
    assert found == read_profile(file)
    assert found is not None
    assert (found.first_worker_bytes, found.worker_bytes) == (420, 360)


@pytest.mark.slow
def test_a_worker_is_measured_in_a_forked_process_with_and_without_the_tokenizer(model: Path) -> None:
    bench.tokenizer().save_pretrained(model)
    first, other = WORKER_BYTES(BaseSpec(model=str(model)))
    assert first > other > 50 << 20
    assert first < 2 * other


def test_another_place_can_be_named_and_one_that_cannot_be_written_is_a_sentence(
    model: Path, tmp_path: Path
) -> None:
    words = ["doctor", "--profile", "--base", str(model), "--device", "cpu", "--output"]
    assert CliRunner().invoke(app, [*words, str(tmp_path / "mine.json")]).exit_code == 0
    assert read_profile(tmp_path / "mine.json") is not None
    (tmp_path / "file").write_text("")
    failed = CliRunner().invoke(app, [*words, str(tmp_path / "file" / "mine.json")])
    assert isinstance(failed.exception, OutputError)
    assert "name another --output" in str(failed.exception)


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr("weftune.run.profile.measure_profile", lambda *_: measured.append(1))
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "p.json", tmp_path):
        words = ["doctor", "--profile", "--base", str(model), "--device", "cpu", "--output", str(place)]
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, OutputError)
        assert "cannot be written" in str(done.exception)
    assert not measured


def test_a_device_that_is_not_there_is_a_sentence() -> None:
    failed = CliRunner().invoke(app, ["doctor", "--profile", "--device", "abacus"])
    assert isinstance(failed.exception, UserError)
    assert "abacus is no device" in str(failed.exception)
