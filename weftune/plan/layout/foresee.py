"""Prediction of a window's time from a profile of the device. The times of one worker's passes are summed;
several workers are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from weftune.core.shapes import LayerRange
from weftune.plan.cost.prior import DirectionTerms, KindTerms
from weftune.plan.cost.time import (
    CostModel,
    JobShapes,
    PassWork,
    Rate,
    Terms,
    active_parameters_by_job,
    work_of,
)
from weftune.plan.program.layout import Layout
from weftune.plan.program.prices import Link, PassPrice, Prices
from weftune.plan.program.program import ForwardOnly, Program
from weftune.plan.program.simulate import Timeline
from weftune.plan.window.pace import LoadPace, simulate_timeline


def taking_turns(cost: CostModel, terms: DirectionTerms, layout: Layout, layers: int) -> CostModel:
    """Return the cost model for stages that share a device in turn: each stage adds the fixed cost of a pass,
    and the backward of every stage but the last first recomputes its forward."""
    others, recomputed = len(layout.stages) - 1, layers - layout.stages[-1].layer_count
    visit, back = Terms(fixed=terms.forward.embedding.fixed), Terms(fixed=terms.backward.embedding.fixed)
    again = terms.forward.layer.times(recomputed).plus(terms.forward.adapter.times(recomputed / layers))
    return replace(
        cost,
        forward=cost.forward.plus(visit.times(others)),
        backward=cost.backward.plus(again).plus(visit.plus(back).times(others)),
    )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of the parts of a base on each worker."""

    layers: int
    terms: DirectionTerms
    step: Rate
    link: Link | None = None
    """Link between two workers. None means that sending takes no time."""
    output_bytes: int = 0
    """Bytes per token passed from stage to stage."""

    def timeline(
        self, program: Program, layout: Layout, shapes: JobShapes, loads: LoadPace | None = None
    ) -> Timeline:
        """Return the timeline of a window predicted by the simulator."""
        return simulate_timeline(program, self._prices(program, layout, shapes), loads, self.link)

    def _prices(self, program: Program, layout: Layout, shapes: JobShapes) -> Prices:
        held = [LayerRange(stage.start, stage.stop, self.layers) for stage in layout.stages]
        actions = chain.from_iterable(program.devices)
        evaluated = {action.microbatch for action in actions if isinstance(action, ForwardOnly)}
        passes, met = [], active_parameters_by_job(shapes)
        for number, microbatch in enumerate(program.microbatches):
            work = work_of(microbatch, met)
            passes.append(tuple(self._price(one, work, number in evaluated, layout) for one in held))
        jobs = {batch.job for batch in program.batches}
        step = sum(self.step(1, shapes[job].trainable_parameters) for job in jobs) / max(1, len(jobs))
        return Prices(tuple(passes), step=step / layout.workers)

    def _price(self, layer_range: LayerRange, work: PassWork, evaluated: bool, layout: Layout) -> PassPrice:
        handed = self.output_bytes * work.tokens
        if evaluated:
            return PassPrice(self._part_seconds(self.terms.evaluation, layer_range, work), 0.0, handed)
        forward = self._part_seconds(self.terms.forward, layer_range, work)
        backward = self._part_seconds(self.terms.backward, layer_range, work)
        recomputes = not (layout.is_pipeline or layer_range.is_last)
        return PassPrice(forward, backward + forward if recomputes else backward, handed, handed)

    def _part_seconds(self, terms: KindTerms, layer_range: LayerRange, work: PassWork) -> float:
        count = layer_range.stop - layer_range.start
        layers = count * terms.layer(work) + count / self.layers * terms.adapter(work)
        # The fixed cost of a pass is counted with the embedding.
        begins = terms.embedding(work) if layer_range.is_first else terms.embedding.fixed
        return begins + layers + (terms.head(work) if layer_range.is_last else 0.0)
