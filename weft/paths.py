"""Where Weft keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`WEFT_CACHE`, else `weft` in the user's cache folder. It is not created here."""
    chosen = os.environ.get("WEFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "weft"
