"""The small run whose files are held: two jobs, interrupted, and then brought to their end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests import bench
from weftune import JobSpec, Options
from weftune.base.model import Base

INTERRUPTED_AT = 9
"""The event at which Ctrl-C comes: both jobs have trained, one has evaluated, neither has ended."""


def base() -> Base:
    return bench.base("opt")


def jobs() -> list[JobSpec]:
    """With dropout, evaluation and the best weights kept; and without."""
    rows = bench.rows(bench.samples(20, seed=3))
    evaluated: dict[str, Any] = {"eval": {"fraction": 0.2, "every": 3}, "keep": "best", "save_every": 2}
    dropping = {"rank": 2, "dropout": 0.1, "targets": ["q_proj"]}
    plain = {"rank": 3, "targets": ["v_proj"]}
    return [
        JobSpec(name="evaluated", data=rows, steps=9, batch_size=4, adapter=dropping, learning_rate=1e-2,
                **evaluated),
        JobSpec(name="plain", data=rows, steps=8, batch_size=3, adapter=plain, learning_rate=1e-2,
                save_every=3, seed=1, schedule="cosine"),
    ]  # fmt: skip


def interrupt(output: Path) -> None:
    """Train until the interruption."""
    count = 0

    def callback(_event: Any) -> None:
        nonlocal count
        count += 1
        if count == INTERRUPTED_AT:
            signal.raise_signal(signal.SIGINT)

    trainer = bench.trainer(base(), output, jobs(), options=Options())
    trainer.run(callback)
    assert trainer.interrupted


def resume(output: Path) -> None:
    """Train what is left."""
    bench.trainer(base(), output, jobs(), options=Options(resume=True)).run()
