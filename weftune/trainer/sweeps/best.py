"""The folder that holds the winners of a sweep once more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from weftune.core.files import sync_folder
from weftune.jobs.store.job_file import CHECKPOINTS
from weftune.jobs.sweeps.record import BEST


def put_best(folder: Path, winners: Sequence[Path], alone: bool) -> None:
    """Put the winners' folders into `best`, all of them or none, as hard links where the file system has
    them.

    With `alone` there is one winner, and `best` itself becomes its adapter folder. Otherwise each winner
    has a folder of its name in `best`.
    """
    partial, old = folder / f".{BEST}.partial", folder / f".{BEST}.old"
    for path in (partial, old):
        shutil.rmtree(path, ignore_errors=True)
    if not winners:
        return
    assert len(winners) == 1 or not alone, "one folder cannot be that of several"
    for winner in winners:
        shutil.copytree(
            winner,
            partial if alone else partial / winner.name,
            copy_function=_link_or_copy,
            ignore=shutil.ignore_patterns(".*", CHECKPOINTS),
        )
    if (folder / BEST).exists():
        (folder / BEST).rename(old)
    partial.rename(folder / BEST)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
