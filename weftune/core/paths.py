"""The cache folder, which holds files that can be recomputed."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `WEFTUNE_CACHE` if it is set, else `weftune` in the user's cache folder. The folder is not
    created."""
    chosen = os.environ.get("WEFTUNE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "weftune"
