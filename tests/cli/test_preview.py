from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests import bench
from tests.data import families
from weftune import JobSpec
from weftune.cli.preview import (
    SUPERVISED,
    SharedSamples,
    colour_sample,
    draw_samples,
    escape_controls,
    histogram,
    prepare_all,
    preview,
)
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec, EvalSpec

STORIES = Path(__file__).parents[2].parent / "shared" / "models" / "stories15m"
CHAT = {
    "messages": [
        {"role": "user", "content": "[bold]Hello[/bold]"},
        {"role": "assistant", "content": "yes [/x]"},
    ]
}


def printed(parts) -> str:
    console = Console(file=io.StringIO(), width=100)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def tokenizer():
    return families.smollm2()


def test_supervised_tokens_are_coloured_and_markup_stays_text(tokenizer, tmp_path):
    samples = prepare(DataSpec(rows=[CHAT]), None, tokenizer, tmp_path).train
    text = colour_sample(samples, 0, tokenizer)
    assert text.plain == (
        "<|im_start|>user\n[bold]Hello[/bold]<|im_end|>\n<|im_start|>assistant\nyes [/x]<|im_end|>\n"
    )
    taught = [text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED]
    assert taught == ["yes [/x]<|im_end|>"]


def test_without_colours_marks_stand_around_what_is_supervised(tokenizer, tmp_path):
    prepared = prepare(DataSpec(rows=[CHAT]), None, tokenizer, tmp_path)
    text = printed(draw_samples(SharedSamples(("a",), prepared), tokenizer, rows=1, uses_marks=True))
    assert ">>>yes [/x]<|im_end|><<<" in text
    assert text.count(">>>") == 2, "and once in the title"
    assert "supervised, between >>> and <<<" in text


def test_a_drawing_shows_samples_counts_lengths_and_notes(tokenizer, tmp_path):
    rows = [CHAT, {"messages": [*CHAT["messages"], *CHAT["messages"] * 20]}]
    prepared = prepare(DataSpec(rows=rows * 3, max_length=60), EvalSpec(fraction=0.5), tokenizer, tmp_path)
    text = printed(draw_samples(SharedSamples(("a", "[b]"), prepared), tokenizer, rows=1))
    assert "a, [b]" in text
    assert "[bold]Hello[/bold]" in text
    assert text.count("sample 1:") == 1
    assert "sample 2:" not in text
    assert "training: 3 samples" in text
    assert "evaluation: 3 samples" in text
    assert "note: 3 of 6 rows were truncated to 60 tokens." in text


def test_a_histogram_counts_every_sample():
    drawn = histogram([1, 1, 2, 50, 100])
    lines = drawn.splitlines()[1:]
    assert len(lines) == 10
    assert sum(int(line.split()[-1]) for line in lines) == 5
    assert lines[0].count("█") == 40
    assert histogram([7]).splitlines()[1].split() == ["7–7", "█" * 40, "1"]


def test_characters_that_steer_a_terminal_are_not_printed():
    assert escape_controls("a\x1b[31mb\n\tc\u202e") == "a�[31mb\n\tc�"


def test_preview_imports_nothing_heavy():
    heavy = "('torch', 'transformers', 'datasets', 'pyarrow', 'jinja2')"
    code = f"import sys, weftune.cli.preview; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.skipif(not STORIES.exists(), reason="stories15m is not here")
def test_the_command_lists_a_sweeps_trials_in_a_table_and_its_data_once(tmp_path, monkeypatch):
    import typer

    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"Once upon a time there were {number} cats."} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "jobs.yaml").write_text(f"""base: {STORIES}
defaults: {{data: rows.jsonl, steps: 100, batch_size: 4}}
jobs:
  - name: sql
    warmup: 10
    eval: {{fraction: 0.5}}
    sweep:
      over: {{adapter.rank: [2, 4, 8], learning_rate: [1e-4, 3e-4]}}
      halving: {{at: [0.1], keep: 0.5}}
  - {{name: other}}
""")
    app = typer.Typer()
    app.command()(preview)
    shown = CliRunner().invoke(app, [str(tmp_path / "jobs.yaml"), "--rows", "1"])
    assert shown.exit_code == 0, shown.output
    assert "─ sql (6 trials) ─" in shown.output
    assert shown.output.count("training:") == 2
    assert ">>>" in shown.output, "no terminal, no colours"
    rows = [line.split() for line in shown.output.splitlines() if line.startswith("│ sql-r")]
    assert [row[1] for row in rows] == [
        f"sql-r{rank}-lr{rate}" for rank in (2, 4, 8) for rate in ("1e-4", "3e-4")
    ]
    assert all("100" in row and "MiB" in row for row in rows)
    words = " ".join(shown.output.split())
    assert "6 trials; 3 after step 10 continue. That takes 1,320 samples instead of 2,400, 55%." in words
    assert "Times are estimated from the data sheet" in words
    assert (
        words.count("warning: sql: sweep.halving.at: the first rung is at step 10, and trials warm up until")
        == 1
    )
    only = CliRunner().invoke(app, [str(tmp_path / "jobs.yaml"), "--job", "sql-r4-lr1e-4", "--rows", "1"])
    assert "─ sql-r4-lr1e-4 ─" in only.output
    assert "Sweep" not in only.output
    wrong = CliRunner().invoke(app, [str(tmp_path / "jobs.yaml"), "--job", "four"])
    assert "there is no job four; the file has other, sql" in str(wrong.exception)


@pytest.mark.skipif(not STORIES.exists(), reason="stories15m is not here")
def test_the_command_shows_identical_data_once(tmp_path, monkeypatch):
    import typer

    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(CHAT) + "\n" for _ in range(3)))
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "Once upon a time"}) + "\n")
    (tmp_path / "jobs.yaml").write_text(
        f"base: {STORIES}\njobs:\n"
        "  - {name: one, data: {path: rows.jsonl}}\n"
        "  - {name: two, data: {path: rows.jsonl}, learning_rate: 1.0e-3}\n"
        "  - {name: three, data: {path: other.jsonl}}\n"
    )
    app = typer.Typer()
    app.command()(preview)
    shown = CliRunner().invoke(app, [str(tmp_path / "jobs.yaml"), "--rows", "1"])
    assert shown.exit_code == 0, shown.output
    assert "one, two" in shown.output
    assert shown.output.count("training:") == 2
    only = CliRunner().invoke(app, [str(tmp_path / "jobs.yaml"), "--job", "three"])
    assert "Once upon a time" in only.output
    assert "one" not in only.output.replace("tokens", "")
    wrong = CliRunner().invoke(app, [str(tmp_path / "jobs.yaml"), "--job", "four"])
    assert "there is no job four; the file has one, two, three" in str(wrong.exception)


def test_both_samples_of_a_pair_are_shown_side_by_side(tmp_path):
    tokenizer = families.smollm2()
    row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " a green thing."}
    prepared = prepare(DataSpec(rows=[row]), None, tokenizer, tmp_path, row_kind="pairs")
    text = printed(draw_samples(SharedSamples(("a",), prepared), tokenizer, rows=3, uses_marks=True))
    (titles,) = [line for line in text.splitlines() if "pair 1" in line]
    assert titles.index("pair 1, chosen:") < titles.index("pair 1, rejected:")
    (shown,) = [line for line in text.splitlines() if "The sky is" in line]
    assert shown.count("The sky is>>>") == 2
    assert shown.index("blue.") < shown.index("a green thing.")
    assert "training: 1 pairs, " in text


def test_a_labelled_answer_is_shown_with_its_label(tmp_path):
    tokenizer = families.smollm2()
    rows = [{"prompt": "The sky is", "completion": " blue.", "label": label} for label in (True, False)]
    prepared = prepare(DataSpec(rows=rows), None, tokenizer, tmp_path, row_kind="labelled")
    text = printed(draw_samples(SharedSamples(("a",), prepared), tokenizer, rows=3, uses_marks=True))
    assert "sample 1, desirable: " in text
    assert "sample 2, undesirable: " in text
    assert text.count("The sky is>>> blue.") == 2


def test_an_objective_that_supervises_prompts_has_samples_of_its_own():
    rows = [{"prompt": "w7 w8 w9", "chosen": " w10 w11", "rejected": " w12"}]
    jobs = [JobSpec(name=name, data=rows, objective=name.rstrip("2")) for name in ("dpo", "orpo", "dpo2")]
    pairs, whole = prepare_all(jobs, bench.tokenizer(), 64)
    assert (pairs.jobs, whole.jobs) == (("dpo", "dpo2"), ("orpo",))
    answer, everything = pairs.prepared.train, whole.prepared.train
    assert everything.mask(0).all()
    assert not answer.mask(0).all()
    assert (answer.mask(1) == everything.mask(1)).all()
