"""`weftune generate` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tests.base.folders import model_folder
from tests.trainer.test_generate import adapter_folder, spoken_by_peft
from weftune.base.load import select_device
from weftune.cli.generate import answer_panels, generate, recorded_base
from weftune.errors import AdapterError, UserError


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(generate)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_base_and_adapter_are_shown_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    base = model_folder(tmp_path / "base")
    job = adapter_folder(tmp_path / "output" / "haiku", 1)
    record = {"job": {"name": "haiku"}, "base": {"model": str(base), "dtype": None, "revision": None}}
    (job / "job.yaml").write_text(yaml.safe_dump(record))
    with_adapter, alone = (spoken_by_peft(base, adapter, "w10 w20") for adapter in (job, None))
    shown = run(str(job), "w10 w20", "--against-base", "--max-tokens", "8", "--device", "cpu")
    assert "haiku" in shown
    assert with_adapter in shown
    assert alone in shown
    shown = run(str(job), "w10 w20", "--max-tokens", "8", "--device", "cpu")
    assert with_adapter in shown
    assert alone not in shown


def test_a_folder_that_holds_several_adapters_is_a_sentence_with_their_names(tmp_path: Path) -> None:
    for name in ("sql-lr2", "sql-lr1"):
        adapter_folder(tmp_path / "best" / name, 1)
    with pytest.raises(AdapterError, match=r"folders in it do: sql-lr1, sql-lr2; .*best/sql-lr1"):
        generate(tmp_path / "best", "w10")


def test_brackets_in_an_answer_are_shown_as_they_are() -> None:
    console = Console(width=60)
    with console.capture() as capture:
        console.print(answer_panels({"[red]base": "[bold]no markup[/bold] [/]"}))
    assert "[bold]no markup[/bold] [/]" in capture.get()
    assert "[red]base" in capture.get()


def test_a_folder_without_a_job_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"it holds no job\.yaml"):
        recorded_base(tmp_path)
    for text in ("- a list", "base: demo", "{", "name: x"):
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(AdapterError, match=r"job\.yaml cannot be used .*which base"):
            recorded_base(tmp_path)


def test_a_device_that_is_none_is_a_sentence() -> None:
    with pytest.raises(UserError, match="--device: gpu is no device"):
        select_device("gpu")
    assert select_device("cpu").type == "cpu"


def test_a_gpu_without_a_number_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's functions about memory refuse a device without an index."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert select_device("cuda") == select_device(None) == torch.device("cuda", 0)
    assert select_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert select_device("cuda") == select_device(None) == torch.device("cuda", 3)
