"""A profile: the measurements of `weftune doctor --profile` on a device, as a dataclass and as a JSON file.

Passes are measured with only a few layers of the base: the time per layer is the time that one more layer
adds. A profile is valid for one device, torch version, dtype and base shape. Its file can be deleted at any
time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from errno import EISDIR
from importlib import metadata
from pathlib import Path
from typing import Any

from weftune.core.files import cache_folder
from weftune.core.shapes import ModelShape
from weftune.plan.cost.time import PassTime, PassWork, StateTime

VERSION = 1
"""Version of the format of profile files and of the meaning of their numbers. Files with another version are
ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The device, software and base for which a profile is valid."""

    device: str
    """Name of the GPU, or `cpu`."""
    threads: int
    """Number of CPU threads; 0 for a GPU."""
    torch: str
    bytes_per_value: int
    base: str
    """Hash of the sizes of the base."""


@dataclass(frozen=True, slots=True)
class LayeredPass:
    """Measured time and peak memory of the forward and backward of a microbatch over a base of which only
    `layers` layers were kept."""

    layers: int
    time: PassTime
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measurements of one device with one base."""

    key: ProfileKey
    model: str
    """Name of the base as the user has written it, for display."""
    passes: tuple[LayeredPass, ...]
    steps: tuple[StateTime, ...]
    seconds: float
    """Seconds that measuring the profile took."""
    process_bytes: int = 0
    """Bytes that a process held before the base was loaded; 0 if unknown."""
    first_worker_bytes: int = 0
    """Bytes that the first of several worker processes held before the base was loaded, or 0 if unknown.
    Library pages that the forked process shares with its parent are not counted."""
    worker_bytes: int = 0
    """Bytes that each worker process held before the base was loaded, except for the first, which also has
    the tokenizer."""
    first_seconds: float = 0.0
    """Additional seconds that the first passes of a process take. 0 if kernels were compiled during the
    measurement, which would distort the result."""

    def process_bytes_of(self, workers: int) -> int:
        """Return the bytes that the first of `workers` processes holds before a base is loaded; 0 if
        unknown."""
        return (self.first_worker_bytes if workers > 1 else 0) or self.process_bytes

    @property
    def first_only_bytes(self) -> int:
        """Bytes that the first of several worker processes holds in addition to what the others hold, for
        example for the tokenizer."""
        return max(0, self.first_worker_bytes - self.worker_bytes) if self.worker_bytes else 0


def profile_key(shape: ModelShape, device: str, threads: int) -> ProfileKey:
    return ProfileKey(
        device=device,
        threads=threads,
        torch=metadata.version("torch"),
        bytes_per_value=shape.bytes_per_value,
        base=shape_hash(shape),
    )


def shape_hash(shape: ModelShape) -> str:
    """Return a hash of the sizes of a base, which does not depend on the names of the linears."""
    widths = sorted(
        (site.in_features, site.out_features, *((site.experts, site.active_matrices) if site.experts else ()))
        for site in shape.sites
    )
    stored = () if shape.site_bytes_per_value is None else (shape.site_bytes_per_value,)
    sizes = (shape.layers, shape.hidden, shape.vocabulary, shape.parameters, widths, *stored)
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]


def cpu_threads(processes: int = 1) -> int:
    """Return the number of threads that torch uses in each of `processes` processes on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else max(1, cores // processes)


def profile_path(folder: Path, key: ProfileKey) -> Path:
    words = (key.device, key.threads or "", "torch", key.torch, 8 * key.bytes_per_value, key.base)
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(map(str, words)).lower())}.json"


def read_profile(path: Path, key: ProfileKey | None = None) -> Profile | None:
    """Return the profile that a file contains. Return None if the file is missing, damaged or of another
    version, or if its key differs from `key`."""
    try:
        profile = _profile_from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return profile if key is None or profile.key == key else None


def profile_folder() -> Path:
    return cache_folder() / "profiles"


def find_profile(key: ProfileKey) -> Profile | None:
    """Return the profile for this device, software and base from the user's cache folder, or None if there is
    none."""
    return read_profile(profile_path(profile_folder(), key), key)


def find_local_profile(shape: ModelShape, gpu: str | None = None, processes: int = 1) -> Profile | None:
    """Return the cached profile of a base on the GPU with this name. Without a name, return the profile of
    this machine's CPU, whose cores are shared by `processes` processes. Return None if there is no such
    profile."""
    return find_profile(
        profile_key(shape, gpu, 0) if gpu else profile_key(shape, "cpu", cpu_threads(processes))
    )


def to_json(profile: Profile) -> str:
    return json.dumps({"version": VERSION, **asdict(profile)}, indent=1)


def check_writable(path: Path) -> None:
    """Raise OSError if no profile can be written to `path`."""
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "Is a directory", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _temporary_path(path)
    draft.touch()
    draft.unlink()


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile atomically, so that no reader sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _temporary_path(path)
    draft.write_text(to_json(profile), encoding="utf-8")
    draft.replace(path)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _profile_from_json(value: Mapping[str, Any]) -> Profile:
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']}")
    return Profile(
        key=ProfileKey(**value["key"]),
        model=str(value["model"]),
        passes=tuple(_read_pass(one) for one in value["passes"]),
        steps=tuple(
            StateTime(int(one["jobs"]), int(one["parameters"]), _read_seconds(one["seconds"]))
            for one in value["steps"]
        ),
        seconds=_read_seconds(value["seconds"]),
        process_bytes=int(value.get("process_bytes", 0)),
        first_worker_bytes=int(value.get("first_worker_bytes", 0)),
        worker_bytes=int(value.get("worker_bytes", 0)),
        first_seconds=_read_seconds(value.get("first_seconds", 0.0)),
    )


def _read_pass(value: Mapping[str, Any]) -> LayeredPass:
    time = value["time"]
    work = PassWork(**{name: int(count) for name, count in time["work"].items()})
    return LayeredPass(
        layers=int(value["layers"]),
        time=PassTime(
            work=work,
            forward=_read_seconds(time["forward"]),
            backward=_read_seconds(time["backward"]),
            training=bool(time["training"]),
        ),
        peak_bytes=int(value["peak_bytes"]),
    )


def _read_seconds(value: Any) -> float:
    seconds = float(value)
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"{value} are no seconds")
    return seconds
