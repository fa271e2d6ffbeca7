"""What the adapter folders of all kinds share: PEFT's `adapter_config.json`, read without PEFT or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weftune.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
