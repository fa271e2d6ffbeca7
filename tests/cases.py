"""Which cases of a long list run: a few that differ in kind, or every one.

`WEFTUNE_EVERY_CASE=1 pytest -m gpu` runs all of them; most of a GPU test's time is the compiler's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def some_of(every: Iterable[T], few: Iterable[T]) -> list[T]:
    """`few`, unless every case was asked for."""
    every, few = list(every), list(few)
    assert all(one in every for one in few), "a case is among all of them"
    return every if os.environ.get("WEFTUNE_EVERY_CASE") else few
