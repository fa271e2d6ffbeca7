"""Which cases of a long list run (a few that differ in kind, or every one), and their kernels compiled first.

`WEFTUNE_EVERY_CASE=1 pytest -m gpu` runs all of them; most of a GPU test's time is the compiler's.
`make test-slow` runs what `make test` leaves out: cases beyond a few, and every example of the random tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

EXAMPLES_FACTOR = 5
FEWEST_EXAMPLES = 10


def asks_for_every_case() -> bool:
    return bool(os.environ.get("WEFTUNE_EVERY_CASE"))


def some_of(every: Iterable[T], few: Iterable[T]) -> list[T]:
    """`few`, unless every case was asked for."""
    every, few = list(every), list(few)
    assert all(one in every for one in few), "a case is among all of them"
    return every if asks_for_every_case() else few


def slow_but(every: Iterable[T], few: Iterable[T]) -> list[Any]:
    """Every case, for `parametrize`; those that are not among `few` carry the mark `slow`.

    A tuple is the values of several arguments.
    """
    every, few = list(every), list(few)
    assert all(one in every for one in few), "a case is among all of them"
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)), marks=[] if one in few else pytest.mark.slow
        )
        for one in every
    ]


def fewer_examples(asked: int) -> int:
    """A fifth of the random examples that a test asks for, but no fewer than ten of them."""
    return max(min(asked, FEWEST_EXAMPLES), asked // EXAMPLES_FACTOR)


LOOP_SECONDS = 0.13
"""Processor seconds that two million additions take on the cores for which bounds of seconds were chosen."""


def takes_less(seconds: float, call: Callable[[], object], tries: int = 3) -> bool:
    """Whether the call takes less processor time than that, on a slower core `core_slowness()` times as much.
    What runs beside it makes some calls slower: the first that is fast enough counts."""
    return any(processor_seconds(call) < seconds * core_slowness() for _ in range(tries))


def core_slowness() -> float:
    """How many times as long two million additions take here as on the cores for which bounds of seconds were
    chosen, at least 1."""

    def add() -> None:
        total = 0
        for number in range(2_000_000):
            total += number

    return max(1.0, processor_seconds(add) / LOOP_SECONDS)


def processor_seconds(call: Callable[[], object]) -> float:
    """The seconds of processors that the call takes, with those of processes that end in it: what else runs
    on the machine does not count."""
    before = sum(os.times()[:4])
    call()
    return sum(os.times()[:4]) - before


def call_side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Make the calls in eight threads, so that their kernels are compiled in a sixth of the time.

    What a call raises is left for the test that makes it again.
    """

    def once(call: Callable[[], object]) -> None:
        with suppress(Exception):
            call()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(once, calls))
