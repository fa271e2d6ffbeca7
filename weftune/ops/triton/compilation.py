"""The seconds in which Triton compiles kernels, counted by the run's clock."""

from __future__ import annotations

from typing import Any

from weftune.core.clock import Phase, claim


def count_compilation() -> None:
    """Have Triton tell of every compilation from now on, unless somebody else listens already."""
    from triton import knobs

    if knobs.compilation.listener is None:
        knobs.compilation.listener = _note_compilation


def _note_compilation(*, times: Any, **_: Any) -> None:
    """Called by Triton, in the thread that compiles; kernels from its cache take next to nothing."""
    claim(Phase.COMPILING, times.total / 1e6)
