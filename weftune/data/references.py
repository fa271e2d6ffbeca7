"""Reference log-probabilities on disk: one number per sample, beside the tokenised samples.

A file has a line of JSON, with the key and a checksum, and the numbers in float64. Numbers that are not known
yet are NaN. A file is replaced as a whole, so that a reader never sees a part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weftune.core.files import replace_file
from weftune.errors import OutputError


def reference_key(*identity: object) -> str:
    """Return a hash of everything that determines the log-probabilities of samples under a reference
    policy."""
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_references(path: Path, key: str, count: int) -> NDArray[np.float64] | None:
    """Return the reference log-probabilities of `count` samples, or None if there is no complete file with
    this key."""
    try:
        header, body = path.read_bytes().split(b"\n", 1)
        if json.loads(header) != {"key": key, "checksum": zlib.crc32(body)}:
            return None
        found = np.frombuffer(body, dtype="<f8").astype(np.float64)
    except (OSError, ValueError):
        return None
    return found if len(found) == count else None


def write_references(path: Path, key: str, numbers: Iterable[float]) -> None:
    """Write reference log-probabilities to `path`, replacing the file as a whole. Raise OutputError if it
    cannot be written."""
    body = np.asarray(numbers, dtype="<f8").tobytes()
    header = json.dumps({"key": key, "checksum": zlib.crc32(body)}).encode()
    # Several processes may write the same file.
    own = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(own, header + b"\n" + body)
        own.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
