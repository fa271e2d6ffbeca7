"""Prediction of a window with passes that vary as earlier passes did.

Workers wait for one another: time lost by a slow pass is not regained by a quick one, so even times alone
predict too few bubbles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, repeat
from random import Random

from weftune.plan.program.prices import Prices
from weftune.plan.program.program import Backward, Compute, Program
from weftune.plan.program.timeline import Timeline
from weftune.plan.window.pipeline import LoadPace, StagePace, pace_prices, timeline_priced

DRAWS = 4
"""Number of timelines per window: their results differ little, and each costs as much as a plan's own."""


def timelines_varied(
    program: Program, paces: Sequence[StagePace], loads: LoadPace | None = None, draws: int = DRAWS
) -> list[Timeline]:
    """Return timelines with randomly varied passes. The result is always the same: the seed is fixed."""
    prices, drawn = pace_prices(program.microbatches, paces), Random(0)
    return [timeline_priced(program, _varied(program, prices, paces, drawn), loads) for _ in range(draws)]


def _varied(program: Program, prices: Prices, paces: Sequence[StagePace], drawn: Random) -> Prices:
    passes = [list(row) for row in prices.passes]
    moment = drawn.random()
    for actions in program.devices:
        factors = [_factors(pace.spread, moment) for pace in paces]
        for action in actions:
            if isinstance(action, Compute):
                price, factor = passes[action.microbatch][action.stage], next(factors[action.stage])
                passes[action.microbatch][action.stage] = (
                    replace(price, backward=price.backward * factor)
                    if isinstance(action, Backward)
                    else replace(price, forward=price.forward * factor)
                )
    return replace(prices, passes=tuple(tuple(row) for row in passes))


def _factors(spread: Sequence[float], moment: float) -> Iterator[float]:
    """Return the factors in the order in which they were recorded, from the same moment on for all stages:
    slow passes come in a row, and what slows one stage may slow another."""
    if not spread:
        return repeat(1.0)
    start = int(moment * len(spread))
    return cycle([*spread[start:], *spread[:start]])
