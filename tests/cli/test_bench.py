from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from weftune.bench import gpu_lengths, gpu_quality
from weftune.cli import bench as verb
from weftune.cli.bench import FROZEN, WEFTUNE, BenchLine, BenchPart, BenchShape, benchmark_parts, result_line

PART = BenchPart("8 jobs", "gpu_step")
PACKAGE = Path(verb.__file__).parents[1]


def packaged() -> list[Path]:
    """The files that pyproject.toml puts into a wheel."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = ["**/*.py", *project["tool"]["setuptools"]["package-data"]["weftune"]]
    return [path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()]


def weftune(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "weftune", "bench", *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_sentence_and_exit_code_2(tmp_path: Path, forks) -> None:
    printed = tmp_path / "printed"
    printed.touch()
    assert forks.weftune("bench", "--quick", cwd=tmp_path, away=str(printed)) == 2
    assert printed.read_text() == ""
    said = (tmp_path / "log").read_text()
    assert said.count("\n") == 1
    assert "no CUDA device" in said


@pytest.mark.slow
def test_without_a_checkout_a_toy_runs_through_and_ends_with_a_table_that_names_the_strongest(
    tmp_path: Path,
) -> None:
    """From a copy of what a wheel holds, and nothing else."""
    for path in packaged():
        copy = tmp_path / path.relative_to(PACKAGE.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    done = weftune("--quick", "--toy", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.split("strongest other way")[1]
    assert "8 jobs, 1×1024 tokens each" in last
    assert "the strongest against Weftune is PEFT" in last


def test_a_part_that_fails_is_named_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    broken = [BenchPart("broken", "no_such_script")]
    monkeypatch.setattr(verb, "benchmark_parts", lambda *asked: broken)
    with pytest.raises(Exception) as caught:
        verb.bench(toy=True)
    assert getattr(caught.value, "exit_code", None) == 1
    assert "Failed: broken" in capsys.readouterr().out


def test_a_line_compares_weftune_with_the_frozen_base_and_with_the_strongest() -> None:
    found = {
        "strongest": "PEFT",
        "rows": [
            {"name": FROZEN, "seconds": 0.4, "note": ""},
            {"name": "PEFT", "seconds": 0.8, "note": ""},
            {"name": "Liger", "seconds": None, "note": "not installed"},
            {"name": WEFTUNE, "seconds": 0.5, "note": ""},
        ],
    }
    assert result_line(PART, found) == BenchLine("8 jobs", 500.0, 1.25, "PEFT", 1.6)


def test_a_line_without_times_says_why() -> None:
    short = {"strongest": None, "rows": [{"name": WEFTUNE, "seconds": None, "note": "out of memory"}]}
    assert result_line(PART, short) == BenchLine("8 jobs", verdict="out of memory")
    assert result_line(PART, {"verdict": "memory +0.1%"}) == BenchLine("8 jobs", verdict="memory +0.1%")


def test_every_part_is_a_script_of_the_package_and_quick_is_only_the_first() -> None:
    whole = benchmark_parts(BenchShape.SMALL, quick=False, model=Path("stories"))
    assert [part.title for part in benchmark_parts(BenchShape.SMALL, quick=True, model=None)] == [
        whole[0].title
    ]
    for part in whole:
        assert (PACKAGE / "bench" / f"{part.module}.py").is_file()


def test_no_file_of_the_package_imports_from_the_checkout() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (benchmarks|tests|examples)\b", path.read_text(), re.M), path


def test_what_the_parts_read_is_in_the_package() -> None:
    held = {path.name for path in packaged()}
    assert {"lengths.json", "gsm8k.jsonl", "gsm8k_held_out.jsonl", "openbookqa.jsonl"} <= held
    assert gpu_lengths.FILE.is_relative_to(PACKAGE)
    assert gpu_quality.TEXTS.is_relative_to(PACKAGE)
