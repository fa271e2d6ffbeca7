from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from tests.report.example import write_example
from weftune.cli.report import report


def invoke(folder: Path) -> Result:
    application = typer.Typer()
    application.command()(report)
    return CliRunner().invoke(application, [str(folder)], catch_exceptions=False)


def test_the_report_is_drawn_anew_and_its_path_printed(tmp_path: Path) -> None:
    output = write_example(tmp_path / "out")
    (output / "report.html").write_text("old")
    result = invoke(output)
    assert result.stdout.strip() == str(output / "report.html")
    assert "r64-best" in (output / "report.html").read_text()


def test_a_folder_without_metrics_is_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from weftune.cli.main import main; main()", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"{tmp_path} holds no metrics.jsonl: name a folder that `weftune train` has written to.\n"
    )


def test_the_verb_costs_nothing_until_it_is_used() -> None:
    program = "import sys, weftune.cli.report; sys.exit(bool({'torch', 'jinja2'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
