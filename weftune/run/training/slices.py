"""A checkpoint in slices. Every worker of a pipeline writes its own; the first worker, which hears of all of
them, writes the state and renames the folder into place. Until then nobody reads it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as serialise

from weftune.core.formats import FORMAT
from weftune.run.training.checkpoint import (
    STATE,
    SUMS,
    final_folder,
    layout_of,
    partial_folder,
    put_in_place,
    sums_text,
    tensors_of,
    write_synced,
)
from weftune.run.training.state import Progress, Training


@dataclass(frozen=True, slots=True)
class Slice:
    """A worker's file of a checkpoint, written and synced."""

    file: str
    sha256: str
    layout: list[list[Any]]


def write_slice(folder: Path, training: Training, worker: int) -> Slice:
    partial = partial_folder(folder, training.progress.step)
    partial.mkdir(parents=True, exist_ok=True)
    content = serialise(tensors_of(training))
    name = f"tensors-{worker}.safetensors"
    write_synced(partial / name, content)
    return Slice(name, hashlib.sha256(content).hexdigest(), layout_of(training))


def finish(
    folder: Path, progress: Progress, seed: int, slices: Mapping[int, Slice], keeps_best: bool
) -> Path:
    """Write the state and checksums of all slices (worker → slice), and rename the checkpoint into place."""
    partial, final = partial_folder(folder, progress.step), final_folder(folder, progress.step)
    ordered = [slices[worker] for worker in sorted(slices)]
    state = {
        "format": FORMAT,
        "progress": asdict(progress),
        "seed": seed,
        "slices": [{"file": one.file, "layout": one.layout} for one in ordered],
        "best_is_master": keeps_best and progress.best_step == progress.step,
    }
    written = json.dumps(state).encode()
    sums = {one.file: one.sha256 for one in ordered} | {STATE: hashlib.sha256(written).hexdigest()}
    write_synced(partial / STATE, written)
    write_synced(partial / SUMS, sums_text(sums))
    put_in_place(partial, final)
    return final


def drop_partial(folder: Path) -> None:
    """Remove partial folders of a run that was killed; nobody must be writing here."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
