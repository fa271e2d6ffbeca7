"""Order of a scheme's microbatches, and a lower bound of its time."""

from __future__ import annotations

from collections.abc import Sequence

from weftune.plan.cost.memory import ON_THE_WAY
from weftune.plan.program.prices import Link, Prices
from weftune.plan.program.program import Action, Backward, Forward
from weftune.plan.studies.fit import Placement
from weftune.plan.studies.priced import PricedWork
from weftune.plan.studies.scheme import SchemeOrder
from weftune.plan.window.orders import (
    Passes,
    alternating_passes,
    eager_passes,
    gpipe_passes,
    multi_job_passes,
)


def passes_in(order: SchemeOrder, laid: PricedWork, layout: Placement) -> Passes:
    work, stages = laid.work, len(layout.stages)
    match order:
        case SchemeOrder.gpipe:
            return gpipe_passes(work, stages)
        case SchemeOrder.alternating:
            return alternating_passes(work, stages)
        case SchemeOrder.multi_job:
            return multi_job_passes(work, stages, laid.prices)
        case SchemeOrder.template:
            return eager_passes(work, laid.prices, template_room(layout))


def template_room(layout: Placement) -> tuple[int, ...]:
    """Return the bytes that microbatches in flight may keep on each stage: all that weights, adapters and
    transport leave."""
    rooms = []
    for stage, budget in zip(layout.stages, layout.budgets, strict=True):
        fixed = stage.weight_bytes + stage.state_bytes + layout.beside_bytes
        rooms.append(max(stage.kept_bytes, budget - fixed - ON_THE_WAY * stage.activation_bytes))
    return tuple(rooms)


def least_seconds(passes: Passes, prices: Prices, link: Link) -> float:
    """Return a lower bound of a simulation's seconds, exact if no transfer waits for another.

    Stage s is on device s. This is a fast way to find the orders that are worth simulating.
    """
    clock = _Clock(prices, link, len(passes))
    reached = [0] * len(passes)
    sweep, moved = list(range(len(passes))), True
    while moved:
        before = list(reached)
        for stage in sweep:
            reached[stage] = clock.run(stage, passes[stage], reached[stage])
        moved = reached != before
        # Forward times propagate down the stages, backward times up.
        sweep.reverse()
    assert reached == [len(actions) for actions in passes], "an order whose devices wait for each other"
    return max(clock.free)


class _Clock:
    """Arrival times of each pass's result, computed as soon as those of its inputs are known."""

    def __init__(self, prices: Prices, link: Link, stages: int) -> None:
        self.prices, self.link, self.last = prices, link, stages - 1
        self.free = [0.0] * stages
        self.forwards: list[dict[int, float]] = [{} for _ in range(stages)]
        """Microbatch → arrival time, for each receiving stage; the last stage receives its own results."""
        self.back: list[dict[int, float]] = [{} for _ in range(stages)]

    def run(self, stage: int, actions: Sequence[Action], start: int) -> int:
        """Advance from `start` to the first action whose input time is unknown; return its index."""
        forwards, back, free = self.forwards[stage], self.back[stage], self.free[stage]
        prices, link = self.prices.passes, self.link
        for place in range(start, len(actions)):
            action = actions[place]
            assert isinstance(action, Forward | Backward)
            number, price = action.microbatch, prices[action.microbatch][stage]
            goes_forward = isinstance(action, Forward)
            came = 0.0 if goes_forward and not stage else (forwards if goes_forward else back).get(number)
            if came is None:
                self.free[stage] = free
                return place
            free = max(free, came) + (price.forward if goes_forward else price.backward)
            if not goes_forward:
                if stage:
                    self.back[stage - 1][number] = free + link.seconds(price.gradient_bytes)
            elif stage == self.last:
                back[number] = free
            else:
                self.forwards[stage + 1][number] = free + link.seconds(price.activation_bytes)
        self.free[stage] = free
        return len(actions)
