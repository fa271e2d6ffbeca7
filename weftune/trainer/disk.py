"""A check that the disk of the output has room for what a run will write."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from weftune.core.shapes import ModelShape
from weftune.errors import OutputError
from weftune.plan.cost.memory import gib
from weftune.report.words import plural
from weftune.run.training.checkpoint import KEPT
from weftune.trainer.job import PreparedJob


def refuse_full_disk(output: Path, jobs: Sequence[PreparedJob], shape: ModelShape) -> None:
    """Raise OutputError if adapters and checkpoints of the jobs need more than is free.

    Jobs hold checkpoints while they train, so all checkpoints together are no larger than what the memory of
    this machine holds, however many jobs wait.
    """
    value = max(4, shape.bytes_per_value)
    adapters = sum(value * job.shape.trainable for job in jobs)
    states = sum(value * job.shape.trainable * _vectors(job) for job in jobs)
    needed = adapters + KEPT * min(states, _memory_bytes()) - sum(_held(output / job.name) for job in jobs)
    free = shutil.disk_usage(output).free
    if needed > free:
        raise OutputError(
            f"{output} needs {gib(needed)} for adapters and checkpoints of {plural(len(jobs), 'job')}, but "
            f"only {gib(free)} are free there; free {gib(needed - free)}, or choose another --output"
        )


def _vectors(job: PreparedJob) -> int:
    """Return the number of vectors of a checkpoint that are as long as the adapter: its weights, their two
    moments, the best weights and a mean of weights."""
    return 3 + (job.spec.keep == "best") + job.shape.means


def _memory_bytes() -> int:
    gpus = range(torch.cuda.device_count())
    return psutil.virtual_memory().total + sum(
        torch.cuda.get_device_properties(number).total_memory for number in gpus
    )


def _held(folder: Path) -> int:
    """Return the bytes that a job's folder already takes: a resumed run replaces them."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
