"""What a job leaves in its folder: `job.yaml` at its start, an adapter with its tokenizer at its success."""

from __future__ import annotations

import copy
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from weftune.adapters.folder import JOB_FILE
from weftune.adapters.kind import kind_named
from weftune.adapters.layout import Layout
from weftune.base.spec import BaseSpec
from weftune.data.template import template_source
from weftune.errors import OutputError
from weftune.jobs.files import replace_file, sync_folder
from weftune.jobs.spec import changed_keys, resolved
from weftune.ready import Ready
from weftune.shapes import SiteShape

CHECKPOINTS = "checkpoints"
BASE_KEYS = ("model", "dtype", "revision")
"""What makes a base another one; how the user wrote it does not."""
NAMED_PACKAGES = ("weftune", "torch", "transformers", "peft", "safetensors", "datasets")


def describe(job: Ready, base: BaseSpec) -> dict[str, Any]:
    """What `job.yaml` says: the resolved spec, what it was trained on, and with which versions."""
    data = job.data
    return {
        "job": resolved(job.spec),
        "steps": job.recipe.steps,
        "base": {name: getattr(base, name) for name in (*BASE_KEYS, "written")},
        "data": {
            "fingerprint": data.train.fingerprint,
            "samples": len(data.train),
            "evaluation_fingerprint": None if data.evaluation is None else data.evaluation.fingerprint,
            "evaluation_samples": 0 if data.evaluation is None else len(data.evaluation),
            "notes": list(data.notes),
        },
        "versions": _versions(),
    }


def write_job_file(folder: Path, description: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / JOB_FILE, yaml.safe_dump(description, sort_keys=False, allow_unicode=True).encode())


def refuse_changes(folder: Path, description: dict[str, Any]) -> None:
    """A started job goes on only as it began: a changed key, base or dataset is named and refused."""
    path = folder / JOB_FILE
    if not path.exists():
        return
    before = yaml.safe_load(path.read_text())
    changed = changed_keys(before["job"], description["job"])
    changed += [f"base.{key}" for key in BASE_KEYS if before["base"].get(key) != description["base"][key]]
    if not changed and before["steps"] != description["steps"]:
        changed.append("--max-steps")
    if not changed and changed_keys(before["data"], description["data"]):
        changed.append("the rows of its data")
    if changed:
        name = description["job"]["name"]
        raise OutputError(
            f"Job {name} has already started and cannot go on with other settings: {', '.join(changed)} "
            f"changed; put them back, or train it anew with --resume --restart {name}"
        )


def write_result(
    folder: Path,
    job: Ready,
    layout: Layout,
    weights: Tensor,
    sites: tuple[SiteShape, ...],
    base: BaseSpec,
    tokenizer: Any,
) -> None:
    """The adapter as PEFT keeps it, and the tokenizer with the chat template the job was trained with."""
    kind = kind_named(job.spec.adapter.kind)
    kind.save(folder, job.spec.adapter, layout.views(weights), sites, base.published_name)
    own = copy.deepcopy(tokenizer)
    own.chat_template = template_source(tokenizer, job.spec.data.chat_template)
    own.save_pretrained(folder)
    _sync(folder)


def _sync(folder: Path) -> None:
    """Bring the result to the disk before the status speaks of it and its checkpoints go."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _versions() -> dict[str, str]:
    found = {}
    for package in NAMED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
