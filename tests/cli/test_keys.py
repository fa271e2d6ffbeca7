"""`weftune keys` as an operator types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.test_main import weftune
from weftune.cli.early import store_folder
from weftune.cli.main import app
from weftune.service.keys import KeyFile


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["keys", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_key_is_the_last_line_and_works_until_it_is_revoked_by_its_id(tmp_path):
    key = run("create", "acme", "--store", tmp_path).splitlines()[-1]
    known = KeyFile(tmp_path / "keys.json")
    assert known.find_tenant(key) == "acme"
    listed = run("list", "--store", tmp_path)
    assert "acme" in listed
    assert key not in listed
    assert run("revoke", listed.split()[0], "--store", tmp_path).startswith("Revoked the key ")
    assert known.find_tenant(key) is None
    assert "weftune keys create" in run("list", "--store", tmp_path)


def test_the_store_is_in_the_users_folder_of_data_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    run("create", "acme")
    assert (tmp_path / "data" / "weftune" / "keys.json").is_file()
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_folder(None) == tmp_path / ".local" / "share" / "weftune"
    assert store_folder(Path("~/elsewhere")) == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(("create", "No Name"), "cannot name a tenant"), (("revoke", "unknown"), "weftune keys list")],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, words, sentence):
    done = weftune("keys", *words, "--store", str(tmp_path))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
