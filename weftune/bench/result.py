"""Output of all benchmarks: the file that `--json` names, with the machine, date and commit beside the
numbers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    return parser


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine, on which the numbers were measured."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _read_commit(),
        "processor": _read_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": device,
        "torch": torch.__version__,
    }


def finish(numbers: dict[str, Any], path: Path | None) -> None:
    numbers = {"machine": describe_machine(), **numbers}
    about = numbers["machine"]
    device = about["gpu"] or f"{about['processor']}, {about['cores']} cores"
    print(f"\n{device}, torch {about['torch']}")
    print(f"{about['commit']}, {about['date']}")
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n")


def _read_commit() -> str:
    options = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(options, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
