"""Reading of the `adapter_config.json` of PEFT adapter folders, without importing PEFT or torch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weftune.adapters.target import TargetSpec
from weftune.core.limited import slow_pattern_error
from weftune.core.shapes import SCORE
from weftune.errors import AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SEQUENCE_TASK = "SEQ_CLS"
"""PEFT's task type for an adapter with a scalar head, as in a reward model."""
JOB_FILE = "job.yaml"
"""Name of the file with the job's keys from the jobs file. Training writes it into an adapter folder before
the config and the weights."""
PICKLE_FILE = "adapter_model.bin"

CONVERT_COMMAND = (
    "from sys import argv; import torch; from safetensors.torch import save_file; "
    f"w = torch.load(argv[1] + '/{PICKLE_FILE}', map_location='cpu', weights_only=True); "
    f"save_file({{k: v.clone() for k, v in w.items()}}, argv[1] + '/{WEIGHTS}', {{'format': 'pt'}})"
)


def missing_weights_message(folder: Path) -> str:
    """Return the error message for an adapter folder that has no safetensors file. Pickles can run code and
    are not opened."""
    if not (folder / PICKLE_FILE).exists():
        return f"{folder} holds no {WEIGHTS}"
    command = f'python -c "{CONVERT_COMMAND}" {shlex.quote(str(folder))}'
    return (
        f"{folder} has {PICKLE_FILE}; Weftune opens safetensors only; if you trust it, convert it: {command}"
    )


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


@contextmanager
def wrap_config_errors(folder: Path) -> Iterator[None]:
    """Return a context in which exceptions due to missing keys or invalid values of an adapter config are
    raised as AdapterError."""
    try:
        yield
    except KeyError as error:
        raise AdapterError(f"{folder / CONFIG} is damaged: it has no key {error}") from error
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, re.error) as error:
        raise AdapterError(f"{folder / CONFIG} is damaged: {type(error).__name__}: {error}") from error


def refuse_slow_patterns(folder: Path, spec: TargetSpec, names: Sequence[str] | None = None) -> None:
    """Raise AdapterError if a regular expression of an untrusted folder is invalid, or too slow on the module
    names `names` (by default, on typical names)."""
    for (*_, key), expression in spec.expressions().items():
        if slow := slow_pattern_error([expression], *(() if names is None else (names,))):
            shown = expression if key == "targets" else key
            raise AdapterError(f"{folder / CONFIG}: {shown[:80]!r} {slow}")
        with wrap_config_errors(folder):
            re.compile(expression)


def target_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `targets` and `layers` of an adapter spec, read from a PEFT config."""
    targets, layers = config["target_modules"] or (), config.get("layers_to_transform")
    if not isinstance(layers, list | int | None):
        raise TypeError(f"layers_to_transform is {type(layers).__name__}")
    return {
        "targets": targets if isinstance(targets, str) else tuple(str(target) for target in targets),
        "layers": tuple(sorted(map(int, layers))) if isinstance(layers, list) else layers,
    }


def has_scalar_head(config: Mapping[str, Any]) -> bool:
    """Return whether the config describes an adapter with a scalar head (of a reward model) and no other
    saved modules. The entry `classifier`, which PEFT adds, is ignored, since no supported model has such a
    module."""
    saved = config.get("modules_to_save") or ()
    return config.get("task_type") == SEQUENCE_TASK and SCORE in saved and set(saved) <= {SCORE, "classifier"}


def refuse_reward_model(folder: Path, sentence: str) -> None:
    """Raise AdapterError with the message `sentence` if the folder holds an adapter with a scalar head (a
    reward model)."""
    if has_scalar_head(read_config(folder)):
        raise AdapterError(f"{folder} holds a reward model, {sentence}.")


def refuse_parent_folder(folder: Path) -> None:
    """Raise AdapterError if a folder is not an adapter folder but contains adapter folders. An example is the
    folder `best` of a sweep."""
    if (folder / CONFIG).is_file() or (folder / JOB_FILE).is_file():
        return
    if found := sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}")):
        raise AdapterError(
            f"{folder} is no adapter folder: it holds no {CONFIG}, but folders in it do: {', '.join(found)}; "
            f"name one of them, such as {shlex.quote(str(folder / found[0]))}"
        )


def check_adapter_folder(folder: Path) -> None:
    """Raise AdapterError if a folder is not a complete adapter folder. The config is read, but the file of
    weights only has to exist."""
    refuse_parent_folder(folder)
    if (folder / JOB_FILE).is_file() and not (folder / CONFIG).is_file():
        raise AdapterError(f"The job in {folder} has not finished: there is no adapter in it yet.")
    read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise AdapterError(f"{folder} is no adapter folder: it holds no {WEIGHTS}")
