"""Which cases of a long list run (a few that differ in kind, or every one), and their kernels compiled first.

`WEFTUNE_EVERY_CASE=1 pytest -m gpu` runs all of them; most of a GPU test's time is the compiler's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def some_of(every: Iterable[T], few: Iterable[T]) -> list[T]:
    """`few`, unless every case was asked for."""
    every, few = list(every), list(few)
    assert all(one in every for one in few), "a case is among all of them"
    return every if os.environ.get("WEFTUNE_EVERY_CASE") else few


def call_side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Make the calls in eight threads, so that their kernels are compiled in a sixth of the time.

    What a call raises is left for the test that makes it again.
    """

    def once(call: Callable[[], object]) -> None:
        with suppress(Exception):
            call()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(once, calls))
