"""The files of a base that may be opened: safetensors, under names that stay inside the base's own folder.

A pickle (`pytorch_model.bin`) runs its author's code as soon as it is opened, and `weights_only` has been
circumvented more than once. Therefore none is opened, and the error message says how to convert it. No torch
here: commands that only count import this too.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from weftune.errors import BaseModelError

SAFETENSORS = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
"""Endings of weight files that are refused."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
ADAPTER_CONFIG = "adapter_config.json"

CONVERT = (
    "from sys import argv; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    "M.from_pretrained(argv[1], dtype='auto').save_pretrained(argv[2]); "
    "T.from_pretrained(argv[1]).save_pretrained(argv[2])"
)


def convert_command(model: str) -> str:
    """Return a command that writes the same model with safetensors beside it."""
    target = f"{Path(model).name}-safetensors" if not Path(model).is_dir() else f"{model}-safetensors"
    return f'python -c "{CONVERT}" {shlex.quote(model)} {shlex.quote(target)}'


def refuse_unsafe(folder: Path, name: str) -> None:
    """Raise for a folder whose weights are all pickles, or for an adapter folder, by the user's `name` for
    it."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise BaseModelError(
            f"The folder {name} holds an {ADAPTER_CONFIG}: as a base, name the model that the adapter is for."
        )
    names = sorted(path.name for path in folder.iterdir())
    pickles = [one for one in names if one.lower().endswith(PICKLES)]
    if pickles and not any(one.endswith(SAFETENSORS) for one in names):
        raise no_safetensors(name, pickles[0])


def no_safetensors(name: str, found: str | None = None) -> BaseModelError:
    what = (
        "has no model.safetensors and no index of several" if found is None else f"has its weights in {found}"
    )
    return BaseModelError(
        f"{name} {what}, and Weftune opens safetensors only, since other files can run code when they are "
        f"opened. If you trust it, convert it once and name the new folder: {convert_command(name)}"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Return tensor → file from the index of a sharded model. Every file must be a plain name beside it."""
    try:
        values: Any = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BaseModelError(f"{index} is damaged: {error}") from None
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict) or not files:
        raise BaseModelError(f"{index} is damaged: it has no weight_map.")
    for file in files.values():
        if not (isinstance(file, str) and PLAIN_NAME.fullmatch(file)):
            raise BaseModelError(
                f"{index} names {str(file)[:80]!r}, but its weights must be {SAFETENSORS} files beside it."
            )
    return files


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. The error for an empty or truncated file names it."""
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        what = f"is damaged or cut off ({error})" if (size := path.stat().st_size) else "is empty"
        raise BaseModelError(f"{path} {what}: it has {size:,} bytes; download or copy it again") from error
    with file:
        yield file
