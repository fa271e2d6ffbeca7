"""A worker's part of the base, the executor that runs its actions of a Program, and the loop in which every
worker of a pipeline except the first executes commands one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weftune.base.host.streamed import StreamedBase, load_streamed
from weftune.base.model import Base
from weftune.base.shards import load_shard
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.core.deterministic import deterministic_kernels
from weftune.core.shards import ShardTeam, WaitForSum
from weftune.errors import UserError
from weftune.plan.program.layout import WorkerLayout
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.events import SaveDue
from weftune.run.executor import Executor
from weftune.run.measure.memory import peak_bytes, reset_peak, set_memory_limit
from weftune.run.measure.timers import ActionTimer
from weftune.run.parts import AdapterState, fetch_from
from weftune.run.shards import Shards
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import write_slice
from weftune.run.training.snapshot import Snapshot, weights_snapshot
from weftune.run.training.state import new_training
from weftune.run.training.writer import Unsaved
from weftune.run.workers.agreed import Agreed
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
)
from weftune.run.workers.transport import Transport


def shard_team(connections: WorkerConnections) -> ShardTeam | None:
    """Return the workers that divide every layer of this worker's stage into shards, as a `ShardTeam`. None
    if layers are not divided."""
    group, position = connections.shard_group, connections.position
    if group is None:
        return None

    @contextmanager
    def reports_lost_shard() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"a shard beside worker {position.worker} is gone: {error}") from error

    def sum_over_shards(tensor: Tensor) -> None:
        with reports_lost_shard():
            dist.all_reduce(tensor, group=group)

    def start_sum(tensor: Tensor) -> WaitForSum:
        with reports_lost_shard():
            under_way = dist.all_reduce(tensor, group=group, async_op=True)

        def wait() -> None:
            with reports_lost_shard():
                under_way.wait()

        return wait

    is_capturable = dist.get_backend(group) == "nccl"
    return ShardTeam(position.shard, position.shards, sum_over_shards, is_capturable, start_sum)


def load_part(
    spec: BaseSpec, device: torch.device, part: WorkerLayout, team: ShardTeam | None = None
) -> Base | StreamedBase:
    """Load a worker's part of the base: one resident stage of a pipeline, streamed stages that take turns on
    the device, or a shard of either."""
    if not part.layout.is_pipeline:
        return load_streamed(spec, device, part.layout, worker=part.worker, team=team)
    if team is not None:
        return load_shard(spec, device, team, part.stage_range(part.worker))
    return load_stage(spec, device, part.stage_range(part.worker))


def loaded_base(loaded_part: Base | StreamedBase) -> Base:
    """Return the base model of a worker's part, which is either resident on the device or streamed."""
    return loaded_part.whole if isinstance(loaded_part, StreamedBase) else loaded_part


def worker_executor(
    loaded_part: Base | StreamedBase,
    part: WorkerLayout,
    transport: Transport,
    worker: int,
    team: ShardTeam | None = None,
) -> tuple[Executor, Agreed]:
    """Return the executor that runs the list of actions with the index `worker` in a Program, and its
    agreement with the other workers on optimizer steps."""

    def make_agreement(adapters: AdapterState, timer: ActionTimer, shards: Shards | None) -> Agreed:
        return Agreed(adapters, timer, transport, worker, shards)

    if isinstance(loaded_part, StreamedBase):
        executor = streamed_executor(loaded_part, worker=worker, make_agreement=make_agreement, team=team)
    else:
        executor = resident_executor(
            loaded_part,
            part=part,
            worker=worker,
            make_agreement=make_agreement,
            captures_early=False,
            team=team,
            # Only fused layers can run one half at a time.
            fuses_layers=part.layout.overlaps or None,
        )
    assert isinstance(executor.agreement, Agreed)
    return executor, executor.agreement


def serve(connections: WorkerConnections, device: torch.device) -> None:
    """Execute the first worker's commands until it sends `End`."""
    receiver = CommandReceiver(connections)
    first = receiver.next_command()
    if isinstance(first, End):
        receiver.answer(Ended())
        return
    assert isinstance(first, Begin), f"the first command is to begin, not {first}"
    with deterministic_kernels(first.deterministic):
        try:
            worker = Worker(connections, receiver, first, device)
        except UserError as error:
            receiver.answer(Begun(refusal=f"worker {connections.position.worker}: {error}"))
            last = receiver.next_command()
            assert isinstance(last, End), f"a worker that refused is dismissed, and not sent {last}"
            receiver.answer(Ended())
            return
        receiver.answer(Begun())
        worker.run_commands()


class Worker:
    def __init__(
        self, connections: WorkerConnections, receiver: CommandReceiver, begin: Begin, device: torch.device
    ) -> None:
        self.position = connections.position
        self.receiver = receiver
        set_memory_limit(device, begin.max_bytes)
        team = shard_team(connections)
        loaded = load_part(begin.spec, device, begin.part, team)
        self.base = loaded_base(loaded)
        width, dtype = self.base.shape.hidden, self.base.dtype
        self.transport = Transport(connections, width, dtype, device, begin.delay)
        self.executor, self.agreed = worker_executor(
            loaded, begin.part, self.transport, self.position.list_index, team
        )
        self._checkpoints: dict[str, Path] = {}

    def run_commands(self) -> None:
        while True:
            match self.receiver.next_command():
                case Attach() as attach:
                    self._attach(attach)
                case RunProgram() as run:
                    self._run(run)
                case JobCommand("keep best", job):
                    training = self.executor.attached[job]
                    training.best_weights = training.master.clone()
                case JobCommand("show mean", job):
                    self.executor.use_mean_weights(job)
                case JobCommand("show master", job):
                    self.executor.use_latest_weights(job)
                case JobCommand("save slice", job):
                    self._save(job)
                case JobCommand("detach", job):
                    self._detach(job)
                case End():
                    self.executor.writer.close()
                    self.transport.close()
                    self.receiver.answer(Ended())
                    return
                case other:
                    raise AssertionError(f"a worker does not know {other}")

    def _attach(self, attach: Attach) -> None:
        base, job = self.base, attach.adapter.job
        sites = base.trained_sites
        home = self.executor.home
        training = new_training(
            attach.adapter,
            attach.recipe,
            sites,
            base.dtype,
            home,
            base.whole_sites,
            draw_device=base.device,
            frozen=base.weight_reader(),
            is_restored=attach.resumes,
        )
        if attach.resumes:
            found = checkpoint.restore(attach.checkpoints, training)
            assert found, f"the checkpoint of {job} that the first worker found is not here"
        self.executor.attach(training)
        self._checkpoints[job] = attach.checkpoints

    def _run(self, run: RunProgram) -> None:
        # The peak of this window, as the first worker reports its own; not that of loading.
        reset_peak(self.base.device)
        fetch = fetch_from(run.program, run.microbatches)
        for event in self.executor.run(run.program, fetch, is_overdue=self.receiver.stop_requested.is_set):
            # A shard of the first stage decides like the first worker, which reports the Steps of both.
            if isinstance(event, SaveDue) and self.position.writes_checkpoints:
                self._save(event.job)
            assert isinstance(event, SaveDue) or self.position.list_index == 0, f"{event} is not for a worker"
        self.transport.flush()
        report = self.agreed.report
        report.peak_bytes = peak_bytes(self.base.device)
        self.receiver.answer(report)

    def _save(self, job: str) -> None:
        """Take a snapshot of the job, and write it as this worker's file (slice) of the checkpoint. A message
        to the first worker says when the slice is written, or why that is not possible."""
        self.executor.writer.write(self.executor.snapshot(job), partial(self._write, self._checkpoints[job]))

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write this worker's file (slice) of a job's checkpoint, and report it to the first worker. Called
        in a thread of the writer."""
        job, step = snapshot.job, snapshot.progress.step
        try:
            self.receiver.answer(write_slice(folder, snapshot, self.position.worker))
        except OSError as error:
            self.receiver.answer(Unsaved(job, step, error.strerror or str(error)))
        except Exception as error:
            # Otherwise it would not be reported, and the first worker would wait.
            self.receiver.answer(Unsaved(job, step, f"{type(error).__name__}: {error}"))
            raise

    def _detach(self, job: str) -> None:
        training = self.executor.detach(job)
        self.executor.writer.wait(job)
        del self._checkpoints[job]
        if self.position.writes_checkpoints:
            self.receiver.answer(weights_snapshot(training))
