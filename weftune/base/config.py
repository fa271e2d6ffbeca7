"""A base's config.json and tokenizer without torch and without weights, for commands that only count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weftune.base.quant.stored import quantised
from weftune.base.safe_files import refuse_unsafe
from weftune.base.spec import DEMO, BaseSpec
from weftune.core.files import cache_folder
from weftune.core.hub import why_absent
from weftune.errors import BaseModelError

CONFIG = "config.json"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def read_config(spec: BaseSpec) -> dict[str, Any]:
    """Return the values of config.json. A model that cannot be a base is refused only when it is loaded."""
    folder = model_folder(spec)
    file = Path(folder) / CONFIG if Path(folder).is_dir() else _fetched(spec)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BaseModelError(f"The {CONFIG} of {spec.model} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise BaseModelError(f"The {CONFIG} of {spec.model} holds no mapping.")
    quantised(values, spec)
    return values


def read_tokenizer(spec: BaseSpec) -> Any:
    """Return the fast tokenizer, through its own class: the automatic one imports torch."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(model_folder(spec), revision=spec.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise BaseModelError(f"The tokenizer of {spec.model} cannot be read: {first_line}") from None


def bytes_per_value(spec: BaseSpec, gpu: bool) -> int:
    return BYTES[spec.dtype or ("bfloat16" if gpu else "float32")]


def model_folder(spec: BaseSpec) -> str:
    """Return a local folder, or a Hub id. Raise if the base would have to be converted first."""
    if spec.model == DEMO:
        return _converted(cache_folder() / "demo", "*", spec)
    path = Path(spec.model).expanduser()
    if path.suffix.lower() == ".gguf":
        return _converted(cache_folder() / "gguf", f"{path.stem}-*", spec)
    return local_folder(spec) or spec.model


def local_folder(spec: BaseSpec) -> str | None:
    """Return the model folder that the spec names, or None if it names no folder."""
    path = Path(spec.model).expanduser()
    if not path.is_dir():
        return None
    if not (path / CONFIG).is_file():
        raise BaseModelError(f"The folder {spec.model} holds no {CONFIG}, so it is no model folder.")
    refuse_unsafe(path, spec.model)
    return str(path)


def refuse_absent(spec: BaseSpec) -> None:
    """Raise if the Hub does not provide this Hub id, which takes one request."""
    if sentence := why_absent(spec.model, "model", spec.revision):
        raise BaseModelError(sentence)


def _converted(folder: Path, pattern: str, spec: BaseSpec) -> str:
    """Return the newest conversion. Raise if there is none, since converting needs torch."""
    made = [
        file.parent for file in folder.glob(f"{pattern}/{CONFIG}") if not file.parent.name.startswith(".")
    ]
    if not made:
        raise BaseModelError(
            f"{spec.model} is not yet converted to a model folder; run `weftune preview` once to do so."
        )
    return str(max(made, key=lambda one: one.stat().st_mtime_ns))


def _fetched(spec: BaseSpec) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    refuse_absent(spec)
    try:
        return Path(hf_hub_download(spec.model, CONFIG, revision=spec.revision))
    except (OSError, HfHubHTTPError, HFValidationError):
        raise BaseModelError(
            f"There is no folder {spec.model} here, and its {CONFIG} cannot be fetched from the Hub."
        ) from None
