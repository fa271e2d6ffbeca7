"""`job.yaml`: the settings that a job was started with. It ends with a checksum, and a copy is kept with the
checkpoints."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weftune.adapters.folder import JOB_FILE
from weftune.core.files import dump_yaml, load_yaml, refuse_unknown_format, replace_file
from weftune.errors import OutputError

CHECKPOINTS = "checkpoints"
MARK = b"# crc32: "
__all__ = ["CHECKPOINTS", "JOB_FILE", "DamagedJobFile", "JobFile", "read_job_file", "write_job_file"]


class DamagedJobFile(OutputError):
    """An error raised if neither job.yaml nor its copy can be read."""


@dataclass(frozen=True, slots=True)
class JobFile:
    values: dict[str, Any]
    is_copy: bool
    """Whether job.yaml itself is damaged or missing and the values come from its copy."""


def write_job_file(folder: Path, values: dict[str, Any]) -> None:
    text = dump_yaml(values)
    for path in (folder / JOB_FILE, folder / CHECKPOINTS / JOB_FILE):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text + MARK + _checksum(text) + b"\n")


def read_job_file(folder: Path) -> JobFile | None:
    """Return the settings that a job was started with; None if it never was. Raises DamagedJobFile or
    UnknownFormat."""
    paths = folder / JOB_FILE, folder / CHECKPOINTS / JOB_FILE
    if not any(path.exists() for path in paths):
        return None
    complaint = ""
    for path in paths:
        try:
            values = _parsed(path.read_bytes())
        except (OSError, ValueError) as error:
            complaint = complaint or str(error)
            continue
        refuse_unknown_format(values.get("format"), path)
        return JobFile(values, is_copy=path != paths[0])
    raise DamagedJobFile(f"{paths[0]} cannot be used ({complaint})")


def _parsed(content: bytes) -> dict[str, Any]:
    """Parse a job file. Raises ValueError for content that no Weftune has written; a file from before
    checksums need only have the right shape."""
    text, mark, checksum = content.rpartition(MARK)
    if mark and checksum.strip() != _checksum(text):
        raise ValueError("it does not match its checksum")
    try:
        values = load_yaml(content.decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict) or not all(isinstance(values.get(key), dict) for key in ("job", "base")):
        raise ValueError("it is no job file")
    if "format" in values and not mark:
        raise ValueError("it has lost its checksum")
    return values


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()
