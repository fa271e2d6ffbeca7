"""A scheme's order made from its microbatches, and the least time that it can take."""

from __future__ import annotations

from weft.plan.fit import Layout
from weft.plan.lay import Laid
from weft.plan.pipeline import Passes, alternating_passes, gpipe_passes, multi_job_passes
from weft.plan.price import Link, Prices
from weft.plan.program import Action, Backward, Forward
from weft.plan.scheme import Order
from weft.plan.template import eager_passes

ON_THE_WAY = 4
"""Full microbatches' activations or gradients that a stage of the template may hold to be sent or used."""


def passes_in(order: Order, laid: Laid, layout: Layout) -> Passes:
    work, stages = laid.work, len(layout.stages)
    match order:
        case Order.gpipe:
            return gpipe_passes(work, stages)
        case Order.alternating:
            return alternating_passes(work, stages)
        case Order.multi_job:
            return multi_job_passes(work, stages, laid.prices)
        case Order.template:
            return eager_passes(work, laid.prices, template_room(layout))
    return [
        [action for number in work.filled for action in (Forward(number, stage), Backward(number, stage))]
        for stage in range(stages)
    ]


def template_room(layout: Layout) -> tuple[int, ...]:
    """What microbatches in flight may keep on each stage: all that weights, adapters and transport leave."""
    rooms = []
    for stage, budget in zip(layout.stages, layout.budgets, strict=True):
        fixed = stage.weight_bytes + stage.state_bytes + layout.beside_bytes
        rooms.append(max(stage.kept_bytes, budget - fixed - ON_THE_WAY * stage.activation_bytes))
    return tuple(rooms)


def least_seconds(passes: Passes, prices: Prices, link: Link) -> float:
    """Were no transport ever kept waiting by another: what a simulation takes, or a little less.

    Stage s lives on device s. Made to see in little time which orders are worth simulating.
    """
    clock = _Clock(prices, link, len(passes))
    reached = [0] * len(passes)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(passes):
            while reached[stage] < len(actions) and clock.run(actions[reached[stage]]):
                reached[stage] += 1
                moved = True
    assert reached == [len(actions) for actions in passes], "an order whose devices wait for each other"
    return max(clock.free)


class _Clock:
    """When each pass ends, told as soon as what it waits for is told."""

    def __init__(self, prices: Prices, link: Link, stages: int) -> None:
        self.prices, self.link, self.last = prices, link, stages - 1
        self.free = [0.0] * stages
        self.forth: list[dict[int, float]] = [{} for _ in range(stages)]
        self.back: list[dict[int, float]] = [{} for _ in range(stages)]

    def run(self, action: Action) -> bool:
        """False if what it waits for is not told yet."""
        assert isinstance(action, Forward | Backward)
        number, stage = action.microbatch, action.stage
        forth = isinstance(action, Forward)
        came = self._came_forth(number, stage) if forth else self._came_back(number, stage)
        if came is None:
            return False
        price = self.prices.passes[number][stage]
        self.free[stage] = max(self.free[stage], came) + (price.forward if forth else price.backward)
        (self.forth if forth else self.back)[stage][number] = self.free[stage]
        return True

    def _came_forth(self, number: int, stage: int) -> float | None:
        if stage == 0:
            return 0.0
        made = self.forth[stage - 1].get(number)
        size = self.prices.passes[number][stage - 1].activation_bytes
        return None if made is None else made + self.link.seconds(size)

    def _came_back(self, number: int, stage: int) -> float | None:
        if stage == self.last:
            return self.forth[stage].get(number)
        made = self.back[stage + 1].get(number)
        size = self.prices.passes[number][stage + 1].gradient_bytes
        return None if made is None else made + self.link.seconds(size)
