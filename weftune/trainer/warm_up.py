"""Training on random tokens before the first job of a service.

The first passes on a GPU compile kernels, try plans of products and capture graphs. Together this takes ten
seconds or more. A service makes these passes before it is ready, so that its first jobs need not wait for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate

import torch

from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.core.batch import IGNORED, Microbatch, Segment
from weftune.core.shapes import JobShape
from weftune.plan.program.program import ForwardPass, GlobalBatch, MicrobatchPlan, PlacedSample
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window
from weftune.run.events import OutOfMemory
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import Training, new_training
from weftune.trainer.loop import Loop

ROUNDS = 3
"""Number of rounds (one global batch of every job each): a pass is compiled in the first, captured as a graph
in the second and replayed in the third."""


def warm_up(loop: Loop, spec: LoraSpec, shapes: Sequence[JobShape], stop: Callable[[], bool]) -> None:
    """Train one adapter with the settings `spec` for each job in `shapes` on random tokens, in microbatches
    as large as those in real training of these jobs, and detach the adapters. Nothing is written, and results
    of other jobs do not change. A shortage of memory ends the training."""
    executor, memory = loop.executor, loop.fitted_models.memory
    recompute = memory.choose_recompute(shapes, loop.windows.max_tokens)
    capacity = memory.choose_capacity(shapes, loop.windows.max_tokens, recompute)
    pads_to_ladder = executor.captures is not None and not recompute.tile_rows
    windows = [_random_window(shape, capacity // len(shapes)) for shape in shapes]
    program = plan_window(windows, loop.choice.layout, capacity, pads_to_ladder, recompute)
    for window in windows:
        executor.attach(_new_training(loop, JobAdapter(window.job, spec, 0)))
    with suppress(OutOfMemory):
        for _ in executor.run(program, partial(random_microbatch, loop.base.shape.vocabulary), stop):
            pass
    for window in windows:
        executor.detach(window.job)


def _new_training(loop: Loop, adapter: JobAdapter) -> Training:
    base = loop.base
    return new_training(
        adapter,
        Recipe(ROUNDS),
        base.trained_sites,
        base.dtype,
        loop.executor.home,
        base.whole_sites,
        draw_device=base.device,
        frozen=base.weight_reader(),
    )


def _random_window(shape: JobShape, max_tokens: int) -> JobWindow:
    """Return a window (the plan of some global batches) of a job whose batches have as many samples as
    `max_tokens` tokens allow, at least one."""
    length = shape.max_sample_tokens
    count = max(1, max_tokens // length)
    samples = tuple(PlacedSample(index, length, index * length) for index in range(count))
    batches = (GlobalBatch(shape.name, 1 + n, samples, count * (length - 1)) for n in range(ROUNDS))
    return JobWindow(shape.name, 0, tuple(batches), (), frozenset(), frozenset())


def random_microbatch(vocabulary: int, plan: MicrobatchPlan, kind: type[ForwardPass]) -> Microbatch:
    """Return a training microbatch of random tokens with the segments of `plan`. All tokens are
    supervised."""
    samples = [sample for segment in plan.segments for sample in segment.samples]
    lengths = [sample.length for sample in samples]
    stops = list(accumulate(segment.tokens for segment in plan.segments))
    tokens_T = torch.randint(vocabulary, (sum(lengths),))
    targets_T = tokens_T.roll(-1)
    targets_T[torch.tensor(list(accumulate(lengths))) - 1] = IGNORED
    positions = [torch.arange(length) for length in lengths]
    return Microbatch(
        tokens_T=tokens_T,
        positions_T=torch.cat(positions),
        targets_T=targets_T,
        token_index_T=torch.cat([one.offset + own for one, own in zip(samples, positions, strict=True)]),
        sample_lengths=tuple(lengths),
        segments=tuple(
            Segment(segment.job, segment.step, stop - segment.tokens, stop)
            for segment, stop in zip(plan.segments, stops, strict=True)
        ),
    )
