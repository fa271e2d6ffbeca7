"""A job's checkpoints: written atomically, verified when read, never a pickle.

A checkpoint is a folder `step-00000020` with `tensors.safetensors` (master weights, both moments, the best
weights if kept, the mean of the last weights if a sweep will evaluate it), `state.json` (the job's progress)
and `SHA256SUMS` over both. It is written from a snapshot of the job into a folder with a temporary name,
synced, then renamed. The data order, the schedule and the dropout are functions of seed and step, so no other
random state is saved. The last two checkpoints are kept: if the newer one is corrupt, the older one is used.

Every worker of a pipeline writes a slice: a file with the tensors of its stages. The first worker, to which
all slices are reported, writes the state and renames the folder; until then the checkpoint is not read. A
checkpoint of one file or of several slices can be read with any number of stages, since parameters are found
by their module and name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from weftune.adapters.vector import ParameterShape, VectorLayout
from weftune.core.files import FORMAT, refuse_unknown_format
from weftune.core.tensor_file import write_hashed_tensors
from weftune.run.training.snapshot import MOMENTS, Snapshot, make_snapshot
from weftune.run.training.state import Progress, Training

TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"
KEPT_CHECKPOINTS = 2


def save(folder: Path, training: Training) -> Path:
    """Write a checkpoint of the job under `folder`, and return its path after it has been written."""
    return write(folder, make_snapshot(training))


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot as a checkpoint under `folder`, and return its path. All but the newest two
    checkpoints are deleted."""
    progress = snapshot.progress
    partial, final = partial_folder(folder, progress.step), final_folder(folder, progress.step)
    folder.mkdir(parents=True, exist_ok=True)
    if has_progress(folder, progress):
        return final
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        sums = {TENSORS: write_hashed_tensors(partial / TENSORS, snapshot.tensors())}
        write_state(partial, progress, snapshot.seed, {"layout": layout_as_list(snapshot.layout)}, sums)
        publish_checkpoint(partial, final)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


@dataclass(frozen=True, slots=True)
class Slice:
    """One worker's file of a job's checkpoint, which has been written and synced to disk."""

    job: str
    step: int
    file: str
    sha256: str
    layout: list[list[Any]]


def write_slice(folder: Path, snapshot: Snapshot, worker: int) -> Slice:
    step, name = snapshot.progress.step, f"tensors-{worker}.safetensors"
    partial = partial_folder(folder, step)
    partial.mkdir(parents=True, exist_ok=True)
    sha256 = write_hashed_tensors(partial / name, snapshot.tensors())
    return Slice(snapshot.job, step, name, sha256, layout_as_list(snapshot.layout))


def finish(
    folder: Path, progress: Progress, seed: int, slices: Mapping[int, Slice], keeps_best: bool
) -> Path:
    """Complete a checkpoint from the slices (tensor files) of all workers: write state and checksums, and
    rename its folder. `slices` maps each worker to its slice. Return the path of the checkpoint."""
    partial, final = partial_folder(folder, progress.step), final_folder(folder, progress.step)
    ordered = [slices[worker] for worker in sorted(slices)]
    contents = {
        "slices": [{"file": one.file, "layout": one.layout} for one in ordered],
        "best_is_master": keeps_best and progress.best_step == progress.step,
    }
    write_state(partial, progress, seed, contents, {one.file: one.sha256 for one in ordered})
    publish_checkpoint(partial, final)
    return final


def drop_partial(folder: Path) -> None:
    """Remove incomplete checkpoints that a killed run has left in `folder`. No process may be writing
    checkpoints there."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def write_state(
    partial_folder: Path,
    progress: Progress,
    seed: int,
    contents: Mapping[str, Any],
    checksums: Mapping[str, str],
) -> None:
    """Write the state file and the checksum file of a checkpoint. `checksums` maps the names of the tensor
    files to their SHA-256."""
    state = {"format": FORMAT, "progress": asdict(progress), "seed": seed, **contents}
    content = json.dumps(state).encode()
    write_synced(partial_folder / STATE, content)
    write_synced(
        partial_folder / SUMS,
        checksum_file_content({**checksums, STATE: hashlib.sha256(content).hexdigest()}),
    )


def publish_checkpoint(partial_path: Path, final_path: Path) -> None:
    """Rename a completely written checkpoint to its final name, and delete all but the newest two."""
    sync_folder(partial_path)
    # An existing folder is damaged, or of the same step before its evaluation.
    shutil.rmtree(final_path, ignore_errors=True)
    os.rename(partial_path, final_path)
    sync_folder(final_path.parent)
    for old in list(_checkpoints_newest_first(final_path.parent))[KEPT_CHECKPOINTS:]:
        shutil.rmtree(old, ignore_errors=True)


def final_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step:08d}.partial"


def has_progress(folder: Path, progress: Progress) -> bool:
    """Return whether `folder` has an intact checkpoint with exactly this progress of the job."""
    there = _read(final_folder(folder, progress.step))
    return there is not None and there.progress == progress


def restore(folder: Path, training: Training) -> bool:
    """Restore `training` from the newest intact checkpoint under `folder`; return whether there is one."""
    for path in _checkpoints_newest_first(folder):
        stored = _read(path)
        if stored is None or not set(stored.layout.parameters).issuperset(training.layout.parameters):
            continue
        training.progress = stored.progress
        found = {
            name: training.layout.slice_vector(stored.layout, one) for name, one in stored.vectors.items()
        }
        training.master.copy_(found["master"])
        for name in MOMENTS:
            # Missing in checkpoints saved at step 0 by earlier releases.
            if name in found:
                getattr(training.state, name).copy_(found[name])
        training.state.weights.copy_(training.master)
        training.best_weights = None
        if stored.best_is_master:
            training.best_weights = training.master.clone()
        elif "best" in found:
            training.best_weights = found["best"].to(training.master.device)
        if training.mean_weights is not None and "mean" in found:
            training.mean_weights.copy_(found["mean"])
        else:
            # The mean begins with the next step.
            training.progress.averaged = 0
        training.drop_open_batch()
        return True
    return False


@dataclass(frozen=True, slots=True)
class CheckpointSurvey:
    """The result of a search for the checkpoints of one job."""

    progress: Progress | None
    """Progress of the newest intact checkpoint. None if there is none."""
    damaged_paths: tuple[Path, ...]
    """Damaged checkpoints that are newer than the newest intact one."""


def survey(folder: Path) -> CheckpointSurvey:
    """Find the newest intact checkpoint under `folder`, without loading it into a model."""
    damaged: list[Path] = []
    for path in _checkpoints_newest_first(folder):
        if (stored := _read(path)) is not None:
            return CheckpointSurvey(stored.progress, tuple(damaged))
        damaged.append(path)
    return CheckpointSurvey(None, tuple(damaged))


def newest_progress(folder: Path) -> Progress | None:
    """Return the progress of the newest intact checkpoint, or None if there is none."""
    return survey(folder).progress


def rename_damaged(damaged_paths: Iterable[Path]) -> None:
    """Rename damaged checkpoints, so that they are not counted among the two checkpoints that are kept. Their
    files are not deleted."""
    for path in damaged_paths:
        target = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(path, target)


def _checkpoints_newest_first(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(folder.glob("step-*"), reverse=True)


@dataclass(frozen=True, slots=True)
class _Stored:
    progress: Progress
    layout: VectorLayout
    """Layout of all parameters in the checkpoint: the layouts of all slices (tensor files), one after
    another."""
    vectors: Mapping[str, Tensor]
    """Maps names such as `master` to flat vectors over all parameters."""
    best_is_master: bool
    """Whether the best weights equal the master weights. If so, slices (tensor files) have no copy of the
    best weights, since they are written before the evaluation of their step."""


def _read(path: Path) -> _Stored | None:
    """Return the content of the checkpoint at `path` if it is complete and its checksums match, else None.
    Raise UnknownFormat for a complete checkpoint in a newer format."""
    try:
        sums = (path / SUMS).read_bytes()
        names = [Path(line.partition("  ")[2]).name for line in sums.decode().splitlines()]
        content = {name: (path / name).read_bytes() for name in names}
        found = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        if STATE not in content or sums != checksum_file_content(found):
            return None
        state = json.loads(content[STATE])
        refuse_unknown_format(state.get("format"), path / STATE)
        slices = state.get("slices") or [{"file": TENSORS, "layout": state["layout"]}]
        listed = [parameter for one in slices for parameter in one["layout"]]
        layout = VectorLayout(tuple(ParameterShape(site, name, tuple(shape)) for site, name, shape in listed))
        parts = [load_tensors(content[Path(one["file"]).name]) for one in slices]
        vectors = parts[0]
        if len(parts) > 1:
            names = [name for name in vectors if all(name in part for part in parts)]
            vectors = {name: torch.cat([part[name] for part in parts]) for name in names}
        return _Stored(Progress(**state["progress"]), layout, vectors, bool(state.get("best_is_master")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None


def layout_as_list(layout: VectorLayout) -> list[list[Any]]:
    return [[p.site, p.name, list(p.shape)] for p in layout.parameters]


def checksum_file_content(sums: Mapping[str, str]) -> bytes:
    """Return the content of a file of checksums in the format of `sha256sum`. `sums` maps file names to their
    SHA-256."""
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()


def write_synced(path: Path, payload: bytes) -> None:
    with open(path, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
