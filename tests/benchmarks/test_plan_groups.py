"""The benchmark of the planner's alternatives, on small data instead of the datasets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks import plan_groups
from tests.data import families
from tests.plan.costs import CONFIG
from tests.plan.program.test_check import course
from weftune.core.files import json_text
from weftune.plan.program.check import check
from weftune.plan.window.pace import guess_pace
from weftune.plan.window.pipeline import PipelineRules


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    families.smollm2().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json_text(CONFIG))

    def call(*words: str) -> int | str | None:
        own = ["--data", str(tmp_path), "--base", str(tmp_path / "base"), *words]
        monkeypatch.setattr(sys, "argv", ["plan_groups", *own])
        monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path / "cache"))
        try:
            plan_groups.main()
        except SystemExit as ended:
            return ended.code
        return 0

    return call


def write_data(folder: Path) -> None:
    random = Random(0)
    for name, kind in plan_groups.DATASETS.items():
        rows = []
        for _ in range(40):
            words = " ".join(["word"] * random.randint(5, 200))
            rows.append(
                {"prompt": "say", "chosen": words, "rejected": "word"}
                if kind == "pairs"
                else {"prompt": "say", "completion": words}
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_the_datasets_the_benchmark_says_so_and_ends_with_code_2(run, capsys) -> None:
    assert run() == 2
    assert "has no dolly_nocontext.jsonl" in capsys.readouterr().out


@pytest.mark.slow
def test_no_mechanism_is_chosen_that_the_planner_s_costs_find_slower(run, tmp_path) -> None:
    write_data(tmp_path)
    found = tmp_path / "found.json"
    assert run("--mixes", "1", "--settings", "one", "drained", "4 CPU", "--json", str(found)) == 0
    rows = json.loads(found.read_text())["rows"]
    assert [row["setting"] for row in rows] == [
        "one GPU",
        "one CPU",
        "4 stages, drained",
        "4 CPU stages, handed over",
    ]
    for row in rows[:2]:
        # One device has no other costs than those by which its windows are planned.
        assert row["seconds"]["all"] == min(row["seconds"].values())
    assert all(row["seconds"].keys() >= {"simple", *plan_groups.MECHANISMS} for row in rows[2:])


@pytest.mark.parametrize("name", plan_groups.MECHANISMS)
def test_all_candidates_train_the_same_batches_and_are_legal(name: str) -> None:
    random = Random(name)
    windows = [course(job, [[random.randint(1, 40) for _ in range(6)] for _ in range(2)], 0) for job in "abc"]
    rules = PipelineRules(80, (guess_pace(2),) * 3, spare_microbatches=1)
    window = plan_groups.Window(windows, rules, 80, plan_groups.FINISHED, False)
    (planned,) = plan_groups.planned(window)
    found = [*plan_groups.MECHANISMS[name](window)]
    assert found
    for one in found:
        check(one.program, dict.fromkeys("abc", 0))
        assert set(one.program.batches) == set(planned.program.batches)
