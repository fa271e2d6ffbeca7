"""What a rank has of the base, a stage that stays or several that take turns, and what runs its list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.base.streamed import StreamedBase
from weftune.base.streamed_rank import load_rank
from weftune.core.shapes import LayerRange
from weftune.plan.program.worker_cut import RankCut
from weftune.run.workers.stage_executor import StageExecutor
from weftune.run.workers.streamed_executor import RankExecutor
from weftune.run.workers.transport import Transport

Held = LayerRange | RankCut


def load_held(spec: BaseSpec, device: torch.device, held: Held) -> Base | StreamedBase:
    return load_rank(spec, device, held) if isinstance(held, RankCut) else load_stage(spec, device, held)


def base_of(loaded: Base | StreamedBase) -> Base:
    """All that is here of it."""
    return loaded.whole if isinstance(loaded, StreamedBase) else loaded


def executor_of(loaded: Base | StreamedBase, transport: Transport, rank: int) -> StageExecutor:
    if isinstance(loaded, StreamedBase):
        return RankExecutor(loaded, transport, rank)
    return StageExecutor(loaded, transport, rank)


def stage_layers(held: Sequence[Held]) -> list[int]:
    """Of every stage, from what every rank has."""
    if isinstance(held[0], RankCut):
        return [stage.stop - stage.start for stage in held[0].stages]
    return [one.stop - one.start for one in held if isinstance(one, LayerRange)]
