"""The planner of the next window (a few global batches of every job), for every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.pack.best import BEST_FIT_ONLY, LIMITS, Limits
from weftune.plan.pack.segments import ladder_size
from weftune.plan.program.handover import FINISHED, Unfinished
from weftune.plan.program.layout import Layout
from weftune.plan.program.program import NOTHING, Forward, Program, Recompute
from weftune.plan.window.pace import StagePace
from weftune.plan.window.pipeline import PipelineOrder, PipelineRules, plan_pipeline
from weftune.plan.window.rounds import JobWindow, plan_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """Optional mechanisms of planning windows (a few global batches of every job each), such as cutting long
    samples into chunks. Each can be disabled to compare plans; none changes the results of training."""

    order: PipelineOrder | None = None
    """Schedule of a pipeline. None selects the one that is fastest in the simulator."""
    searches_groups: bool = True
    """Whether divisions of a pipeline's jobs into groups are compared by simulated time. Otherwise a formula
    divides them."""
    exchanges_samples: bool = True
    """Whether samples are exchanged between microbatches after best fit, to reduce the number of
    microbatches."""
    hands_over: bool = True
    """Whether a window of a pipeline may leave global batches unfinished, which the next window then
    finishes."""
    cuts_samples: bool = True
    """Whether long samples may be cut into chunks that fill a pipeline."""

    @property
    def packing_limits(self) -> Limits:
        return LIMITS if self.exchanges_samples else BEST_FIT_ONLY


ALL_MECHANISMS = Mechanisms()


@dataclass(frozen=True, slots=True)
class Pacing:
    """Options for planning a pipeline, in which several microbatches are in flight."""

    paces: tuple[StagePace, ...]
    """Speed of each stage: the time of its passes as a function of their rows."""
    order: PipelineOrder | None = None
    """Schedule of the pipeline. None selects the one that is fastest in the simulator."""
    spare_microbatches: int = 0
    """Number of microbatches in flight in addition to those of the 1F1B schedule, on all stages but the
    last."""
    min_chunk_rows: int = 0
    """Minimum rows of the chunks into which long samples may be cut. 0 means that samples stay whole."""
    min_rows: int = 0
    """Smallest maximum of rows per microbatch that the planner tries, since smaller microbatches may fill the
    pipeline better. 0 means a quarter of the capacity."""
    searches_groups: bool = True
    """Whether divisions of the jobs into groups are compared by simulated time. Otherwise a formula divides
    them."""
    hands_over: bool = False
    """Whether a window may leave global batches unfinished, so that the pipeline does not drain before the
    next window."""


def plan_window(
    windows: Sequence[JobWindow],
    layout: Layout,
    capacity: int,
    pads_to_ladder: bool = False,
    recompute: Recompute = NOTHING,
    pacing: Pacing | None = None,
    inherited: Unfinished = FINISHED,
    packing_limits: Limits = LIMITS,
) -> Program:
    """Return a checked program that trains the jobs' batches, with at most `capacity` tokens per microbatch.

    With `pads_to_ladder`, training microbatches are padded to few sizes, as captured CUDA graphs require.
    With `pacing`, resident stages run as a pipeline with several microbatches in flight; without it, all
    microbatches of a round (one global batch of every job) pass one stage before the next stage begins. A
    pipeline begins with the batches that are `inherited` from the previous window. `packing_limits` bound the
    effort of packing training samples.
    """
    if pacing is None:
        assert not inherited.batches, "only a pipeline has unfinished batches between two windows"
        return plan_rounds(windows, layout, capacity, pads_to_ladder, recompute, packing_limits)
    assert layout.is_pipeline, "only the stages of a pipeline have paces of their own"
    assert len(pacing.paces) == len(layout.stages), "a pace for every stage"
    rules = PipelineRules(
        capacity,
        pacing.paces,
        pacing.order,
        recompute,
        spare_microbatches=pacing.spare_microbatches,
        replicas=layout.replicas,
        min_chunk_rows=pacing.min_chunk_rows,
        # Layers that are recomputed or run in tiles do not overlap.
        overlapped_layers=layout.layers if layout.overlaps and recompute == NOTHING else 0,
        min_rows=pacing.min_rows,
        searches_groups=pacing.searches_groups,
        packing_limits=packing_limits,
    )
    program = plan_pipeline(windows, rules, inherited, pacing.hands_over)
    return _pad_to_ladder(program, capacity) if pads_to_ladder else program


def _pad_to_ladder(program: Program, capacity: int) -> Program:
    """Return the program with training microbatches padded to the few allowed sizes (see `ladder_size`).
    Chunks of samples are not padded, since their passes are not captured as CUDA graphs, and microbatches
    inherited from the previous window are padded already."""
    trained = {action.microbatch for action, _ in program.forward_passes() if isinstance(action, Forward)}
    padded = trained.difference(range(len(program.inherited)))
    return replace(
        program,
        microbatches=tuple(
            replace(plan, padded_rows=min(ladder_size(plan.tokens), capacity))
            if number in padded and plan.chunk is None
            else plan
            for number, plan in enumerate(program.microbatches)
        ),
    )
