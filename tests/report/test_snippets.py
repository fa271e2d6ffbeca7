from __future__ import annotations

import ast
import shlex
from pathlib import Path

from weftune.report.snippets import generate_command, load_snippet


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
    made = calls(load_snippet("org/base", None, Path("/out/job")))
    assert made["AutoModelForCausalLM"] == ["org/base"]
    assert made["PeftModel"] == ["/out/job"]


def test_the_demo_base_is_named_by_its_hub_id_and_a_revision_is_kept() -> None:
    made = calls(load_snippet("demo", "abc", Path("/out/job")))
    assert made["AutoModelForCausalLM"] == ["HuggingFaceTB/SmolLM2-135M-Instruct", "abc"]


def test_a_gguf_base_is_loaded_as_transformers_wants_it() -> None:
    made = calls(load_snippet("models/small.gguf", None, Path("/out/job")))
    assert made["AutoModelForCausalLM"] == ["models", "small.gguf"]


def test_quotes_in_a_path_stay_inside_the_text() -> None:
    folder = Path('/out/it\'s "odd"; rm -rf $HOME')
    assert calls(load_snippet("b", None, folder))["PeftModel"] == [str(folder)]
    assert shlex.split(generate_command(folder))[2] == str(folder)
