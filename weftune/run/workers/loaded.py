"""A worker's part of the base (one resident stage, or several that take turns) and the executor that runs its
list."""

from __future__ import annotations

import torch

from weftune.base.host.streamed import StreamedBase, load_streamed
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.plan.program.layout import OnWorker
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.executor import Executor
from weftune.run.measure.timers import ActionTimer
from weftune.run.parts import AdapterState
from weftune.run.training.roster import Roster
from weftune.run.workers.agreed import Agreed
from weftune.run.workers.transport import Transport


def load_part(spec: BaseSpec, device: torch.device, part: OnWorker) -> Base | StreamedBase:
    """Load a worker's part: in a pipeline one resident stage, otherwise stages that take turns."""
    if part.layout.pipelined:
        return load_stage(spec, device, part.held(part.worker))
    return load_streamed(spec, device, part.layout, worker=part.worker)


def base_of(loaded: Base | StreamedBase) -> Base:
    """Return the base of a loaded part."""
    return loaded.whole if isinstance(loaded, StreamedBase) else loaded


def worker_executor(
    loaded: Base | StreamedBase, part: OnWorker, transport: Transport, worker: int
) -> tuple[Executor, Agreed]:
    """Return the executor of the worker with this number, and its side of the agreement with the others."""
    sides: list[Agreed] = []

    def agrees(roster: Roster, adapters: AdapterState, timer: ActionTimer) -> Agreed:
        sides.append(Agreed(roster, adapters, timer, transport, worker))
        return sides[0]

    if isinstance(loaded, StreamedBase):
        return streamed_executor(loaded, worker=worker, agrees=agrees), sides[0]
    return resident_executor(loaded, part=part, worker=worker, agrees=agrees, at_once=False), sides[0]
