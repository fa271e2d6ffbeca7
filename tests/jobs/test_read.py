from __future__ import annotations

from pathlib import Path

import pytest

from weftune.base.spec import BaseSpec
from weftune.core.shapes import ModelShape, SiteShape
from weftune.data.spec import Source
from weftune.errors import SpecError
from weftune.jobs.read import parse_run, read_run
from weftune.jobs.spec import RunSpec


def run_of(folder: Path, text: str) -> RunSpec:
    (folder / "rows.jsonl").write_text('{"text": "one"}\n')
    (folder / "jobs.yaml").write_text(text, encoding="utf-8")
    return read_run(folder / "jobs.yaml")


def test_the_smallest_file_is_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, "base: demo\njobs: [{name: a, data: rows.jsonl}]\n")
    assert run.base == BaseSpec(model="demo")
    assert run.output == tmp_path / "output"
    assert run.report_to == ()
    assert run.file == tmp_path / "jobs.yaml"
    (job,) = run.jobs
    assert (job.epochs, job.steps, job.batch_size, job.learning_rate) == (1.0, None, 16, 2e-4)


def test_defaults_merge_deeply_and_lists_replace(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        """
base: demo
defaults:
  adapter: {rank: 4, targets: [q_proj, v_proj], alpha_pattern: {q_proj: 1}}
  data: {path: rows.jsonl, max_length: 64}
  learning_rate: 1e-3
jobs:
  - name: a
  - name: b
    adapter: {targets: [k_proj], alpha_pattern: {v_proj: 2}}
    data: owner/other
    learning_rate: 5E-4
""",
    )
    a, b = run.jobs
    assert (a.adapter.targets, a.learning_rate) == (("q_proj", "v_proj"), 1e-3)
    assert (b.adapter.rank, b.adapter.targets) == (4, ("k_proj",))
    assert b.adapter.alpha_pattern == {"q_proj": 1, "v_proj": 2}
    assert (b.data.path, b.data.max_length) == ("owner/other", 64)
    assert b.learning_rate == 5e-4


def test_a_job_that_says_steps_displaces_the_defaults_epochs(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        """
base: demo
defaults: {epochs: 3, data: rows.jsonl, eval: {fraction: 0.1, every: 5}}
jobs:
  - {name: a, steps: 7, eval: {path: rows.jsonl}}
  - {name: b, eval: null}
""",
    )
    a, b = run.jobs
    assert (a.steps, a.epochs) == (7, None)
    assert a.eval is not None
    assert (a.eval.path, a.eval.fraction, a.eval.every) == (str(tmp_path / "rows.jsonl"), None, 5)
    assert (b.epochs, b.eval) == (3, None)


def test_paths_are_relative_to_the_file_whatever_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model").mkdir()
    (inner / "old").mkdir()
    (inner / "old" / "adapter_config.json").write_text("{}")
    (inner / "old" / "adapter_model.safetensors").touch()
    (inner / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    text = """
base: model
output: ../results
jobs:
  - name: a
    adapter: {init_from: old}
    data: {path: [{path: rows.jsonl, weight: 2}, {path: owner/name}], chat_template: chat.jinja}
    eval: {path: rows.jsonl}
"""
    run_of(inner, text)
    run = read_run("inner/jobs.yaml")
    assert read_run("inner/../inner/jobs.yaml").jobs == run.jobs
    (job,) = run.jobs
    assert run.base == BaseSpec(model=str(inner / "model"), written="model")
    assert run.base.published_name == "model"
    assert run.output == tmp_path / "results"
    assert job.adapter.init_from == str(inner / "old")
    assert job.data.sources == (Source(path=str(inner / "rows.jsonl"), weight=2.0), Source(path="owner/name"))
    assert job.data.chat_template == str(inner / "chat.jinja")
    assert job.eval is not None
    assert job.eval.path == str(inner / "rows.jsonl")


def test_text_that_older_yaml_would_change_stays_text(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        """
base: demo
defaults: {data: rows.jsonl}
jobs:
  - {name: no, seed: 1_000, steps: 0x10}
  - {name: 2024-01-01, learning_rate: .5, adapter: {rslora: True, alpha: 1e2}}
  - {name: 12e, adapter: {init_from: ~}}
""",
    )
    assert [job.name for job in run.jobs] == ["no", "2024-01-01", "12e"]
    assert (run.jobs[0].seed, run.jobs[0].steps) == (1000, 16)
    assert (run.jobs[1].learning_rate, run.jobs[1].adapter.alpha) == (0.5, 100.0)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        """
base: demo
jobs:
  - &first {name: a, data: rows.jsonl, seed: 3, adapter: {rank: 2}}
  - <<: *first
    name: b
    adapter: {alpha: 5}
""",
    )
    a, b = run.jobs
    assert (b.name, b.seed, b.data) == ("b", 3, a.data)
    assert (b.adapter.rank, b.adapter.alpha) == (16, 5)


def test_a_place_found_later_still_has_its_line(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        """base: demo
defaults:
  adapter:
    targets: [q_proj]
jobs:
  - name: a
    data: rows.jsonl
  - name: b
    data: rows.jsonl
    adapter:
      targets:
        - k_proj
        - v_proj
""",
    )
    assert run.place("a", "adapter", "targets", 0) == "jobs.yaml:4 defaults.adapter.targets[0]"
    assert run.place("b", "adapter", "targets", 1) == "jobs.yaml:13 jobs[1].adapter.targets[1]"
    assert run.place("b", "adapter", "rank") == "jobs.yaml:10 jobs[1].adapter"


def test_a_mapping_reads_as_the_file_does(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        "base: {model: owner/name, dtype: float32}\nreport_to: wandb\njobs: [{name: a, data: rows.jsonl}]\n",
    )
    mapping = {
        "base": {"model": "owner/name", "dtype": "float32"},
        "report_to": ["wandb"],
        "jobs": [{"name": "a", "data": "rows.jsonl"}],
    }
    assert parse_run(mapping, tmp_path, tmp_path / "jobs.yaml") == run
    assert run.report_to == ("wandb",)


def test_a_target_that_matches_nothing_is_listed_with_the_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "jobs.yaml").write_text(
        "base: demo\n"
        "jobs:\n"
        "- {name: a, data: rows.jsonl, adapter: {targets: [q_prj]}}\n"
        "- {name: b, data: rows.jsonl, batchsize: 3}\n"
    )
    shape = ModelShape(1, 8, 16, 64, 4, (SiteShape("model.layers.0.q_proj", 8, 8),), 32)
    with pytest.raises(SpecError) as caught:
        read_run(tmp_path / "jobs.yaml", lambda base: shape)
    places = {mistake.place: mistake.sentence for mistake in caught.value.mistakes}
    assert "batch_size" in places["jobs.yaml:4 jobs[1].batchsize"]
    assert "did you mean q_proj?" in places["jobs.yaml:3 jobs[0].adapter.targets[0]"]
