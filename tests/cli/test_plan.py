from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tests.data import families
from tests.plan.outlooks import CONFIG
from weft.cli.main import main
from weft.cli.plan import layers_text

WITHOUT_TORCH = """
import sys
from weft.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base of config.json and tokenizer only, three jobs, and a cache of their own."""
    place = tmp_path_factory.mktemp("plan")
    base = place / "base"
    families.smollm2().save_pretrained(base)
    (base / "config.json").write_text(json.dumps(CONFIG))
    for name, words in (("short", 20), ("middle", 90), ("long", 300)):
        rows = [{"text": " ".join(["word"] * (words + 7 * number % words))} for number in range(40)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def jobs_file(folder, **adapters):
    lines = [f"  - {{name: {name}, data: {name}.jsonl, adapter: {keys}}}" for name, keys in adapters.items()]
    (folder / "jobs.yaml").write_text("\n".join(["base: ./base", "jobs:", *lines, ""]))
    return folder / "jobs.yaml"


@dataclass(frozen=True, slots=True)
class Shown:
    code: int
    out: str
    err: str


@pytest.fixture
def weft(folder, monkeypatch, capsys):
    """The command in this process, its jobs file being `folder`'s."""
    monkeypatch.setenv("WEFT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Shown(int(ended.value.code or 0), printed.out, printed.err)

    return call


def test_a_plan_for_four_devices_is_made_in_seconds_without_torch_or_weights(folder):
    file = jobs_file(folder, short="{rank: 8}", middle="{rank: 16}", long="{rank: 64}")
    start = time.perf_counter()
    wanted = [
        "--cluster",
        "4xA100-80G:pcie",
        "--explain",
        "--ablate",
        "--gantt",
        "out.html",
        "--json",
        "out.json",
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, "plan", str(file), *wanted]
    surroundings = {**os.environ, "WEFT_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=surroundings, check=False)
    assert time.perf_counter() - start < 10
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == "False", "torch was imported"
    for part in ("3 jobs on 4xA100-80G:pcie", "not measured", "one after another", "1F1B per job", "mLoRA"):
        assert part in shown.stdout
    assert "- Token capacity" in shown.stdout
    assert "embedding and head not counted" in shown.stdout
    assert "plotly" in (folder / "out.html").read_text()
    numbers = json.loads((folder / "out.json").read_text())
    assert len(numbers["stages"]) == 4
    assert sum(stage["layers"] for stage in numbers["stages"]) == 34
    fastest = numbers["forecast"]["step_seconds"]
    assert all(other["step_seconds"] >= fastest for other in numbers["alternatives"])


def test_tokenised_jobs_are_planned_from_all_their_samples(folder, weft):
    from weft.data.prepare import prepare
    from weft.data.spec import DataSpec

    file = jobs_file(folder, short="{rank: 8}", long="{rank: 8}")
    spec = DataSpec(path=str(folder / "short.jsonl"))
    prepare(spec, None, families.smollm2(), folder / "cache" / "tokens", context=131072)
    shown = weft(file, "--cluster", "H200")
    assert "so the first rows stand for all: long." in shown.out, shown.err


def test_a_job_that_must_wait_is_shown_with_its_reason(folder, weft):
    file = jobs_file(folder, short="{rank: 64}", long="{rank: 64}")
    shown = weft(file, "--cluster", "RTX4090")
    assert shown.code == 0, shown.err
    assert "1 job on 1xRTX4090" in shown.out
    assert "long waits: needs" in shown.out
    assert "with 1 other job aboard" in shown.out


@pytest.mark.parametrize(
    ("adapter", "cluster", "sentence"),
    [
        ("{rank: 8}", "T4", "job short: even alone it needs"),
        ("{rank: 8}", "H20", "there is no device H20; did you mean H200?"),
        ("{rank: 8}", "absent.yaml", "the file cannot be read"),
        ("{rank: 8, targets: [q_pro]}", "H200", "matches no module of the base; did you mean q_proj?"),
    ],
)
def test_what_cannot_be_planned_gets_one_sentence_and_exit_code_2(folder, weft, adapter, cluster, sentence):
    shown = weft(jobs_file(folder, short=adapter), "--cluster", cluster)
    assert shown.code == 2
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_timeline_is_drawn_as_a_page_only(folder, weft):
    shown = weft(jobs_file(folder, short="{rank: 8}"), "--cluster", "H200", "--gantt", "out.png")
    assert (shown.code, "write such as out.html" in shown.err) == (2, True)
    assert not (folder / "out.png").exists()


def test_a_job_without_rows_is_named(folder, weft):
    (folder / "empty.jsonl").write_text("")
    shown = weft(jobs_file(folder, empty="{rank: 8}"), "--cluster", "H200")
    assert shown.code == 2
    assert "job empty: empty.jsonl: the dataset is empty" in shown.err


def test_a_cluster_file_is_read_from_yaml(folder, weft):
    (folder / "cluster.yaml").write_text("devices: [2xH100]\nlink: {bandwidth_gbs: 10}\n")
    shown = weft(jobs_file(folder, short="{rank: 8}"), "--cluster", "cluster.yaml")
    assert "1 job on 2xH100:10 GB/s" in shown.out, shown.err
    (folder / "cluster.yaml").write_text("devices: [2xH100")
    shown = weft(jobs_file(folder, short="{rank: 8}"), "--cluster", "cluster.yaml")
    assert (shown.code, "is no YAML" in shown.err) == (2, True)


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [(0, 34, "embedding, 0–31, head"), (0, 3, "embedding, 0–1"), (10, 19, "9–17"), (33, 34, "head")],
)
def test_a_stage_is_told_by_the_layers_of_the_base(start, stop, text):
    assert layers_text(start, stop, 32) == text
