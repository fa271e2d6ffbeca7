"""The tables that a run ends with."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tests.report.example import Job, write_example
from weftune.base.spec import DEMO_HUB_ID
from weftune.report.ending import final_table
from weftune.report.read import read_run
from weftune.report.snippets import serve_command


def printed(output: Path, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(final_table(read_run(output), width))
    return file.getvalue()


def test_the_table_tells_where_each_job_came_from_and_got_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    heading, *rows = printed(write_example(tmp_path / "out"), width=120).splitlines()
    assert heading.split() == ["job", "state", "steps", "loss", "validation", "change", "path"]
    assert rows[0].split() == (
        [
            "r64-best",
            "succeeded",
            "60/60",
            "2.295",
            "→",
            "1.198",
            "2.450",
            "→",
            "1.226",
            "−50.0",
            "%",
            "out/r64-best",
        ]
    )
    assert [row.split()[0] for row in rows[:6]] == [
        "r64-best",
        "r16",
        "r8-slow",
        "no-validation",
        "late",
        "hot",
    ]
    assert rows[6].startswith("late: waits for 1.2 GiB")
    assert rows[7].startswith("hot: the loss was not finite")
    assert rows[8].strip() == "weftune train jobs.yaml --resume --retry hot --set learning_rate=1e+08"


def test_predictions_are_told_of_only_when_enough_of_them_were_right(tmp_path: Path) -> None:
    assert "Predicted times were off by 4." in printed(write_example(tmp_path / "many"), 120)
    assert "Predicted" not in printed(write_example(tmp_path / "few", windows=3), 120)


def test_a_job_without_validation_shows_the_change_of_its_training_loss(tmp_path: Path) -> None:
    row = next(line for line in printed(write_example(tmp_path), 200).splitlines() if "no-validation" in line)
    assert row.split()[3:9] == ["2.301", "→", "1.454", "–", "−36.8", "%"]


def test_in_a_narrow_terminal_paths_stand_below_and_no_number_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = printed(write_example(tmp_path / "out"), width=80).splitlines()
    assert "path" not in lines[0]
    assert lines[1].rstrip().endswith("2.450 → 1.226  −50.0 %")
    assert "out/r64-best" in lines
    assert max(map(len, lines)) <= 80


def table_row(output: Path, name: str) -> list[str]:
    return next(line for line in printed(output, 160).splitlines() if line.startswith(name)).split()


@pytest.mark.parametrize("state", ["interrupted", "paused"])
def test_with_one_evaluation_the_base_stands_alone_without_an_arrow_or_a_change(
    tmp_path: Path, state: str
) -> None:
    output = write_example(tmp_path / "out", [Job(name="half", done=5, state=state)])
    row = table_row(output, "half")
    assert row[3:8] == ["2.300", "→", "1.976", "2.450", "–"], row


def test_one_training_loss_is_shown_once(tmp_path: Path) -> None:
    row = table_row(
        write_example(tmp_path / "out", [Job(name="short", steps=60, done=1, evaluate=False)]), "short"
    )
    assert row[4:6] == ["–", "–"], row
    assert "→" not in row


def test_a_warning_is_red(tmp_path: Path) -> None:
    output = write_example(tmp_path / "out", [Job(name="flat", warning="it ends worse than the base")])
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(final_table(read_run(output), 120))
    assert "\x1b[31mflat: it ends worse than the base" in console.file.getvalue()


def adapter_config(output: Path, name: str, **keys: object) -> None:
    (output / name).mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 16, "rank_pattern": {}, "use_dora": False, **keys}
    (output / name / "adapter_config.json").write_text(json.dumps(config))


def test_the_command_for_vllm_names_every_adapter_that_it_can_load(tmp_path: Path) -> None:
    output = write_example(tmp_path / "out put")
    names = [job.name for job in read_run(output).jobs if job.state == "succeeded"]
    assert len(names) >= 3
    for name in names:
        adapter_config(output, name)
    adapter_config(output, names[0], r=48)
    adapter_config(output, names[1], use_dora=True)
    run = read_run(output)
    words = shlex.split(serve_command(run) or "")
    assert words[:3] == ["vllm", "serve", DEMO_HUB_ID]
    assert words[3:6] == ["--enable-lora", "--max-lora-rank", "64"]
    assert words[6:] == ["--lora-modules", *(f"{name}={output / name}" for name in [names[0], *names[2:]])]


def test_a_run_without_an_adapter_for_vllm_has_no_such_command(tmp_path: Path) -> None:
    output = write_example(tmp_path / "out")
    assert serve_command(read_run(output)) is None
    for job in read_run(output).jobs:
        adapter_config(output, job.name, r=1024)
    assert serve_command(read_run(output)) is None
