"""What the next window does, from records of the jobs aboard: the only planner that a run asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.pack.segments import rung
from weftune.plan.program.layout import Layout
from weftune.plan.program.program import Forward, Program
from weftune.plan.program.recompute import NOTHING, Recompute
from weftune.plan.window.pipeline import PipelineOrder, PipelineRules, StagePace, plan_pipeline
from weftune.plan.window.rounds import Course, plan_rounds


@dataclass(frozen=True, slots=True)
class Pacing:
    """What is known of the stages of a pipeline, so that microbatches follow one another without waiting."""

    paces: tuple[StagePace, ...]
    """One for each stage."""
    order: PipelineOrder | None = None
    """None: the one that the simulator finds fastest."""
    spare: int = 0
    """Microbatches in flight on all stages but the last beyond what 1F1B has."""


def plan_window(
    courses: Sequence[Course],
    layout: Layout,
    capacity: int,
    ladder: bool = False,
    recompute: Recompute = NOTHING,
    pacing: Pacing | None = None,
) -> Program:
    """Train the courses' batches in a layout, in microbatches of at most `capacity` tokens.

    With a `ladder`, training passes keep to few sizes, as captured ones want it. With `pacing`, stages that
    stay on their workers are kept busy by several microbatches at once; without, all microbatches of a round
    go through one stage after another. The result is checked before it is given out.
    """
    if pacing is None:
        return plan_rounds(courses, layout, capacity, ladder, recompute)
    assert layout.pipelined, "only the stages of a pipeline have paces of their own"
    assert len(pacing.paces) == len(layout.stages), "a pace for every stage"
    rules = PipelineRules(
        capacity, pacing.paces, pacing.order, recompute, spare=pacing.spare, replicas=layout.replicas
    )
    program = plan_pipeline(courses, rules)
    return _on_ladder(program, capacity) if ladder else program


def _on_ladder(program: Program, capacity: int) -> Program:
    """The same with each microbatch that is trained padded to a rung."""
    trained = {action.microbatch for action, _ in program.compute() if isinstance(action, Forward)}
    return replace(
        program,
        microbatches=tuple(
            replace(plan, rung=min(rung(plan.tokens), capacity)) if number in trained else plan
            for number, plan in enumerate(program.microbatches)
        ),
    )
