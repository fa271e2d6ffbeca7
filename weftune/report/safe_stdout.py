"""Standard output that cannot end a run: a closed pipe or a full disk is reported once, then ignored."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast


def steady_output() -> IO[str]:
    """Return standard output, to print to while training."""
    return cast("IO[str]", _Steady(sys.stdout))


class _Steady:
    """A wrapper that passes everything to a stream; after a write that fails, output is discarded."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: Exception) -> None:
        """Redirect later writes to the null device, including the interpreter's own flush at exit."""
        if isinstance(error, UnicodeError):
            raise error
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        trouble = error.strerror if isinstance(error, OSError) else str(error)
        with suppress(OSError, ValueError):
            print(f"weftune: nothing more can be printed ({trouble}); training goes on.", file=sys.stderr)
