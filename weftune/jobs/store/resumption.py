"""The line that resumes a run, for messages: a command to paste, or for Python the argument to pass."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftune.core.files import json_text

UNKNOWN = "weftune train jobs.yaml --resume"
"""Command for outputs of versions that did not record theirs; the user puts in the name of the file."""
PYTHON = ""
"""The recorded command of a run that a Python program started with jobs that are in no file."""


def train_command(jobs: str | Path, output: str | Path | None, max_steps: int | None = None) -> str:
    """Return the command that resumes what `weftune.train(jobs, output=output, max_steps=max_steps)`
    started."""
    words = ["weftune", "train", str(jobs)]
    words += [] if output is None else ["--output", str(output)]
    words += [] if max_steps is None else ["--max-steps", str(max_steps)]
    return shlex.join([*words, "--resume"])


def resume_line(
    command: str | None,
    *,
    restart: Sequence[str] = (),
    retry: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> str:
    """Return the line that resumes a run; `command` is what its status records.

    Jobs of `restart` are trained anew. Jobs of `retry` continue although they failed, with the dotted keys of
    `changes` set to new values.
    """
    if command == PYTHON:
        named = {"restart": tuple(restart), "retry": tuple(retry), "changes": dict(changes or {})}
        words = ["resume=True", *(f"{key}={value!r}" for key, value in named.items() if value)]
        return f"options=weftune.Options({', '.join(words)})"
    words = [word for name in restart for word in ("--restart", name)]
    words += [word for name in retry for word in ("--retry", name)]
    for key, value in (changes or {}).items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json_text(value)}"]
    return " ".join([command or UNKNOWN, *map(shlex.quote, words)])
