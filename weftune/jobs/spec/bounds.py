"""The numbers of a job and the range of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weftune.jobs.spec.places import Fault, Loc
from weftune.jobs.spec.show import show

ANY = "*"
"""Wildcard for every key of a mapping and every item of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The allowed range of a number. `above` and `below` are exclusive, `least` and `most` inclusive."""

    whole: bool = False
    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    none: bool = False
    """Whether None is allowed as well."""
    share: bool = False
    """Whether a value below 1 is a share of the run and any other a whole number of steps."""
    meaning: str = ""
    """Meaning of the number for error messages; empty if its key says it."""

    def fault(self, value: Any) -> str | None:
        """Return the error message for `value`, or None if it is allowed."""
        if value is None and self.none:
            return None
        got = show(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be a {'whole ' if self.whole else ''}number, got {got}"
        if not _finite(value):
            return f"must be a finite number, got {got}"
        if self.whole and not isinstance(value, int):
            return f"must be a whole number, got {got}"
        return self._range_fault(value, got)

    def _range_fault(self, value: float, got: str) -> str | None:
        if value < self.least:
            return f"must be at least {self.least:g}, got {got}"
        if value <= self.above:
            return f"must be above {self.above:g}, got {got}"
        if value >= self.below:
            meaning = f" ({self.meaning})" if self.meaning else ""
            return f"must be below {self.below:g}{meaning}, got {got}"
        if value > self.most:
            return f"must be at most {self.most:.12g}, got {got}"
        if self.share and value > 1 and value != int(value):
            return f"must be below 1 (a share of the run) or a whole number of steps, got {got}"
        return None


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


MOST = 10**12
"""Upper bound of steps and tokens: far more than anyone trains, and still exact in a float."""
MAX_TRIALS = 1000
"""Maximum number of trials in one sweep: far more than anyone trains, and all of them are checked before the
first starts."""

TOKEN = Bound(whole=True, least=0, most=2**31 - 1)
"""Allowed range of a token id."""

BOUNDS: Mapping[Loc, Bound] = {
    ("adapter", "rank"): Bound(whole=True, least=1, most=65536),
    ("adapter", "alpha"): Bound(above=0),
    ("adapter", "dropout"): Bound(least=0, below=1),
    ("adapter", "loraplus_lr_ratio"): Bound(above=0),
    ("adapter", "d_initial"): Bound(),
    ("adapter", "size"): Bound(whole=True, least=1, most=65536),
    ("adapter", "sparsity"): Bound(above=0, most=1),
    ("adapter", "l0_weight"): Bound(least=0),
    ("adapter", "relaxed"): Bound(above=0, most=MOST, share=True),
    ("adapter", "mask_lr_ratio"): Bound(above=0),
    ("adapter", "num_virtual_tokens"): Bound(whole=True, least=1, most=65536),
    ("adapter", "svd_iterations"): Bound(whole=True, least=0, most=1000, none=True),
    ("adapter", "projection_prng_key"): Bound(whole=True, least=0, most=2**63 - 1),
    ("adapter", "rank_pattern", ANY): Bound(whole=True, least=1, most=65536),
    ("adapter", "alpha_pattern", ANY): Bound(above=0),
    ("data", "path", ANY, "weight"): Bound(above=0, most=1e6),
    ("data", "limit"): Bound(whole=True, least=1, none=True),
    ("data", "max_length"): Bound(whole=True, least=2, most=MOST),
    ("eval", "fraction"): Bound(above=0, below=1, none=True),
    ("eval", "every"): Bound(above=0, most=MOST, none=True, share=True),
    ("epochs",): Bound(above=0, most=1e9, none=True),
    ("steps",): Bound(whole=True, least=1, most=MOST, none=True),
    ("batch_size",): Bound(whole=True, least=1, most=10**9),
    ("learning_rate",): Bound(above=0),
    ("warmup",): Bound(least=0, most=MOST, share=True),
    ("weight_decay",): Bound(least=0),
    ("betas", ANY): Bound(least=0, below=1),
    ("eps",): Bound(above=0, most=1),
    ("clip",): Bound(least=0, none=True),
    ("seed",): Bound(whole=True, least=0, most=2**63 - 1),
    ("priority",): Bound(whole=True, least=-(10**9), most=10**9),
    ("early_stop", "patience"): Bound(whole=True, least=1, most=MOST),
    ("early_stop", "min_delta"): Bound(least=0),
    ("save_every",): Bound(above=0, most=MOST, none=True, share=True),
    ("sweep", "trials"): Bound(whole=True, least=1, most=MAX_TRIALS, none=True),
    ("sweep", "keep"): Bound(whole=True, least=1, most=MAX_TRIALS),
    ("sweep", "halving", "at", ANY): Bound(above=0, below=1, meaning="a share of the steps"),
    ("sweep", "halving", "keep"): Bound(above=0, below=1, meaning="a share of the trials"),
}


def bound_at(loc: Loc) -> Bound | None:
    """Return the allowed range of the number at `loc`; None if no number belongs there."""
    for pattern, bound in BOUNDS.items():
        if len(pattern) == len(loc) and all(
            part in (ANY, own) for part, own in zip(pattern, loc, strict=True)
        ):
            return bound
    return None


def number_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    for pattern, bound in BOUNDS.items():
        for loc, value in _found(values, pattern):
            sentence = bound.fault(value)
            if sentence is not None:
                yield Fault(loc, sentence)


def _found(value: Any, pattern: Loc, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Yield every value that `pattern` matches, with its location; absent keys are skipped."""
    if len(loc) == len(pattern):
        yield loc, value
        return
    part = pattern[len(loc)]
    if isinstance(value, Mapping):
        for key in value if part == ANY else [part] if part in value else []:
            yield from _found(value[key], pattern, (*loc, key))
    elif isinstance(value, list | tuple) and part == ANY:
        for index, item in enumerate(value):
            yield from _found(item, pattern, (*loc, index))
