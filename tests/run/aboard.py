"""Jobs made ready and put aboard an executor, without the loop around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests import bench
from weft import JobSpec
from weft.adapters.kind import Member
from weft.base.model import Base
from weft.ops.lora import Route
from weft.paths import cache_folder
from weft.plan.planner import plan_window
from weft.plan.program import Program
from weft.ready import Ready, lay_out, make_ready
from weft.run.events import Event
from weft.run.executor import Executor
from weft.run.training import Training, new_training


def ready(base: Base, name: str, **keys: Any) -> Ready:
    settings = {"steps": 8, "batch_size": 3, "learning_rate": 1e-2, "seed": 1, "adapter": {"rank": 4}} | keys
    settings.setdefault("data", bench.rows(bench.samples(12, seed=settings["seed"])))
    return make_ready(JobSpec(name=name, **settings), 0, bench.tokenizer(), base.shape, cache_folder())


def training(base: Base, job: Ready) -> Training:
    member = Member(job.name, job.spec.adapter, job.spec.seed)
    return new_training(member, job.recipe, base.shape.sites, base.dtype, base.device)


def executor(base: Base, jobs: Sequence[Ready], route: Route = Route.segmented) -> Executor:
    made = Executor(base, route)
    for job in jobs:
        made.attach(training(base, job))
    return made


def program(jobs: Sequence[Ready], rounds: int, capacity: int = 64, begins: bool = False) -> Program:
    return plan_window([job.course(0, rounds, begins) for job in jobs], capacity)


def events(made: Executor, planned: Program, jobs: Sequence[Ready]) -> Iterator[Event]:
    by_name = {job.name: job for job in jobs}
    return made.run(planned, lambda plan, held_out: lay_out(plan, held_out, by_name), lambda: False)
