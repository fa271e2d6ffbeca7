"""What `weftune doctor --profile` measured on a device, as a record and as a file of JSON.

Passes are measured over bases of few layers: what a layer takes is what one layer more adds. A profile holds
for one device, version of torch, dtype and shape of base; its file can be deleted at any time.
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

from weftune.core.paths import cache_folder
from weftune.core.shapes import ModelShape
from weftune.plan.cost.time import PassTime, PassWork, StateTime

VERSION = 1
"""Of the file's form and of what its numbers mean: another is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a profile holds for."""

    device: str
    """The card's name, or cpu."""
    threads: int
    """Of a CPU; 0 for a GPU."""
    torch: str
    bytes_per_value: int
    base: str
    """A digest of the base's shape."""


@dataclass(frozen=True, slots=True)
class LayeredPass:
    """A pass that was measured over a base with so many layers, and the bytes that it held at most."""

    layers: int
    time: PassTime
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    key: ProfileKey
    model: str
    """What the user called the base; for the reader."""
    passes: tuple[LayeredPass, ...]
    steps: tuple[StateTime, ...]
    seconds: float
    """How long measuring took."""
    process_bytes: int = 0
    """What a process held before anything of a base was loaded; 0 where that is not known."""
    first_worker_bytes: int = 0
    """The same of the first of several workers, which are forked: what they have not touched of the libraries
    is not theirs. 0 where that is not known."""
    worker_bytes: int = 0
    """The same of the others, which have no tokenizer."""
    first_seconds: float = 0.0
    """What the first passes of a process took beyond what they take later. Where that would be compiling,
    0."""

    def process_bytes_of(self, workers: int) -> int:
        """What the first of so many processes holds before anything of a base is loaded; 0: not known."""
        return (self.first_worker_bytes if workers > 1 else 0) or self.process_bytes

    @property
    def first_only_bytes(self) -> int:
        """What the first of several workers holds and the others do not."""
        return max(0, self.first_worker_bytes - self.worker_bytes) if self.worker_bytes else 0


def key_of(shape: ModelShape, device: str, threads: int) -> ProfileKey:
    return ProfileKey(
        device=device,
        threads=threads,
        torch=metadata.version("torch"),
        bytes_per_value=shape.bytes_per_value,
        base=digest(shape),
    )


def digest(shape: ModelShape) -> str:
    """Equal for bases whose passes take the same time; names of sites do not count."""
    widths = sorted(
        (site.in_features, site.out_features, *((site.experts, site.active) if site.experts else ()))
        for site in shape.sites
    )
    stored = () if shape.site_bytes_per_value is None else (shape.site_bytes_per_value,)
    sizes = (shape.layers, shape.hidden, shape.vocabulary, shape.parameters, widths, *stored)
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]


def cpu_threads(neighbours: int = 1) -> int:
    """As torch will take them in one of so many processes, without asking it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else max(1, cores // neighbours)


def file_of(folder: Path, key: ProfileKey) -> Path:
    words = (key.device, key.threads or "", "torch", key.torch, 8 * key.bytes_per_value, key.base)
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(map(str, words)).lower())}.json"


def read_profile(path: Path, key: ProfileKey | None = None) -> Profile | None:
    """None where the file is absent, damaged, of another version, or not of this `key`."""
    try:
        profile = _from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return profile if key is None or profile.key == key else None


def profile_folder() -> Path:
    return cache_folder() / "profiles"


def find_profile(key: ProfileKey) -> Profile | None:
    """The one in the user's cache."""
    return read_profile(file_of(profile_folder(), key), key)


def profile_here(shape: ModelShape, gpu: str | None = None, neighbours: int = 1) -> Profile | None:
    """Of one of so many processes on this machine's CPU, or of its GPU of that name, as found without
    torch."""
    return find_profile(key_of(shape, gpu, 0) if gpu else key_of(shape, "cpu", cpu_threads(neighbours)))


def to_json(profile: Profile) -> str:
    return json.dumps({"version": VERSION, **asdict(profile)}, indent=1)


def check_place(path: Path) -> None:
    """Raise OSError if no profile can be written there."""
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "Is a directory", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    draft.touch()
    draft.unlink()


def write_profile(path: Path, profile: Profile) -> None:
    """Replaced whole, so that no reader meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    draft.write_text(to_json(profile), encoding="utf-8")
    draft.replace(path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _from_json(value: Mapping[str, Any]) -> Profile:
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']}")
    return Profile(
        key=ProfileKey(**value["key"]),
        model=str(value["model"]),
        passes=tuple(_pass(one) for one in value["passes"]),
        steps=tuple(
            StateTime(int(one["jobs"]), int(one["parameters"]), _seconds(one["seconds"]))
            for one in value["steps"]
        ),
        seconds=_seconds(value["seconds"]),
        process_bytes=int(value.get("process_bytes", 0)),
        first_worker_bytes=int(value.get("first_worker_bytes", 0)),
        worker_bytes=int(value.get("worker_bytes", 0)),
        first_seconds=_seconds(value.get("first_seconds", 0.0)),
    )


def _pass(value: Mapping[str, Any]) -> LayeredPass:
    time = value["time"]
    work = PassWork(**{name: int(count) for name, count in time["work"].items()})
    return LayeredPass(
        layers=int(value["layers"]),
        time=PassTime(
            work=work,
            forward=_seconds(time["forward"]),
            backward=_seconds(time["backward"]),
            training=bool(time["training"]),
        ),
        peak_bytes=int(value["peak_bytes"]),
    )


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"{value} are no seconds")
    return seconds
