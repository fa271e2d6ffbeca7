"""What a worker has of the base, a stage that stays or several that take turns, and what runs its list."""

from __future__ import annotations

import torch

from weftune.base.host.streamed import StreamedBase
from weftune.base.host.streamed_worker import load_rank
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.plan.program.layout import OnWorker
from weftune.run.workers.stage_executor import StageExecutor
from weftune.run.workers.streamed_executor import RankExecutor
from weftune.run.workers.transport import Transport


def load_part(spec: BaseSpec, device: torch.device, part: OnWorker) -> Base | StreamedBase:
    """A pipeline's worker has one stage, which stays; any other has stages that take turns."""
    if part.layout.pipelined:
        return load_stage(spec, device, part.held(part.worker))
    return load_rank(spec, device, part)


def base_of(loaded: Base | StreamedBase) -> Base:
    """All that is here of it."""
    return loaded.whole if isinstance(loaded, StreamedBase) else loaded


def executor_of(loaded: Base | StreamedBase, transport: Transport, rank: int) -> StageExecutor:
    if isinstance(loaded, StreamedBase):
        return RankExecutor(loaded, transport, rank)
    return StageExecutor(loaded, transport, rank)
