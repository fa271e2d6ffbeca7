"""A checkpoint in slices. Every worker of a pipeline writes its own; the first worker, to which all of them
are reported, writes the state and renames the folder into place. Until then it is not read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weftune.core.files import FORMAT
from weftune.core.tensor_file import write_hashed_tensors
from weftune.run.training.checkpoint import (
    final_folder,
    listed_layout,
    partial_folder,
    put_in_place,
    write_state,
)
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.state import Progress


@dataclass(frozen=True, slots=True)
class Slice:
    """A worker's file of a checkpoint, written and synced."""

    file: str
    sha256: str
    layout: list[list[Any]]


def write_slice(folder: Path, snapshot: Snapshot, worker: int) -> Slice:
    partial = partial_folder(folder, snapshot.progress.step)
    partial.mkdir(parents=True, exist_ok=True)
    name = f"tensors-{worker}.safetensors"
    return Slice(
        name, write_hashed_tensors(partial / name, snapshot.tensors()), listed_layout(snapshot.layout)
    )


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
    write_state(partial, state, {one.file: one.sha256 for one in ordered})
    put_in_place(partial, final)
    return final


def drop_partial(folder: Path) -> None:
    """Remove partial folders of a run that was killed; no process may be writing here."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
