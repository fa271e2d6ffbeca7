"""What strangers put into files is a sentence and exit code 2, within ten seconds and 500 MB, as typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.base.folders import model_folder
from tests.cases import is_within
from tests.data.test_swelling import repeated_text
from tests.data.test_template import HOSTILE as TEMPLATES

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w20"}]}
JOBS = "base: base\njobs:\n- {{name: a, {keys}}}\n"


LAUNCHER = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
"""Between the tests and the command: the system counts what a process was before it became another."""


def write_template(folder: Path, source: str) -> str:
    (folder / "own.jinja").write_text(source)
    return "data: {path: rows.jsonl, chat_template: own.jinja}"


def write_rows(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"data: {name}"


def write_csv_line(folder: Path) -> str:
    with (folder / "rows.csv").open("w") as file:
        file.write("text\na\n")
        for _ in range(400):
            file.write("x" * 2**20)
    return "data: rows.csv"


def write_bin(folder: Path) -> str:
    (folder / "base" / "model.safetensors").rename(folder / "base" / "pytorch_model.bin")
    return "data: rows.jsonl"


def write_parquet(folder: Path) -> str:
    repeated_text(folder / "rows.parquet")
    return "data: rows.parquet"


CASES = {
    **{name: (lambda folder, name=name: write_template(folder, TEMPLATES[name][0])) for name in TEMPLATES},
    "a line of CSV": write_csv_line,
    "a header of CSV": lambda folder: write_rows(folder, "rows.csv", 'te"xt,"b\na,b\n'),
    "Parquet": write_parquet,
    "JSON of 450 levels": lambda folder: write_rows(
        folder, "deep.jsonl", json.dumps(CHAT)[:-1] + ', "x": ' + "[" * 450 + "]" * 450 + "}\n"
    ),
    "JSON of 900 levels": lambda folder: write_rows(
        folder, "deep.json", "[" + json.dumps(CHAT)[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}]\n"
    ),
    "a pattern": lambda folder: 'data: rows.jsonl, adapter: {targets: "(.*.*)*x"}',
    "a pickle": write_bin,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_a_sentence_as_typed(name: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "jobs.yaml").write_text(JOBS.format(keys=CASES[name](tmp_path)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WEFTUNE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-m", "weftune", "preview", "jobs.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    *_, last = done.stdout.splitlines()
    code, seconds, kilobytes = json.loads(last)
    said = done.stdout + done.stderr
    assert code == 2, said
    assert "Traceback" not in said
    assert is_within(seconds, 10), said
    assert kilobytes < 600_000, said  # imports alone take up to 500 MB on x86
