"""Jobs prepared and attached to an executor, without the training loop around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests import bench
from weftune import JobSpec
from weftune.adapters.kind import JobAdapter
from weftune.base.model import Base
from weftune.core.files import cache_folder
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import MicrobatchPlan, Program
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Event
from weftune.run.executor import Executor
from weftune.run.parts import Activations
from weftune.run.passes.rows import DeviceMicrobatch, InFlight, TimedPass
from weftune.run.training.state import Training, new_training
from weftune.trainer.job import PreparedJob, collate_plan, prepare_job


def prepare(base: Base, name: str, **keys: Any) -> PreparedJob:
    settings = {"steps": 8, "batch_size": 3, "learning_rate": 1e-2, "seed": 1, "adapter": {"rank": 4}} | keys
    settings.setdefault("data", bench.rows(bench.samples(12, seed=settings["seed"])))
    return prepare_job(JobSpec(name=name, **settings), 0, bench.tokenizer(), base.shape, cache_folder())


def job_training(base: Base, job: PreparedJob) -> Training:
    adapter = JobAdapter(job.name, job.spec.adapter, job.spec.seed)
    return new_training(adapter, job.recipe, base.shape.sites, base.dtype, base.device)


def executor_with(base: Base, jobs: Sequence[PreparedJob], route: Route = Route.segmented) -> Executor:
    executor = resident_executor(base, route)
    for job in jobs:
        executor.attach(job_training(base, job))
    return executor


def plan_program(
    jobs: Sequence[PreparedJob], rounds: int, capacity: int = 64, begins: bool = False
) -> Program:
    return plan_window([job.job_window(0, rounds, begins) for job in jobs], one_device_layout(), capacity)


def run_program(executor: Executor, planned: Program, jobs: Sequence[PreparedJob]) -> Iterator[Event]:
    by_name = {job.name: job for job in jobs}
    return executor.run(planned, lambda plan, kind: collate_plan(plan, kind, by_name), lambda: False)


def in_flight(laid: DeviceMicrobatch) -> InFlight:
    """A microbatch at the first of its visits."""
    return InFlight(laid, TimedPass(MicrobatchPlan(()), training=True))


def rows_on_device(activations: Activations) -> int:
    """Return the number of rows on the device, over all stages."""
    kept = getattr(activations, "_kept", activations)
    return sum(len(input_TD) for input_TD in kept._inputs.values())


def is_empty(activations: Activations) -> bool:
    kept = getattr(activations, "_kept", activations)
    return not (
        kept._inputs or kept._gradients or kept._outgoing_tensors or getattr(activations, "_rows", None)
    )
