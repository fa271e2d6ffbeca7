from __future__ import annotations

from pathlib import Path

import pytest

from weftune.base.spec import BaseSpec, RopeScaling
from weftune.core.shapes import ModelShape, SiteShape
from weftune.data.spec import Source
from weftune.errors import BaseModelError, Mistake, SpecError
from weftune.jobs.spec.read import parse_run, read_run
from weftune.jobs.spec.spec import RunSpec


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
    assert run.locate("a", "adapter", "targets", 0) == "jobs.yaml:4 defaults.adapter.targets[0]"
    assert run.locate("b", "adapter", "targets", 1) == "jobs.yaml:13 jobs[1].adapter.targets[1]"
    assert run.locate("b", "adapter", "rank") == "jobs.yaml:10 jobs[1].adapter"


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
    places = {mistake.location: mistake.sentence for mistake in caught.value.mistakes}
    assert "batch_size" in places["jobs.yaml:4 jobs[1].batchsize"]
    assert "did you mean q_proj?" in places["jobs.yaml:3 jobs[0].adapter.targets[0]"]


ONE = {"name": "a", "data": "owner/rows"}


def told(mapping: object, folder: Path, **keys: Path) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_run(mapping, folder, **keys)
    return [str(mistake) for mistake in caught.value.mistakes]


@pytest.mark.parametrize(
    ("base", "mistake"),
    [
        ("", "base: must not be empty"),
        ({"model": ""}, "base.model: must not be empty"),
        ({"model": "no.gguf"}, 'base.model: there is no file or folder "no.gguf"'),
        ({"model": "owner/x", "revision": "../x"}, "base.revision: must be a branch, tag or commit, got"),
        ({"model": "owner/x", "branch": "x"}, "base.branch: is not a key of base"),
        ({"model": "owner/x", "quantize": "q4"}, "base.quantize: must be nf4, int8 or fp8, got"),
        ({"model": "owner/x", "load_in_4bit": True}, "base.load_in_4bit: write quantize (nf4)"),
        ({"model": "owner/x", "load_in_8bit": True}, "base.load_in_8bit: write quantize (int8)"),
        (
            {"model": "owner/x", "quantization_config": {}},
            "base.quantization_config: write quantize (nf4, ",
        ),
        ({"model": "owner/x", "llm_int8_threshold": 6}, "base.llm_int8_threshold: leave it out"),
        ({"model": "owner/x", "rope_parameters": {}}, "base.rope_parameters: write rope_scaling"),
        ({"model": "owner/x", "rope_scaling": "yarn"}, "base.rope_scaling: must be a mapping such as {rope_"),
        ({"model": "owner/x", "rope_scaling": {"factor": 2}}, "base.rope_scaling: needs rope_type: linear, "),
        ({"model": "owner/x", "rope_scaling": {"type": "yarn"}}, "base.rope_scaling: needs factor: how many"),
        *(
            ({"model": "owner/x", "rope_scaling": {"rope_type": kind, **keys}}, f"base.rope_scaling{mistake}")
            for kind, keys, mistake in (
                ("yarnn", {"factor": 2}, '.rope_type: must be linear, yarn or llama3, got "yarnn"; did you'),
                ("dynamic", {"factor": 2}, ".rope_type: dynamic changes the positions of all samples with"),
                ("longrope", {"long_factor": [1]}, ".rope_type: longrope changes the positions of all"),
                ("default", {}, ".rope_type: default scales nothing; leave rope_scaling out"),
                ("yarn", {"factor": 0.5}, ".factor: must be at least 1, got 0.5"),
                (
                    "yarn",
                    {"factor": 2, "beta_fats": 8},
                    ".beta_fats: is not a key of base.rope_scaling; did ",
                ),
                ("yarn", {"factor": 2, "type": "yarn"}, ".type: give rope_type or type, not both"),
                ("yarn", {"factor": 2, "beta_slow": 32}, ".beta_slow: must be below beta_fast, which is 32"),
                ("linear", {"factor": 2, "beta_fast": 8}, ".beta_fast: is a key of yarn, not of linear"),
                ("llama3", {"factor": 2, "low_freq_factor": 1}, ": llama3 needs high_freq_factor; Llama 3"),
            )
        ),
        (None, "base: must be a Hub id"),
        (["demo"], "base: must be a Hub id"),
    ],
)
def test_a_base_that_cannot_be_one_is_told_at_its_place(base: object, mistake: str, tmp_path: Path) -> None:
    (found,) = told({"base": base, "jobs": [ONE]}, tmp_path)
    assert found.startswith(mistake)


def test_a_base_is_a_folder_before_it_is_an_id_and_demo_is_neither(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "owner").mkdir()
    for model, found in (("demo", "demo"), ("owner", str(tmp_path / "owner")), ("owner/x", "owner/x")):
        assert parse_run({"base": model, "jobs": [ONE]}, tmp_path).base.model == found
    run = parse_run({"base": {"model": "owner/x", "revision": "v1"}, "jobs": [ONE]}, tmp_path)
    assert run.base == BaseSpec(model="owner/x", revision="v1")
    run = parse_run({"base": {"model": "owner/x", "quantize": "int8"}, "jobs": [ONE]}, tmp_path)
    assert run.base == BaseSpec(model="owner/x", quantize="int8")
    older, newer = (
        parse_run(
            {"base": {"model": "owner/x", "rope_scaling": {key: "yarn", "factor": 2}}, "jobs": [ONE]},
            tmp_path,
        ).base
        for key in ("type", "rope_type")
    )
    assert older == newer == BaseSpec(model="owner/x", rope_scaling=RopeScaling(rope_type="yarn", factor=2.0))


def test_foreign_keys_of_quantisation_in_a_job_lead_to_the_base(tmp_path: Path) -> None:
    for key, value in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8"), ("bnb_4bit_quant_type", "nf4")):
        (found,) = told({"base": "owner/x", "jobs": [{**ONE, key: True}]}, tmp_path)
        assert found == f"jobs[0].{key}: write base.quantize at the top of the file, beside jobs ({value})"


def test_an_output_is_a_folder_that_is_there_or_will_be(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for output, found in (("here", "here"), ("new", "new"), (None, "output")):
        assert (
            parse_run({"base": "demo", "output": output, "jobs": [ONE]}, tmp_path).output == tmp_path / found
        )
    run = {"base": "demo", "output": "", "jobs": [ONE]}
    assert told(run, tmp_path) == ['output: must be the path of a folder, got ""']
    (tmp_path / "output").touch()
    assert told({"base": "demo", "jobs": [ONE]}, tmp_path) == ['output: "output" is a file; name a folder']


def test_a_run_is_deterministic_if_its_file_says_so(tmp_path: Path) -> None:
    run = {"base": "demo", "jobs": [ONE]}
    assert not parse_run(run, tmp_path).deterministic
    assert parse_run({**run, "deterministic": True}, tmp_path).deterministic
    assert told({**run, "deterministic": 1}, tmp_path) == ["deterministic: must be true or false, got 1"]
    [inside] = told({"base": "demo", "jobs": [{**ONE, "deterministic": True}]}, tmp_path)
    assert inside.endswith("write deterministic at the top of the file, beside jobs")


def test_a_tracker_is_told_of_once(tmp_path: Path) -> None:
    run = {"base": "demo", "report_to": ["wandb", "mlflow", "wandb"], "jobs": [ONE]}
    assert parse_run(run, tmp_path).report_to == ("wandb", "mlflow")
    assert told({**run, "report_to": {"wandb": True}}, tmp_path) == [
        "report_to: must be a list of tensorboard, wandb, mlflow, got a mapping"
    ]
    assert told({**run, "report_to": ["comet"]}, tmp_path) == [
        'report_to[0]: must be tensorboard, wandb or mlflow, got "comet"; for none leave report_to out'
    ]


def test_what_is_no_run_at_all_is_one_mistake(tmp_path: Path) -> None:
    start = "must be a mapping with the keys base and jobs, but "
    assert told(None, tmp_path) == [f"{start}it is empty"]
    assert told([1], tmp_path) == [f"{start}it holds a list"]
    assert told({"base": "demo"}, tmp_path) == ["needs jobs: a list"]
    assert told({"base": "demo", "jobs": None}, tmp_path) == [
        "jobs: must be a list of at least one job, got nothing"
    ]
    assert told({"jobs": [ONE]}, tmp_path) == ["needs base: a Hub id, a folder, a GGUF file, or demo"]


def test_jobs_may_be_a_tuple_and_one_that_is_no_mapping_does_not_hide_the_others(tmp_path: Path) -> None:
    assert len(parse_run({"base": "demo", "jobs": (ONE,)}, tmp_path).jobs) == 1
    mistakes = told({"base": "demo", "jobs": [3, {**ONE, "seed": -1}, ONE, ONE]}, tmp_path)
    assert mistakes == [
        "jobs[0]: must be a mapping such as {name: a, data: rows.jsonl}, got 3",
        "jobs[1].seed: must be at least 0, got -1",
        'jobs[2].name: "a" is already the name of jobs[1]; choose another',
        'jobs[3].name: "a" is already the name of jobs[1]; choose another',
    ]


def test_rows_come_from_python_and_not_from_a_file(tmp_path: Path) -> None:
    rows = [{"text": "one"}]
    defaults = {"data": {"max_length": 8}}
    run = parse_run({"base": "demo", "defaults": defaults, "jobs": [{"name": "a", "data": rows}]}, tmp_path)
    assert run.jobs[0].data.rows is rows
    assert run.jobs[0].data.max_length == 8
    mistakes = told(
        {"base": "demo", "jobs": [{"name": "a", "data": {"rows": rows, "path": "owner/rows"}}]},
        tmp_path,
        file=tmp_path / "jobs.yaml",
    )
    assert mistakes == ["jobs.yaml jobs[0].data.rows: write the rows to a file, and its path as data.path"]


def test_a_value_that_is_no_yaml_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        run_of(tmp_path, "base: demo\njobs:\n- {name: a, data: rows.jsonl, seed: !!set x, keep: !!set x}\n")
    assert [mistake.location for mistake in caught.value.mistakes] == [
        "jobs.yaml:3 jobs[0].seed",
        "jobs.yaml:3 jobs[0].keep",
    ]


def test_a_base_that_cannot_be_looked_at_is_a_mistake_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("base: demo\njobs: [{name: a, data: owner/rows}]\nbse: 1\n")

    def broken(base: BaseSpec) -> ModelShape | None:
        raise BaseModelError(Mistake("base", "is broken"))

    with pytest.raises(SpecError) as caught:
        read_run(tmp_path / "jobs.yaml", broken)
    assert [mistake.location for mistake in caught.value.mistakes] == ["jobs.yaml:3 bse", "base"]
    (tmp_path / "jobs.yaml").write_text("base: demo\njobs: [{name: a, data: owner/rows}]\n")
    assert len(read_run(tmp_path / "jobs.yaml", lambda base: None).jobs) == 1


def test_a_base_is_not_looked_at_where_no_job_could_be_read(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("base: demo\njobs: [{name: a, data: owner/rows, seed: -1}]\n")
    looked = []
    with pytest.raises(SpecError, match="must be at least 0"):
        read_run(tmp_path / "jobs.yaml", lambda base: looked.append(base))
    assert looked == []


def test_defaults_and_jobs_together_hold_as_many_values_as_a_file_may(tmp_path: Path) -> None:
    columns = {f"column{number}": "text" for number in range(996)}
    run = {
        "base": "demo",
        "defaults": {"data": {"path": "owner/rows", "columns": columns}},
        "jobs": [{"name": f"a{number}"} for number in range(50)],
    }
    assert len(parse_run(run, tmp_path).jobs) == 50
    columns["more"] = "text"
    assert told(run, tmp_path) == [
        "defaults: has 1,001 values for each of 50 jobs, and a file can hold 50,000 in all; split it"
    ]


def test_thousands_of_jobs_may_share_as_many_defaults_as_a_job_has_keys(tmp_path: Path) -> None:
    columns = {f"column{number}": "text" for number in range(60)}
    run = {
        "base": "demo",
        "defaults": {"data": {"path": "owner/rows", "columns": columns}},
        "jobs": [{"name": f"a{number}"} for number in range(1000)],
    }
    assert len(parse_run(run, tmp_path).jobs) == 1000


def test_defaults_that_say_nothing_are_none_and_a_name_is_no_default(tmp_path: Path) -> None:
    assert len(parse_run({"base": "demo", "defaults": None, "jobs": [ONE]}, tmp_path).jobs) == 1
    assert told({"base": "demo", "defaults": {"name": "x", "seed": -1}, "jobs": [ONE]}, tmp_path) == [
        "defaults.name: must be given in each job, for no two share it",
        "defaults.seed: must be at least 0, got -1",
    ]
