from __future__ import annotations

import ast
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.report.example import Job, write_example
from weftune.base.spec import BaseSpec, Quantize, RopeScaling
from weftune.jobs.store.status import State
from weftune.jobs.store.store import open_store
from weftune.report.ending import print_ending
from weftune.report.page import render_page
from weftune.report.read import JobRecord, read_run
from weftune.report.snippets import base_spec, generate_command, load_snippet, remedies


def calls(snippet: str) -> dict[str, list[object]]:
    """The constant arguments of every `X.from_pretrained` in a snippet, which must be valid Python."""
    found: dict[str, list[object]] = {}
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            owner = ast.unparse(node.func).split(".")[0]
            found[owner] = [value.value for value in values if isinstance(value, ast.Constant)]
    return found


def test_the_snippet_loads_the_base_and_the_adapter_by_name() -> None:
    made = calls(load_snippet(BaseSpec(model="org/base"), Path("/out/job")))
    assert made["AutoModelForCausalLM"] == ["org/base"]
    assert made["PeftModel"] == ["/out/job"]


def test_the_demo_base_is_named_by_its_hub_id_and_a_revision_is_kept() -> None:
    made = calls(load_snippet(BaseSpec(model="demo", revision="abc"), Path("/out/job")))
    assert made["AutoModelForCausalLM"] == ["HuggingFaceTB/SmolLM2-135M-Instruct", "abc"]


def test_the_wrapper_of_a_text_tower_is_loaded_whole(tmp_path: Path) -> None:
    site = "model.language_model.layers.0.self_attn.q_proj"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_modules": [site]}))
    made = calls(load_snippet(BaseSpec(model="org/base"), tmp_path))
    assert made["AutoModelForImageTextToText"] == ["org/base"]
    assert made["PeftModel"] == [str(tmp_path)]


def test_a_gguf_base_is_loaded_as_transformers_wants_it() -> None:
    made = calls(load_snippet(BaseSpec(model="models/small.gguf"), Path("/out/job")))
    assert made["AutoModelForCausalLM"] == ["models", "small.gguf"]


def test_quotes_in_a_path_stay_inside_the_text() -> None:
    folder = Path('/out/it\'s "odd"; rm -rf $HOME')
    assert calls(load_snippet(BaseSpec(model="b"), folder))["PeftModel"] == [str(folder)]
    assert shlex.split(generate_command(folder))[2] == str(folder)


def test_a_base_in_nf4_is_loaded_in_nf4_as_it_was_trained_on() -> None:
    base = BaseSpec(model="org/base", dtype="bfloat16", quantize="nf4")
    snippet = load_snippet(base, Path("/out/job"))
    (made,) = [
        node
        for node in ast.walk(ast.parse(snippet))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "BitsAndBytesConfig"
    ]
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in made.keywords} == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    assert "dtype='bfloat16', quantization_config=nf4)" in snippet


def test_a_scaled_base_is_loaded_with_its_scaling_which_the_record_of_the_job_has(tmp_path: Path) -> None:
    base = BaseSpec(
        model="org/base",
        revision="abc",
        dtype="bfloat16",
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0),
    )
    snippet = load_snippet(base, Path("/out/job"))
    ast.parse(snippet)
    assert "config = AutoConfig.from_pretrained('org/base', revision='abc')" in snippet
    assert "update({'rope_type': 'yarn', 'factor': 4.0})" in snippet
    assert "from_pretrained('org/base', revision='abc', dtype='bfloat16', config=config)" in snippet
    assert BaseSpec.from_record(base.record()) == base


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_a_format_that_transformers_cannot_load_is_told_with_a_command(
    quantize: Quantize,
) -> None:
    snippet = load_snippet(BaseSpec(model="org/base", quantize=quantize), Path("/out/a job"))
    assert f"# The adapter was trained on the base in {quantize}" in snippet
    assert "losses and answers differ" in snippet
    assert "# weftune export --merged '/out/a job'" in snippet
    assert "BitsAndBytesConfig" not in snippet


def test_the_snippet_is_for_the_base_of_the_job_and_the_dtype_of_the_run(tmp_path: Path) -> None:
    run = read_run(write_example(tmp_path, [Job(name="one", quantize="nf4")]))
    base = base_spec(run.jobs[0], run)
    assert base == BaseSpec(model="demo", dtype="float32", quantize="nf4")
    assert base_spec(replace(run.jobs[0], base={}), replace(run, base="")) is None


def record(folder: Path, state: str, reason: str = "", name: str = "one") -> JobRecord:
    (job,) = read_run(write_example(folder, [Job(name=name, state=state, reason=reason, done=3)])).jobs
    return job


@pytest.mark.parametrize(
    ("state", "reason", "commands"),
    [
        ("succeeded", "", []),
        ("failed", "its loss at step 4 is nan", ["--retry one --set learning_rate=2e-05", "--restart one"]),
        ("failed", "it cannot run even alone: it needs information", ["--restart one"]),
        ("paused", "the disk is full", [""]),
        ("running", "", [""]),
        ("cancelled", "", ["--restart one"]),
    ],
)
def test_every_state_has_its_remedy(tmp_path: Path, state: str, reason: str, commands: list[str]) -> None:
    found = [remedy.command for remedy in remedies(record(tmp_path, state, reason))]
    assert found == [f"weftune train jobs.yaml --resume {command}".strip() for command in commands]


def test_remedies_name_the_jobs_file_and_the_output_that_the_run_was_called_with(tmp_path: Path) -> None:
    command = "weftune train 'my jobs/night.yaml' --output 'new out' --resume"
    with open_store(tmp_path / "new out", resume=False, command=command) as store:
        store.add_job("one")
        store.move_job("one", State.RUNNING)
        store.move_job("one", State.FAILED, "its loss at step 4 is nan")
        store.write_status()
    run = read_run(tmp_path / "new out")
    retried, anew = (remedy.command for remedy in remedies(run.jobs[0], run.command))
    assert retried == f"{command} --retry one --set learning_rate=1e-5"
    assert anew == f"{command} --restart one"
    file = io.StringIO()
    print_ending(Console(file=file, width=60), run)
    assert f"\n  {retried}\n" in file.getvalue(), "the terminal alone breaks it"
    assert anew.replace("'", "&#39;") in render_page(run)


def test_a_name_stays_one_word_of_the_command(tmp_path: Path) -> None:
    odd = "a; rm -rf $HOME"
    (remedy,) = remedies(record(tmp_path, "cancelled", name=odd))
    assert shlex.split(remedy.command)[-1] == odd
