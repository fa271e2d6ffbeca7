"""The least time of each launch at a site: its bytes at the rate of a copy, or its arithmetic at the rate of
the frozen product, whichever takes longer.

Counted are the values that a launch has to read and write once, and of the ranks only those that jobs own.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.site_case import SiteAdapters

HALF, FULL = 2, 4
"""Bytes of a value of 16 and of 32 bits."""
ROUTES = {
    "wide": ("down", "xWt in float32", "up", "ds, dB", "dA", "add gradients", "dyW in float32", "add dx"),
    "wide, beside": ("down", "xWt in float32", "up", "ds", "dyW in float32", "add dx"),
    "fused": ("down", "y fused", "ds, dB", "dA", "add gradients", "dx fused"),
    "fused, beside": ("down", "y fused", "ds", "dx fused"),
}
"""The launches that an order makes of a forward and a backward, without those beside others."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The device at its best here: operations a microsecond of the frozen product, bytes of a copy."""

    operations: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Need:
    bytes: float
    operations: float = 0.0

    def at(self, rates: Rates) -> float:
        return max(self.bytes / rates.bytes, self.operations / rates.operations)


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a launch, and the least that its bytes and its arithmetic need."""

    measured: float
    floor: float


def needs(adapters: SiteAdapters, features: int, outputs: int, shares: int) -> dict[str, Need]:
    """What each launch must move and multiply, with ds in so many shares."""
    x, y = HALF * adapters.rows * features, HALF * adapters.rows * outputs
    full_x, full_y = FULL * adapters.rows * features, FULL * adapters.rows * outputs
    ranks = sum(adapters.ranks)
    values = ranks * adapters.rows // len(adapters.ranks)
    s, a, b = HALF * values, HALF * ranks * features, HALF * ranks * outputs
    # The accumulators of dA and dB are read and written in 32 bits.
    da, db = 2 * FULL * ranks * features, 2 * FULL * ranks * outputs
    weight, product = HALF * features * outputs, 2.0 * adapters.rows * features * outputs
    narrow, wide = 2.0 * values * features, 2.0 * values * outputs
    return {
        "y = xWt": Need(x + weight + y, product),
        "xWt in float32": Need(x + weight + full_y, product),
        "dx = dyW": Need(y + weight + x, product),
        "dyW in float32": Need(y + weight + full_x, product),
        "down": Need(x + a + s, narrow),
        "up": Need(full_y + s + b + y, wide),
        "ds, dB": Need(y + 2 * s + b + db, 2 * wide),
        "ds": Need(y + s + b, wide),
        "dB": Need(y + s + db, wide),
        "sum of ds": Need(shares * FULL * values + s),
        "dA": Need(x + s + da, narrow),
        "add dx": Need(full_x + s + a + x, narrow),
        "add gradients": Need(0.0),
        "y fused": Need(x + weight + y + s + b, product + wide),
        "y fused, nobody": Need(x + weight + y, product),
        "dx fused": Need(y + weight + x + s + a, product + narrow),
        "dx fused, nobody": Need(y + weight + x, product),
        "copy of x": Need(2 * x),
    }


def beside_floors(
    measured: Mapping[str, float], needed: Mapping[str, Need], rates: Rates
) -> dict[str, Timed]:
    """Every launch, and what those of each order that was measured come to together."""
    found = {name: Timed(time, needed[name].at(rates)) for name, time in measured.items()}
    for order, names in ROUTES.items():
        if set(names) <= set(measured):
            launches = [found[name] for name in names]
            found[f"all of {order}"] = Timed(
                sum(one.measured for one in launches), sum(one.floor for one in launches)
            )
    return found
