"""A job's checkpoints: whole or not at all, checked when read, never a pickle.

A checkpoint is a folder `step-00000020` with `tensors.safetensors` (master weights, both moments, the best
weights if kept), `state.json` (where the job stands) and `SHA256SUMS` over both. It is written under
another name, synced, then renamed. The data cursor, the schedule and the dropout are functions of seed and
step, so those two are all the random state there is. The last two checkpoints are kept: if a byte of the
newer one has flipped, the older one serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as serialise
from torch import Tensor

from weft.run.training import Progress, Training

TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEPT = 2
VERSION = 1


def save(folder: Path, training: Training) -> Path:
    """Write the job's state under `folder` and drop all but the newest checkpoints."""
    final = folder / f"step-{training.progress.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if (there := _read(final)) is not None and there[0]["progress"] == asdict(training.progress):
        return final
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    state = {
        "version": VERSION,
        "progress": asdict(training.progress),
        "seed": training.member.seed,
        "layout": _layout(training),
    }
    written = {TENSORS: serialise(_tensors(training)), STATE: json.dumps(state).encode()}
    for name, content in {**written, SUMS: _sums(written)}.items():
        _write_synced(partial / name, content)
    _sync_folder(partial)
    # What stands there is damaged, or of the same step before its evaluation.
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    _sync_folder(folder)
    for old in list(_newest_first(folder))[KEPT:]:
        shutil.rmtree(old)
    return final


def restore(folder: Path, training: Training) -> bool:
    """Bring `training` to the newest intact checkpoint under `folder`; False if there is none."""
    for path in _newest_first(folder):
        read = _read(path)
        if read is None or read[0]["layout"] != _layout(training):
            continue
        state, tensors = read
        training.progress = Progress(**state["progress"])
        training.master.copy_(tensors["master"])
        for name in MOMENTS:
            # Not there in what was saved at step 0 by earlier releases.
            if name in tensors:
                getattr(training.state, name).copy_(tensors[name])
        training.state.weights.copy_(training.master)
        training.best = tensors["best"].to(training.master.device) if "best" in tensors else None
        training.forget_open_batch()
        return True
    return False


def newest_progress(folder: Path) -> Progress | None:
    """Where the newest intact checkpoint stands, without a model to put it into."""
    for path in _newest_first(folder):
        if (read := _read(path)) is not None:
            return Progress(**read[0]["progress"])
    return None


def _newest_first(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(folder.glob("step-*"), reverse=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The checkpoint at `path` if it is whole and its checksums hold."""
    try:
        content = {name: (path / name).read_bytes() for name in (TENSORS, STATE)}
        if (path / SUMS).read_bytes() != _sums(content):
            return None
        state = json.loads(content[STATE])
        if state["version"] != VERSION:
            return None
        Progress(**state["progress"])
        return state, load_tensors(content[TENSORS])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None


def _tensors(training: Training) -> dict[str, Tensor]:
    tensors = {name: getattr(training.state, name) for name in ("master", *MOMENTS)}
    if training.best is not None:
        tensors["best"] = training.best
    return {name: value.cpu().contiguous() for name, value in tensors.items()}


def _layout(training: Training) -> list[list[Any]]:
    return [[p.site, p.name, list(p.shape)] for p in training.layout.parameters]


def _sums(content: Mapping[str, bytes]) -> bytes:
    """As `sha256sum` writes and checks them."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in content.items()).encode()


def _write_synced(path: Path, payload: bytes) -> None:
    with open(path, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
