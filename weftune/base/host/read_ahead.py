"""Reading of a base's files into the page cache in a background thread, before the base is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from huggingface_hub import try_to_load_from_cache

from weftune.base.config import CONFIG, model_folder
from weftune.base.spec import BaseSpec

CHUNK_BYTES = 16 << 20
MAX_FREE_FRACTION = 0.5
"""Maximum fraction of the free memory that a base's weight files may fill if they are read into the page
cache ahead of time. Larger files would evict one another from the page cache."""


@contextmanager
def base_read_ahead(spec: BaseSpec) -> Iterator[None]:
    """Read the base's weight files in a thread while the context is open, so that a later load finds them in
    the page cache."""
    stop = threading.Event()
    reader = threading.Thread(target=read_files, args=(weight_files(spec), stop), daemon=True)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


def weight_files(spec: BaseSpec) -> list[Path]:
    """Return the safetensors files of a base, or [] if the files are not local or exceed `MAX_FREE_FRACTION`
    of the free memory."""
    folder = Path(model_folder(spec))
    if not folder.is_dir():
        cached = try_to_load_from_cache(spec.model, CONFIG, revision=spec.revision)
        if not isinstance(cached, str):
            return []
        folder = Path(cached).parent
    files = sorted(folder.glob("*.safetensors"))
    fits = sum(file.stat().st_size for file in files) <= MAX_FREE_FRACTION * psutil.virtual_memory().available
    return files if fits else []


def read_files(files: Sequence[Path], stop: threading.Event) -> int:
    """Read the files from beginning to end until `stop` is set, and return the number of bytes read."""
    chunk, done = bytearray(CHUNK_BYTES), 0
    # The load that follows reports errors in more detail.
    with suppress(OSError):
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while not stop.is_set() and (count := opened.readinto(chunk)):
                    done += count
    return done
