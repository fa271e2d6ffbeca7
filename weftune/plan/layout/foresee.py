"""What a window takes on a layout by a profile of the device: one worker's passes added up, those of several
simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from weftune.core.shapes import LayerRange
from weftune.plan.cost.prior import Directions, KindTerms
from weftune.plan.cost.time import CostModel, PassWork, Rate, Sizes, work_of
from weftune.plan.program.layout import Layout
from weftune.plan.program.prices import Link, PassPrice, Prices
from weftune.plan.program.program import Evaluate, Program
from weftune.plan.program.timeline import Timeline
from weftune.plan.window.pipeline import LoadPace, timeline_priced


def recomputing(cost: CostModel, forward: KindTerms, layers: int, of: int) -> CostModel:
    """The same where the backward first recomputes the forward of so many layers of the base's."""
    again = forward.layer.times(layers).plus(forward.adapter.times(layers / of))
    return replace(cost, backward=cost.backward.plus(again))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the parts of a base take on each worker."""

    layers: int
    known: Directions
    step: Rate
    link: Link | None = None
    """Between two workers; None: what is sent takes no time."""
    handed_bytes: int = 0
    """Of a token, from stage to stage."""

    def timeline(
        self, program: Program, layout: Layout, sizes: Sizes, loads: LoadPace | None = None
    ) -> Timeline:
        """A window as the simulator foresees it."""
        return timeline_priced(program, self._prices(program, layout, sizes), loads, self.link)

    def _prices(self, program: Program, layout: Layout, sizes: Sizes) -> Prices:
        held = [LayerRange(stage.start, stage.stop, self.layers) for stage in layout.stages]
        actions = chain.from_iterable(program.devices)
        evaluated = {action.microbatch for action in actions if isinstance(action, Evaluate)}
        passes = []
        for number, microbatch in enumerate(program.microbatches):
            work = work_of(microbatch, sizes)
            passes.append(tuple(self._price(one, work, number in evaluated, layout) for one in held))
        jobs = {batch.job for batch in program.batches}
        step = sum(self.step(1, sizes[job]) for job in jobs) / max(1, len(jobs))
        return Prices(tuple(passes), step=step / layout.workers)

    def _price(self, held: LayerRange, work: PassWork, evaluated: bool, layout: Layout) -> PassPrice:
        handed = self.handed_bytes * work.tokens
        if evaluated:
            return PassPrice(self._part(self.known.evaluation, held, work), 0.0, handed)
        forward = self._part(self.known.forward, held, work)
        backward = self._part(self.known.backward, held, work)
        recomputes = not (layout.pipelined or held.last)
        return PassPrice(forward, backward + forward if recomputes else backward, handed, handed)

    def _part(self, terms: KindTerms, held: LayerRange, work: PassWork) -> float:
        count = held.stop - held.start
        layers = count * terms.layer(work) + count / self.layers * terms.adapter(work)
        return (
            layers + (terms.embedding(work) if held.first else 0.0) + (terms.head(work) if held.last else 0.0)
        )
