"""The cache folder: files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`WEFTUNE_CACHE`, else `weftune` in the user's cache folder. It is not created here."""
    chosen = os.environ.get("WEFTUNE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "weftune"
