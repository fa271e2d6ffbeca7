"""The workers that hold each layer of a base together. All run the same Program; only their numbers differ.

The first worker commands the others, as in a pipeline, but collects nothing from them: each has the whole
training state of every job, and comes to the same decisions (`run/alone.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weftune.base.model import Base
from weftune.base.shards import ShardTeam, load_shard
from weftune.base.spec import BaseSpec
from weftune.errors import UserError
from weftune.plan.program.layout import Layout
from weftune.plan.program.program import Program
from weftune.run.assemble import resident_executor
from weftune.run.events import Event
from weftune.run.measure.memory import set_memory_limit
from weftune.run.parts import Fetch, delivered
from weftune.run.training import checkpoint
from weftune.run.training.state import Training, new_training
from weftune.run.training.writer import Unsaved
from weftune.run.workers.groups import WorkerConnections
from weftune.run.workers.mailbox import PeerLost
from weftune.run.workers.messages import (
    Attach,
    Begin,
    Begun,
    CommandReceiver,
    End,
    Ended,
    JobCommand,
    RunProgram,
    WorkerControl,
)


def shard_team(connections: WorkerConnections) -> ShardTeam:
    """Return the workers that hold this worker's layers together, with the sum over their process group."""
    group, position = connections.shard_group, connections.position
    assert group is not None, "the layers are not divided"

    def sum_over_shards(tensor: Tensor) -> None:
        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            raise PeerLost(f"a shard beside worker {position.worker} is gone: {error}") from error

    return ShardTeam(position.shard, position.shards, sum_over_shards)


class ShardDriver:
    """The first shard. Its caller uses it like any other executor; the other shards run the same commands."""

    def __init__(
        self, control: WorkerControl, base: Base, layout: Layout, checkpoints: Callable[[str], Path]
    ) -> None:
        """`checkpoints` returns the folder of each job's checkpoints, the same for every worker."""
        self.control, self.base, self._checkpoints = control, base, checkpoints
        self._own = resident_executor(base, part=layout.for_worker(0), team=shard_team(control.connections))
        self.attached, self.dead = self._own.attached, self._own.dead
        self.home, self.fused, self.writer = self._own.home, self._own.fused, self._own.writer
        self.captures = self._own.captures

    def attach(self, training: Training) -> None:
        folder = self._checkpoints(training.job)
        resumes = checkpoint.newest_progress(folder) is not None
        self.control.broadcast(Attach(training.adapter, training.recipe, folder, resumes))
        self._own.attach(training)

    def detach(self, job: str) -> Training:
        self.control.broadcast(JobCommand("detach", job))
        return self._own.detach(job)

    def kill(self, job: str) -> None:
        """Mark a job dead; the other shards are told before the next Step."""
        self._own.kill(job)

    def note_evaluation(self, *given: Any, **named: Any) -> None:
        self._own.note_evaluation(*given, **named)

    def show_mean(self, job: str) -> None:
        self.control.broadcast(JobCommand("show mean", job))
        self._own.show_mean(job)

    def show_master(self, job: str) -> None:
        self.control.broadcast(JobCommand("show master", job))
        self._own.show_master(job)

    def run(self, program: Program, fetch: Fetch, stop: Callable[[], bool]) -> Iterator[Event]:
        """Run a window on all shards. A window that has begun is finished, even if `stop` returns True: no
        shard may compute less than the others."""
        kinds = program.pass_kinds()
        microbatches = {
            number: fetch(plan, kinds[number])
            for number, plan in enumerate(program.microbatches)
            if plan.segments
        }
        self.control.broadcast(RunProgram(program, microbatches))
        yield from self._own.run(program, delivered(program, microbatches))

    def save(self, job: str, folder: Path) -> None:
        self._own.save(job, folder)

    def save_now(self, job: str, folder: Path) -> None:
        self._own.save_now(job, folder)

    def unsaved(self) -> list[Unsaved]:
        return self._own.unsaved()

    def finish_saves(self, job: str) -> None:
        self._own.finish_saves(job)

    def restore_base(self) -> None:
        self._own.restore_base()


def open_shards(
    control: WorkerControl,
    spec: BaseSpec,
    device: torch.device,
    layout: Layout,
    checkpoints: Callable[[str], Path],
    max_bytes: int | None = None,
    deterministic: bool = False,
) -> ShardDriver:
    """Load every shard of the base, and wait for all. No shard uses more than `max_bytes` of its GPU."""
    for worker in control.workers:
        control.command(worker, Begin(spec, layout.for_worker(0), 0.0, max_bytes, deterministic))
    set_memory_limit(device, max_bytes)
    connections = control.connections
    base = load_shard(spec, device, shard_team(connections))
    for _ in control.workers:
        _, answer = control.wait()
        assert isinstance(answer, Begun), f"{answer} came where a shard was to be loaded"
        if answer.refusal:
            raise UserError(answer.refusal)
    return ShardDriver(control, base, layout, checkpoints)


class ShardWorker:
    """Any shard but the first: it executes commands one by one."""

    def __init__(
        self, connections: WorkerConnections, receiver: CommandReceiver, begin: Begin, device: torch.device
    ) -> None:
        set_memory_limit(device, begin.max_bytes)
        self.receiver = receiver
        team = shard_team(connections)
        self.base = load_shard(begin.spec, device, team)
        self.executor = resident_executor(self.base, part=begin.part, team=team)

    def run_commands(self) -> None:
        while True:
            match self.receiver.next_command():
                case Attach() as attach:
                    self._attach(attach)
                case RunProgram(program, microbatches):
                    # The first shard reports the same events.
                    for _ in self.executor.run(program, delivered(program, microbatches)):
                        pass
                case JobCommand("show mean", job):
                    self.executor.show_mean(job)
                case JobCommand("show master", job):
                    self.executor.show_master(job)
                case JobCommand("detach", job):
                    self.executor.detach(job)
                case End():
                    self.executor.writer.close()
                    self.receiver.answer(Ended())
                    return
                case other:
                    raise AssertionError(f"a shard does not know {other}")

    def _attach(self, attach: Attach) -> None:
        base = self.base
        training = new_training(
            attach.adapter,
            attach.recipe,
            base.trained_sites,
            base.dtype,
            self.executor.home,
            drawn_on=base.device,
            frozen=base.weight_reader(),
            is_restored=attach.resumes,
        )
        if attach.resumes:
            found = checkpoint.restore(attach.checkpoints, training)
            assert found, f"the checkpoint of {training.job} that the first worker found is not here"
        self.executor.attach(training)
