"""Reading of the config.json and the tokenizer of a base, and the rule that only safetensors files inside the
base's folder are opened for weights. This module does not import torch, which commands that only compute
sizes do not need.

A pickle (`pytorch_model.bin`) can run its author's code as soon as it is opened, and `weights_only` has been
circumvented more than once. Therefore pickles are not opened, and the error message says how to convert them.
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

from weftune.base.quant.stored import read_quantisation
from weftune.base.spec import DEMO, BaseSpec
from weftune.core.files import cache_folder
from weftune.core.hub import absence_reason
from weftune.errors import BaseModelError

CONFIG = "config.json"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
SAFETENSORS = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")
"""File endings of weight formats that are refused."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
ADAPTER_CONFIG = "adapter_config.json"

CONVERT = (
    "from sys import argv; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    "M.from_pretrained(argv[1], dtype='auto').save_pretrained(argv[2]); "
    "T.from_pretrained(argv[1]).save_pretrained(argv[2])"
)


def read_config(spec: BaseSpec) -> dict[str, Any]:
    """Return the values of the base's config.json. Whether the model can be a base is not checked."""
    folder = model_folder(spec)
    file = Path(folder) / CONFIG if Path(folder).is_dir() else _fetch_from_hub(spec)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BaseModelError(f"The {CONFIG} of {spec.model} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise BaseModelError(f"The {CONFIG} of {spec.model} holds no mapping.")
    read_quantisation(values, spec)
    return values


def read_tokenizer(spec: BaseSpec) -> Any:
    """Return the fast tokenizer, loaded by its own class, since AutoTokenizer imports torch."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_folder(spec), revision=spec.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise BaseModelError(f"The tokenizer of {spec.model} cannot be read: {first_line}") from None


def bytes_per_value(spec: BaseSpec, on_gpu: bool) -> int:
    return BYTES[spec.dtype or ("bfloat16" if on_gpu else "float32")]


def model_folder(spec: BaseSpec) -> str:
    """Return the base's local folder or its Hub id. Raise BaseModelError if the base is a GGUF file that has
    not been converted yet."""
    if spec.model == DEMO:
        return _converted_folder(cache_folder() / "demo", "*", spec)
    path = Path(spec.model).expanduser()
    if path.suffix.lower() == ".gguf":
        return _converted_folder(cache_folder() / "gguf", f"{path.stem}-*", spec)
    return local_folder(spec) or spec.model


def local_folder(spec: BaseSpec) -> str | None:
    """Return the local folder that the spec names as the model, or None if there is no such folder."""
    path = Path(spec.model).expanduser()
    if not path.is_dir():
        return None
    if not (path / CONFIG).is_file():
        raise BaseModelError(f"The folder {spec.model} holds no {CONFIG}, so it is no model folder.")
    refuse_unsafe_files(path, spec.model)
    return str(path)


def refuse_missing_base(spec: BaseSpec) -> None:
    """Raise BaseModelError if the Hugging Face Hub does not have this base model. This sends one request."""
    if sentence := absence_reason(spec.model, "model", spec.revision):
        raise BaseModelError(sentence)


def _converted_folder(folder: Path, pattern: str, spec: BaseSpec) -> str:
    """Return the newest cached folder into which the base's GGUF file was converted. Raise BaseModelError if
    there is none, since a conversion needs torch, which this module does not import."""
    made = [
        file.parent for file in folder.glob(f"{pattern}/{CONFIG}") if not file.parent.name.startswith(".")
    ]
    if not made:
        raise BaseModelError(
            f"{spec.model} is not yet converted to a model folder; run `weftune preview` once to do so."
        )
    return str(max(made, key=lambda one: one.stat().st_mtime_ns))


def _fetch_from_hub(spec: BaseSpec) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    refuse_missing_base(spec)
    try:
        return Path(hf_hub_download(spec.model, CONFIG, revision=spec.revision))
    except (OSError, HfHubHTTPError, HFValidationError):
        raise BaseModelError(
            f"There is no folder {spec.model} here, and its {CONFIG} cannot be fetched from the Hub."
        ) from None


def convert_command(model: str) -> str:
    """Return a shell command that converts a model to safetensors, in a folder beside its own or, for a Hub
    id, in the current directory."""
    target = f"{Path(model).name}-safetensors" if not Path(model).is_dir() else f"{model}-safetensors"
    return f'python -c "{CONVERT}" {shlex.quote(model)} {shlex.quote(target)}'


def refuse_unsafe_files(folder: Path, name: str) -> None:
    """Raise BaseModelError if the only weights in a folder are pickles, or if it is an adapter folder. `name`
    is the folder's name in the message."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise BaseModelError(
            f"The folder {name} holds an {ADAPTER_CONFIG}: as a base, name the model that the adapter is for."
        )
    names = sorted(path.name for path in folder.iterdir())
    pickles = [one for one in names if one.lower().endswith(PICKLE_SUFFIXES)]
    if pickles and not any(one.endswith(SAFETENSORS) for one in names):
        raise no_safetensors_error(name, pickles[0])


def no_safetensors_error(name: str, found_format: str | None = None) -> BaseModelError:
    what = (
        "has no model.safetensors and no index of several"
        if found_format is None
        else f"has its weights in {found_format}"
    )
    return BaseModelError(
        f"{name} {what}, and Weftune opens safetensors only, since other files can run code when they are "
        f"opened. If you trust it, convert it once and name the new folder: {convert_command(name)}"
    )


def weight_map(index: Path) -> dict[str, str]:
    """Return a dict from tensor name to file name, from `index`, the index file of a model whose weights are
    in several files. Raise BaseModelError if the index is damaged or names a file outside its folder."""
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
    """Open a safetensors file. Raise BaseModelError with the file's name if it is empty or damaged."""
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        what = f"is damaged or cut off ({error})" if (size := path.stat().st_size) else "is empty"
        raise BaseModelError(f"{path} {what}: it has {size:,} bytes; download or copy it again") from error
    with file:
        yield file
