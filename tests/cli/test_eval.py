"""`weftune eval` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.base.folders import model_folder
from tests.cli.test_generate import job_folder
from tests.generate.test_answers import spoken_by_peft
from weftune.cli.eval import eval
from weftune.errors import UserError

METRIC = """
from dataclasses import dataclass

@dataclass
class Weight:
    value: "float"

def overlap(completion, expected, row):
    words = set(expected.split())
    return Weight(1.0).value * len(words & set(completion.split())) / len(words) + row["bonus"]

def fails(completion, expected, row):
    return 1 / row["bonus"]

def says(completion, expected, row):
    return "good"

def loss(completion, expected, row):
    return 0.0
"""


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(eval)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two finished jobs, and rows whose expected answers are those of the first."""
    monkeypatch.setenv("COLUMNS", "160")
    base = model_folder(tmp_path / "base")
    jobs = {name: job_folder(tmp_path / "output", base, name, seed) for seed, name in enumerate(("a", "b"))}
    rows = []
    for number, prompt in enumerate(("w10 w20", "w30")):
        said = spoken_by_peft(base, jobs["a"], prompt)
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
        rows.append({"messages": chat, "bonus": 1 - number})
    files = {"rows": tmp_path / "rows.jsonl", "metric": tmp_path / "metric.py", "json": tmp_path / "out.json"}
    files |= {
        "page": tmp_path / "page.html",
        "broken": tmp_path / "broken.py",
        "empty": tmp_path / "empty.jsonl",
    }
    files["rows"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["metric"].write_text(METRIC)
    files["broken"].write_text("def f(:\n")
    files["empty"].write_text("")
    return {**jobs, **files, "stranger": job_folder(tmp_path / "output", tmp_path / "elsewhere", "c", 1)}


def test_the_table_is_ranked_and_the_results_are_written(places: dict[str, Path]) -> None:
    words = [str(places["b"]), str(places["a"]), "--data", str(places["rows"]), "--max-tokens", "8"]
    files = ["--json", str(places["json"]), "--page", str(places["page"]), "--device", "cpu"]
    shown = run(*words, *files, "--metric", "exact_match")
    lines = [line for line in shown.splitlines() if "│" in line]
    assert lines[0].split()[1] == "a"
    assert "★ best" in lines[0]
    assert "100.0 %" in lines[0]
    assert "★" not in "".join(lines[1:])
    results = json.loads(places["json"].read_text())["results"]
    assert [one["adapter"] for one in results] == ["base", "b", "a"]
    names = ["adapter", "data", "rows", "tokens", "loss", "perplexity", "token_accuracy", "exact_match"]
    assert all(list(one) == names for one in results)
    assert [one["exact_match"] for one in results] == [0.0, 0.0, 1.0]
    assert {(one["data"], one["rows"]) for one in results} == {(str(places["rows"]), 2)}
    page = places["page"].read_text()
    assert page.count("✓ match") == 2
    assert page.count('class="answer expected"') == 2
    # By loss, the lowest one is the best.
    by_loss = [line.split()[1] for line in run(*words, "--device", "cpu").splitlines() if "│" in line]
    assert by_loss == [one["adapter"] for one in sorted(results, key=lambda one: one["loss"])]


def test_the_mean_of_the_users_function_is_a_column_and_ranks(places: dict[str, Path]) -> None:
    words = [
        str(places["b"]),
        str(places["a"]),
        "--data",
        str(places["rows"]),
        "--max-tokens",
        "8",
        "--no-base",
    ]
    shown = run(*words, "--metric", f"{places['metric']}:overlap", "--json", str(places["json"]))
    results = {one["adapter"]: one for one in json.loads(places["json"].read_text())["results"]}
    assert list(results) == ["b", "a"]
    assert results["a"]["overlap"] == 1.5
    assert results["b"]["overlap"] < 1.5
    assert "overlap" in shown
    assert [line.split()[1] for line in shown.splitlines() if "│" in line] == ["a", "b"]


def test_without_answers_there_is_no_exact_match_and_no_metric_of_answers(places: dict[str, Path]) -> None:
    words = [str(places["a"]), "--data", str(places["rows"]), "--max-tokens", "0"]
    run(*words, "--metric", f"{places['metric']}:overlap", "--json", str(places["json"]))
    for one in json.loads(places["json"].read_text())["results"]:
        assert (one["exact_match"], one["overlap"]) == (None, None)
        assert one["loss"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{a}", "--metric", "accuracy"], "accuracy is no metric; did you mean token_accuracy"),
        (
            ["{a}", "--metric", "bleu"],
            "write loss, perplexity, token_accuracy, exact_match, or FILE.py:FUNCTION",
        ),
        (
            ["{a}", "--metric", "rewards/margins"],
            "is a metric of preference pairs, and .* holds none",
        ),
        (["{a}", "--metric", "absent.py:f"], "there is no file absent.py"),
        (["{a}", "--metric", "{broken}:f"], r"broken\.py cannot be imported: SyntaxError"),
        (["{a}", "--metric", "{metric}:f"], r"metric\.py holds no function f"),
        (["{a}", "--metric", "{metric}:loss"], "loss is already the name of a column"),
        (["{a}", "--metric", "{metric}:fails"], r"rows\.jsonl:2: the metric fails failed: ZeroDivisionError"),
        (
            ["{a}", "--metric", "{metric}:says"],
            r"rows\.jsonl:1: the metric says returned 'good', which is no",
        ),
        (["{a}", "{stranger}"], "ask adapters of one base at a time"),
        (["{a}", "other"], "other is no folder"),
        (["{a}", "--data", "{empty}"], r"empty\.jsonl: the dataset is empty"),
        (["{a}", "--data", "absent.jsonl"], r"there is no file absent\.jsonl"),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], sentence: str, places: dict[str, Path]) -> None:
    data = [] if "--data" in words else ["--data", str(places["rows"])]
    with pytest.raises(UserError, match=sentence):
        run(*(word.format(**places) for word in words), *data, "--max-tokens", "4", "--device", "cpu")
