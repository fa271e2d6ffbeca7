"""What the adapter folders of all kinds share: PEFT's `adapter_config.json`, read without PEFT or torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from weftune.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
JOB_FILE = "job.yaml"
"""What training writes beside them before there are any."""
PICKLE = "adapter_model.bin"

CONVERT = (
    "from sys import argv; import torch; from safetensors.torch import save_file; "
    f"w = torch.load(argv[1] + '/{PICKLE}', map_location='cpu', weights_only=True); "
    f"save_file({{k: v.clone() for k, v in w.items()}}, argv[1] + '/{WEIGHTS}', {{'format': 'pt'}})"
)


def no_weights(folder: Path) -> str:
    """The sentence for a folder without safetensors; a pickle can run code when it is opened, so none is."""
    if not (folder / PICKLE).exists():
        return f"{folder} holds no {WEIGHTS}"
    command = f'python -c "{CONVERT}" {shlex.quote(str(folder))}'
    return f"{folder} has {PICKLE}; Weftune opens safetensors only; if you trust it, convert it: {command}"


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterError(f"{folder} is no adapter folder: it holds no {CONFIG}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is not a JSON object")
    return config


def refuse_no_adapter(folder: Path) -> None:
    """Whatever can be said against an adapter folder without reading its weights."""
    if (folder / JOB_FILE).is_file() and not (folder / CONFIG).is_file():
        raise AdapterError(f"The job in {folder} has not finished: there is no adapter in it yet.")
    read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise AdapterError(f"{folder} is no adapter folder: it holds no {WEIGHTS}")
