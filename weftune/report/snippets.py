"""How to use a finished adapter, and how to go on with an unfinished one: lines to copy."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.adapters.folder import read_config
from weftune.base.spec import BaseSpec
from weftune.core.shapes import in_wrapper
from weftune.errors import AdapterError
from weftune.jobs.store.resumption import resume_line
from weftune.report.read import JobRecord


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do about a job that has no finished adapter, and the command."""

    words: str
    command: str


def load_snippet(base: str, revision: str | None, folder: Path) -> str:
    """Python that loads the adapter in `folder` with PEFT onto its base."""
    name = BaseSpec(model=base).published_name
    arguments = [repr(name)]
    if name.endswith(".gguf"):
        file = Path(name)
        arguments = [repr(str(file.parent)), f"gguf_file={file.name!r}"]
    if revision:
        arguments.append(f"revision={revision!r}")
    model = "AutoModelForImageTextToText" if _in_wrapper(folder) else "AutoModelForCausalLM"
    return "\n".join(
        (
            "from peft import PeftModel",
            f"from transformers import {model}, AutoTokenizer",
            "",
            f"model = {model}.from_pretrained({', '.join(arguments)})",
            f"model = PeftModel.from_pretrained(model, {str(folder)!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})",
        )
    )


def _in_wrapper(folder: Path) -> bool:
    """Whether the adapter is for the text tower of a model that sees images too."""
    try:
        targets = read_config(folder).get("target_modules")
    except AdapterError:
        return False
    return isinstance(targets, list) and any(in_wrapper(str(target)) for target in targets)


def generate_command(folder: Path) -> str:
    """The shell command that lets the base and the adapter answer side by side."""
    return f'weftune generate {shlex.quote(str(folder))} "your prompt" --against-base'


def remedies(job: JobRecord, command: str | None = None) -> tuple[Remedy, ...]:
    """How to go on with a job, best first; nothing for one that has succeeded. `command` is what the run's
    status records."""
    resumed, anew = resume_line(command), resume_line(command, restart=[job.name])
    if job.state == "succeeded":
        return ()
    if job.state == "cancelled":
        return (Remedy("Train it anew", anew),)
    if job.state == "failed" and _diverged(job.reason):
        rate = _lower(job.spec.get("learning_rate"))
        return (
            Remedy(
                "Go on from its last good checkpoint with a lower learning rate",
                resume_line(command, retry=[job.name], changes={"learning_rate": rate}),
            ),
            Remedy("Or change its settings in the jobs file and train it anew", anew),
        )
    if job.state == "failed":
        return (Remedy("Once the cause is mended, train it anew", anew),)
    if job.state in ("paused", "interrupted"):
        return (Remedy("Go on from its last checkpoint", resumed),)
    return (Remedy("If nothing trains it any more, go on with", resumed),)


def _diverged(reason: str) -> bool:
    return re.search(r"\b(nan|inf|infinite|not finite)\b", reason.lower()) is not None


def _lower(learning_rate: Any) -> str:
    """A tenth of the job's own learning rate."""
    known = isinstance(learning_rate, int | float) and learning_rate > 0
    return f"{learning_rate / 10:g}" if known else "1e-5"
