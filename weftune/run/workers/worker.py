"""Every worker of a pipeline except the first: it loads its part of the base and executes commands one by
one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from weftune.core.deterministic import deterministic_kernels
from weftune.errors import UserError
from weftune.run.events import SaveDue
from weftune.run.measure.memory import begin_peak, limit_bytes, peak_bytes
from weftune.run.parts import delivered
from weftune.run.training import checkpoint
from weftune.run.training.slices import write_slice
from weftune.run.training.snapshot import Snapshot
from weftune.run.training.state import new_training
from weftune.run.workers.groups import Wires
from weftune.run.workers.loaded import base_of, load_part, worker_executor
from weftune.run.workers.messages import (
    Attach,
    Begin,
    Begun,
    Detach,
    End,
    Ended,
    HandedOver,
    KeepBest,
    Orders,
    Refused,
    RunProgram,
    Saved,
    SaveSlice,
    ShowMaster,
    ShowMean,
    Through,
)
from weftune.run.workers.transport import Transport


def serve(wires: Wires, device: torch.device) -> None:
    """Execute commands until the first worker sends `End`."""
    orders = Orders(wires)
    first = orders.take()
    if isinstance(first, End):
        orders.answer(Ended())
        return
    assert isinstance(first, Begin), f"the first command is to begin, not {first}"
    with deterministic_kernels(first.deterministic):
        _serve(wires, orders, first, device)


def _serve(wires: Wires, orders: Orders, first: Begin, device: torch.device) -> None:
    try:
        worker = Worker(wires, orders, first, device)
    except UserError as error:
        orders.answer(Refused(f"worker {wires.place.worker}: {error}"))
        last = orders.take()
        assert isinstance(last, End), f"who refused is sent home, not told {last}"
        orders.answer(Ended())
        return
    orders.answer(Begun())
    worker.obey()


class Worker:
    def __init__(self, wires: Wires, orders: Orders, begin: Begin, device: torch.device) -> None:
        self.place = wires.place
        self.orders = orders
        limit_bytes(device, begin.most)
        loaded = load_part(begin.spec, device, begin.part)
        self.base = base_of(loaded)
        width, dtype = self.base.shape.hidden, self.base.dtype
        self.transport = Transport(wires.lanes, width, dtype, device, begin.delay)
        self.executor, self.agreed = worker_executor(loaded, begin.part, self.transport, self.place.worker)
        self._checkpoints: dict[str, Path] = {}

    def obey(self) -> None:
        while True:
            match self.orders.take():
                case Attach() as attach:
                    self._attach(attach)
                case RunProgram() as run:
                    self._run(run)
                case KeepBest(job):
                    training = self.executor.aboard[job]
                    training.best = training.master.clone()
                case ShowMean(job):
                    self.executor.show_mean(job)
                case ShowMaster(job):
                    self.executor.show_master(job)
                case SaveSlice(job):
                    self._save(job)
                case Detach(job):
                    self._detach(job)
                case End():
                    self.executor.writer.close()
                    self.transport.close()
                    self.orders.answer(Ended())
                    return
                case other:
                    raise AssertionError(f"a worker does not know {other}")

    def _attach(self, attach: Attach) -> None:
        base, job = self.base, attach.adapter.job
        sites = base.shape.sites
        home = self.executor.home
        training = new_training(
            attach.adapter,
            attach.recipe,
            sites,
            base.dtype,
            home,
            base.whole_sites,
            drawn_on=base.device,
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
        begin_peak(self.base.device)
        fetch = delivered(run.program, run.microbatches)
        for event in self.executor.run(run.program, fetch, overdue=self.orders.overdue.is_set):
            assert isinstance(event, SaveDue), f"{event} is the first worker's business"
            self._save(event.job)
        self.transport.settle()
        self.orders.answer(Through(self.agreed.report, peak_bytes(self.base.device)))

    def _save(self, job: str) -> None:
        """Take a snapshot. The first worker is notified when the slice is written, or why it cannot be."""
        self.executor.writer.write(self.executor.snapshot(job), partial(self._write, self._checkpoints[job]))

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write a slice in the writer's thread, and report it."""
        job, step = snapshot.job, snapshot.progress.step
        try:
            self.orders.answer(Saved(job, step, write_slice(folder, snapshot, self.place.worker)))
        except OSError as error:
            self.orders.answer(Saved(job, step, None, error.strerror or str(error)))
        except Exception as error:
            # Otherwise it would not be reported, and the first worker would wait.
            self.orders.answer(Saved(job, step, None, f"{type(error).__name__}: {error}"))
            raise

    def _detach(self, job: str) -> None:
        training = self.executor.detach(job)
        self.executor.writer.wait(job)
        del self._checkpoints[job]
        if self.place.replica > 0:
            # The first replica's workers hold the same weights and return them.
            return
        best = None if training.best is None else training.best.cpu()
        self.orders.answer(HandedOver(job, training.layout, training.master.cpu(), best))
