"""The time in which Triton compiles kernels, counted by the run's clock."""

from __future__ import annotations

from typing import Any

from weftune.core.clock import Phase, claim


def count_compilation() -> None:
    """Make Triton report every compilation from now on, unless another listener is installed."""
    from triton import knobs

    if knobs.compilation.listener is None:
        knobs.compilation.listener = _note_compilation


def _note_compilation(*, times: Any, **_: Any) -> None:
    """Claim the time of a compilation. Triton calls this in the thread that compiles; kernels from its cache
    take almost no time."""
    claim(Phase.COMPILING, times.total / 1e6)
