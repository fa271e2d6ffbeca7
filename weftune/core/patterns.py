"""Untrusted regular expressions, tried under a time limit before they are used.

Python's `re` backtracks: `(.*.*)*x` takes practically forever on a name of thirty letters. The cost of a
pattern on a name is the same every time, so it is tried once on all the names that it will be matched
against, in a limited process, and used without a limit if it passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from weftune.core.limited import Stopped, run_limited

LONGEST = 10_000
SECONDS = 0.5
"""Limit for all names together, in seconds; ordinary patterns take less than a thousandth of it."""
REPEATS = re.compile(r"[*+?{]")
TYPICAL = tuple(
    f"{stem}.{layer}.{part}"
    for stem in ("model.layers", "transformer.h", "model.decoder.layers")
    for layer in (0, 17)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.gate_up_proj", "attn.c_attn")
)
"""Typical module paths, used while the base is not known."""


def ending(pattern: str) -> str:
    """Return the expression that matches module paths ending in a pattern, as PEFT completes it."""
    return rf"(.*\.)?({pattern})"


def slow_sentence(expressions: Iterable[str], names: Sequence[str] = TYPICAL) -> str | None:
    """Return why the expressions must not be matched against `names`, or None if they may. Expressions that
    do not compile are ignored."""
    return next(filter(None, (_tried(expression, tuple(names)) for expression in expressions)), None)


@lru_cache(maxsize=256)
def _tried(expression: str, names: tuple[str, ...]) -> str | None:
    if len(expression) > LONGEST:
        return f"is a regular expression of more than {LONGEST:,} characters; write a shorter one"
    if _is_simple(expression):
        return None
    try:
        run_limited(match_all, expression, names, seconds=SECONDS)
    except Stopped as stopped:
        return (
            f"is a regular expression that {stopped} on the names of modules; write it without repeats "
            "inside repeats, or list the endings of module paths instead"
        )
    return None


def _is_simple(expression: str) -> bool:
    """Return whether the expression has at most one repeat besides that of `ending`, so that it cannot take
    long."""
    bare = expression.removeprefix(r"(.*\.)?")
    return len(bare) < 500 and "(?" not in bare and len(REPEATS.findall(bare)) <= 1


def match_all(expression: str, names: Sequence[str]) -> list[bool]:
    """Return for each name whether it matches as a whole. Empty if the expression does not compile, which is
    reported elsewhere."""
    try:
        compiled = re.compile(expression)
    except (re.error, RecursionError, OverflowError):
        return []
    return [compiled.fullmatch(name) is not None for name in names]
