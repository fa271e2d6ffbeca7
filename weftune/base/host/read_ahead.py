"""The files of a base, read into the system's cache while the process waits for something else."""

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
FREE_SHARE = 0.5
"""Of the free memory: files that take more would push one another out before they are loaded."""


@contextmanager
def base_read_ahead(spec: BaseSpec) -> Iterator[None]:
    """Inside, a thread reads the base's weights, so that loading them later need not wait for a disk."""
    stop = threading.Event()
    reader = threading.Thread(target=read_files, args=(weight_files(spec), stop), daemon=True)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


def weight_files(spec: BaseSpec) -> list[Path]:
    """The safetensors files of a base that is on this machine and fits the free memory; else none."""
    folder = Path(model_folder(spec))
    if not folder.is_dir():
        cached = try_to_load_from_cache(spec.model, CONFIG, revision=spec.revision)
        if not isinstance(cached, str):
            return []
        folder = Path(cached).parent
    files = sorted(folder.glob("*.safetensors"))
    fits = sum(file.stat().st_size for file in files) <= FREE_SHARE * psutil.virtual_memory().available
    return files if fits else []


def read_files(files: Sequence[Path], stop: threading.Event) -> int:
    """Read the files from beginning to end until told to stop; the bytes that were read."""
    chunk, done = bytearray(CHUNK_BYTES), 0
    # Who loads them says better what is wrong with a file.
    with suppress(OSError):
        for file in files:
            with file.open("rb", buffering=0) as opened:
                while not stop.is_set() and (count := opened.readinto(chunk)):
                    done += count
    return done
