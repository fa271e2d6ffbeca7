"""A window foreseen with passes that vary as those before it did.

Workers wait for one another: what a slow pass costs is not won back by a quick one, so that even times alone
promise too few bubbles.
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
"""Timelines of one window: what they come to differs little, and each costs as much as a plan's own."""


def timelines_varied(
    program: Program, paces: Sequence[StagePace], loads: LoadPace | None = None, draws: int = DRAWS
) -> list[Timeline]:
    """The same every time: chance is drawn from the same seed."""
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
    """In the order in which they came, from the same moment on for all stages: slow passes come in a row, and
    what slows one stage may slow another."""
    if not spread:
        return repeat(1.0)
    start = int(moment * len(spread))
    return cycle([*spread[start:], *spread[:start]])
