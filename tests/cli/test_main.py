from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import takes_less

SECONDS = 0.5


def weftune(*words: str, debug: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WEFTUNE_DEBUG": debug, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "weftune", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.mark.timed
def test_help_comes_in_under_half_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Once Python has compiled what it imports, wherever it is allowed to keep that.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))

    def ask() -> None:
        assert weftune("--help").returncode == 0

    assert takes_less(SECONDS, ask, tries=8)


def test_help_names_every_verb() -> None:
    from typer.testing import CliRunner

    from weftune.cli.main import COMMANDS, app

    said = weftune("--help").stdout
    for verb in COMMANDS:
        assert verb.__name__ in said
        assert CliRunner().invoke(app, [verb.__name__, "--help"]).exit_code == 0


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    done = weftune("--version")
    assert (done.returncode, done.stdout) == (0, f"weftune {version('weftune')}\n")


def test_a_users_mistake_is_sentences_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    done = weftune("report", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_traceback_is_shown_when_asked_for(tmp_path: Path) -> None:
    done = weftune("report", str(tmp_path / "nowhere"), debug="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("words", [("weave",), ("doctor", "--nonsense"), ("generate",)])
def test_a_wrong_command_line_is_exit_code_2_without_a_traceback(words: tuple[str, ...]) -> None:
    done = weftune(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_all_mistakes_of_a_jobs_file_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text("base: demo\njobs:\n- {name: a/b, data: no.jsonl, lr: 1}\n")
    for verb in ("train", "preview"):
        done = weftune(verb, str(file))
        assert done.returncode == 2
        lines = done.stderr.splitlines()
        assert [line.partition(": ")[0] for line in lines] == [
            "jobs.yaml:3 jobs[0].data",
            "jobs.yaml:3 jobs[0].lr",
            "jobs.yaml:3 jobs[0].name",
        ]
