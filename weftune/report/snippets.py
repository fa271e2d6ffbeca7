"""How to use a finished adapter: lines to copy into Python or a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from weftune.base.spec import BaseSpec


def load_snippet(base: str, revision: str | None, folder: Path) -> str:
    """Python that loads the adapter in `folder` with PEFT onto its base."""
    name = BaseSpec(model=base).published_name
    arguments = [repr(name)]
    if name.endswith(".gguf"):
        file = Path(name)
        arguments = [repr(str(file.parent)), f"gguf_file={file.name!r}"]
    if revision:
        arguments.append(f"revision={revision!r}")
    return "\n".join(
        (
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({', '.join(arguments)})",
            f"model = PeftModel.from_pretrained(model, {str(folder)!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})",
        )
    )


def generate_command(folder: Path) -> str:
    """The shell command that lets the base and the adapter answer side by side."""
    return f'weftune generate {shlex.quote(str(folder))} "your prompt" --against-base'
