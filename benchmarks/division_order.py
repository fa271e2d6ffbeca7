"""Whether the search over divisions orders them as they are on CPU processes: predicted beside measured.

Small random models, numbers of jobs and lengths of samples make twelve cases. In each, every division of the
worker processes into shares, replicas, stages and shards trains a few steps. It is predicted as the planner
predicts it, from a profile of one worker, which is measured while the other workers are just as busy, and
from the measured sums between processes. Printed are Kendall's tau between both orders, without pairs that
differ by less than 5 %, and how much slower the chosen division is than the fastest.

    python -m benchmarks.division_order [--workers N] [--threads N] [--seconds S] [--toy] [--json FILE]

It is meant to take less than eight minutes on 16 cores. After `--seconds`, no further processes are started,
and what has been measured is printed. `--toy` has two workers and one tiny model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pipeline_bubbles import fetch
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import adapter_layout
from weftune.base.load import inspect, load_base, load_config, model_source
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.core.shapes import JobShape, ModelShape
from weftune.errors import PlanError
from weftune.launch.workers import worker_environment
from weftune.plan.cost.memory import SPARE
from weftune.plan.cost.profile import Profile
from weftune.plan.cost.profile_cost import pass_terms, step_rate
from weftune.plan.layout.choose import CPU_CHUNK_ROWS, Machine, choose_layout
from weftune.plan.layout.division import SAME_SPEED, Division, DivisionSpace
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.layout.split import share_jobs
from weftune.plan.outlook.forecast import price_window
from weftune.plan.program.layout import Layout
from weftune.plan.program.prices import Link
from weftune.plan.program.program import GlobalBatch, PlacedSample
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing, plan_window
from weftune.run.assemble import resident_executor
from weftune.run.executor import Executor
from weftune.run.profile import measure_profile
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.groups import connect, read_position
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.worker import serve

CPU = torch.device("cpu")
RANK = 8
CAPACITY = 512
ALIKE = 0.05
"""Relative difference of speeds below which the order of a pair is not judged."""
PRELOADED = [
    "benchmarks.pipeline_bubbles",
    "weftune.trainer.trainer",
    "transformers.models.llama.modeling_llama",
]
ANSWER_SECONDS = 180.0
"""Seconds after which a process that does not answer is lost."""
SUM_BYTES = 4 << 10, 1 << 20
"""Sizes of the sums by which latency and bandwidth between processes are measured."""
TAU_BAR, CHOICE_BAR = 0.8, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    name: str
    hidden: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCase:
    """Jobs with equal batches of samples of one length."""

    model: SmallModel
    jobs: int
    length: int
    batch_tokens: int

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.jobs} jobs, {self.length} tokens"

    @property
    def samples(self) -> int:
        return self.batch_tokens // self.length

    def window(self, job: str, step: int, rounds: int) -> JobWindow:
        placed = tuple(PlacedSample(at, self.length, at * self.length) for at in range(self.samples))
        supervised = self.samples * (self.length - 1)
        numbers = range(step + 1, step + rounds + 1)
        batches = tuple(GlobalBatch(job, number, placed, supervised) for number in numbers)
        return JobWindow(job, step, batches, (), frozenset(), frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    workers: int
    threads: int
    models: Sequence[SmallModel]
    jobs: Sequence[int]
    lengths: Sequence[int]
    batch_tokens: int
    rounds: int
    repeats: int
    """Windows that are measured, divided by the number of jobs."""

    def cases(self, model: SmallModel) -> list[OrderCase]:
        return [
            OrderCase(model=model, jobs=jobs, length=length, batch_tokens=self.batch_tokens)
            for jobs in self.jobs
            for length in self.lengths
        ]


MODELS = (
    SmallModel(name="deep", hidden=128, layers=12, vocabulary=512),
    SmallModel(name="wide", hidden=384, layers=4, vocabulary=512),
    SmallModel(name="many tokens", hidden=192, layers=6, vocabulary=16384),
)
TOY = SmallModel(name="toy", hidden=32, layers=4, vocabulary=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionSpeed:
    """Predicted and measured tokens per second of a division in one case."""

    division: str
    complexity: tuple[int, int, int, int]
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTask:
    """The part of a case that a share trains."""

    case: OrderCase
    jobs: tuple[str, ...]
    rounds: int
    repeats: int


def main() -> None:
    options = order_arguments().parse_args()
    setting, began = read_setting(options), time.perf_counter()
    found: dict[str, list[DivisionSpeed]] = {}
    left_out: list[str] = []

    def has_time() -> bool:
        return time.perf_counter() - began < options.seconds

    for model in setting.models:
        with tempfile.TemporaryDirectory() as folder:
            measure_model(model, Path(folder), setting, found, left_out, has_time)
    for name, speeds in found.items():
        print(f"\n{name}\n{table(speeds)}")
    if left_out:
        print(f"\nnot measured: {', '.join(left_out)}")
    numbers = judge(found)
    print("\n" + "\n".join(f"{key}: {value}" for key, value in numbers.items()))
    finish(
        {
            "setting": asdict(setting),
            "seconds": time.perf_counter() - began,
            **numbers,
            "not_measured": left_out,
            "cases": {name: [asdict(one) for one in speeds] for name, speeds in found.items()},
        },
        options.json,
    )


def order_arguments() -> argparse.ArgumentParser:
    parser = arguments("Whether divisions of CPU processes are ordered as predicted.")
    parser.add_argument("--workers", type=int, default=4, help="processes that a division uses")
    parser.add_argument("--threads", type=int, help="of each process; all cores by default")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no processes after this time")
    parser.add_argument("--toy", action="store_true", help="tiny, to see that it runs")
    return parser


def read_setting(options: argparse.Namespace) -> Setting:
    if options.toy:
        return Setting(
            workers=2,
            threads=1,
            models=(TOY,),
            jobs=(1, 2),
            lengths=(16,),
            batch_tokens=64,
            rounds=2,
            repeats=1,
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Setting(
        workers=options.workers,
        threads=options.threads or max(1, cores // options.workers),
        models=MODELS,
        jobs=(1, 6),
        # Longer samples might be cut into chunks, which these random microbatches are not.
        lengths=(32, CPU_CHUNK_ROWS),
        batch_tokens=2 * CAPACITY,
        rounds=2,
        repeats=12,
    )


# -- one model -------------------------------------------------------------------------------------------


def measure_model(
    model: SmallModel,
    folder: Path,
    setting: Setting,
    found: dict[str, list[DivisionSpeed]],
    left_out: list[str],
    has_time: Callable[[], bool],
) -> None:
    """Add the speeds of all divisions of a model in all of its cases to `found`."""
    spec = write_model(folder, model, setting)
    profile, link = measure_worker(spec, setting)
    planner = Planner(spec, profile, link, setting)
    for division in planner.divisions():
        cases = [case for case in setting.cases(model) if division.shares <= case.jobs]
        if not has_time():
            left_out += [f"{case.name}: {division.description}" for case in cases]
            continue
        layout = planner.layout(cases[0], division)
        try:
            measured = measure_division(spec, layout, division, cases, setting)
        except (EOFError, TimeoutError) as error:
            left_out.append(f"{model.name}: {division.description} ({error or 'a process ended'})")
            continue
        for case, tokens_per_second in zip(cases, measured, strict=True):
            speed = DivisionSpeed(
                division=division.description,
                complexity=division.complexity,
                predicted=planner.predict(case, division),
                measured=tokens_per_second,
            )
            found.setdefault(case.name, []).append(speed)
            print(f"{case.name}: {table([speed], titles=False)}", flush=True)


def write_model(folder: Path, model: SmallModel, setting: Setting) -> BaseSpec:
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=model.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(CAPACITY, *setting.lengths),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return BaseSpec(model=str(folder), dtype="float32")


# -- what is predicted ------------------------------------------------------------------------------------


class Planner:
    """Predictions for one model, as the search makes them."""

    def __init__(self, spec: BaseSpec, profile: Profile, link: Link, setting: Setting) -> None:
        self._shape, self._link, self._setting = inspect(spec, CPU), link, setting
        self._machine = Machine(
            on_gpu=False,
            devices=setting.workers,
            budget_bytes=1 << 40,
            host_budget_bytes=1 << 40,
            capacity=CAPACITY,
            profile=profile,
            worker_profile=profile,
        )
        terms, rate = pass_terms(profile, self._shape), step_rate(profile)
        self._times = StageTimes(self._shape.layers, terms, rate)

    def divisions(self) -> list[Division]:
        """Return the divisions that use all workers."""
        workers = self._setting.workers
        space = DivisionSpace(
            shares=range(1, min(workers, max(self._setting.jobs)) + 1),
            replicas=range(1, workers + 1),
            stages=range(1, min(workers, self._shape.layers) + 1),
            shards=[count for count in (1, 2, 4) if count <= workers],
            capacity=CAPACITY,
        )
        return [one for one in space.divisions(workers) if one.devices == workers]

    def layout(self, case: OrderCase, division: Division) -> Layout:
        return choose_layout(self._shape, self._shares(case, division)[0], self._of(division)).layout

    def predict(self, case: OrderCase, division: Division) -> float:
        """Return the predicted tokens per second of all jobs, by the share with the most work."""
        jobs = self._shares(case, division)[0]
        choice = choose_layout(self._shape, jobs, self._of(division))
        width = self._shape.hidden * self._shape.bytes_per_value
        times = replace(choice.stage_times or self._times, link=self._link, output_bytes=width)
        if choice.stage_times is not None:
            choice = replace(choice, stage_times=times)

        def job_window(name: str, rounds: int, begins: bool) -> JobWindow:
            return case.window(name, 0, self._setting.rounds)

        price = price_window(choice, job_window, times)
        return price.tokens_per_second * case.jobs / len(jobs)

    def _of(self, division: Division) -> Machine:
        return self._machine.with_division(replace(division, shares=1))

    def _shares(self, case: OrderCase, division: Division) -> list[list[JobShape]]:
        """Return the jobs of each share, the share with the most first."""
        return [[job_shape(self._shape, case, name) for name in one] for one in share_names(case, division)]


def share_names(case: OrderCase, division: Division) -> list[tuple[str, ...]]:
    shares = share_jobs({f"job{number}": 1.0 for number in range(case.jobs)}, division.shares)
    return sorted((one.jobs for one in shares), key=len, reverse=True)


def job_shape(shape: ModelShape, case: OrderCase, name: str) -> JobShape:
    return JobShape(
        name=name,
        priority=0,
        file_position=int(name.removeprefix("job")),
        trainable_parameters=adapter_layout(LoraSpec(rank=RANK), shape.sites).size,
        max_sample_tokens=case.length,
        batch_tokens=case.samples * case.length,
    )


# -- what is measured -------------------------------------------------------------------------------------


def measure_worker(spec: BaseSpec, setting: Setting) -> tuple[Profile, Link]:
    """Return the profile of one of several busy workers, and the link by which their sums take as long."""
    with started_workers(setting, [setting.workers], profile_worker, spec) as connections:
        profile, small, large = answer(connections[0])
    members = setting.workers
    hops = 2 * (members - 1)
    latency = max(1e-7, (small - (large - small) / (SUM_BYTES[1] / SUM_BYTES[0] - 1)) / hops)
    bandwidth = (SUM_BYTES[1] - SUM_BYTES[0]) / members * hops / max(1e-9, large - small)
    print(f"sums: {1e6 * latency:.0f} µs and {bandwidth / 1e9:.2f} GB/s per message", flush=True)
    return profile, Link(bandwidth, latency)


def profile_worker(connection: Connection, spec: BaseSpec) -> None:
    """Measure the profile while all workers do, and the seconds of sums over all workers."""
    position = read_position()
    assert position is not None
    connections = connect(replace(position, shards=position.workers), CPU)
    config = load_config(spec, model_source(spec)).text_config
    dist.barrier()
    profile = measure_profile(config, inspect(spec, CPU), spec.model, CPU, lambda *_: None)
    dist.barrier()
    seconds = [sum_seconds(size, connections.shard_group) for size in SUM_BYTES]
    connection.send((profile, *seconds))
    dist.barrier()
    dist.destroy_process_group()


def sum_seconds(size: int, group: Any, repeats: int = 30) -> float:
    """Return the seconds of a sum of `size` bytes over the workers of a group."""
    values = torch.zeros(size // 4)
    for _ in range(3):
        dist.all_reduce(values, group=group)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values, group=group)
    return (time.perf_counter() - began) / repeats


def measure_division(
    spec: BaseSpec, layout: Layout, division: Division, cases: Sequence[OrderCase], setting: Setting
) -> list[float]:
    """Return the tokens per second of all jobs in each case. All shares train at once."""
    teams = [division.workers_per_share] * division.shares
    speeds = []
    with started_workers(setting, teams, train_worker, spec, layout) as connections:
        for case in cases:
            shares = share_names(case, division)
            for connection, jobs in zip(connections, shares, strict=True):
                connection.send(
                    ShareTask(
                        case=case,
                        jobs=jobs,
                        rounds=setting.rounds,
                        repeats=max(1, setting.repeats // case.jobs),
                    )
                )
            for connection in connections:
                assert answer(connection) == "ready"
            for connection in connections:
                connection.send("begin")
            seconds = max(answer(connection) for connection in connections)
            speeds.append(case.jobs * setting.rounds * case.samples * case.length / seconds)
        for connection in connections:
            connection.send(None)
    return speeds


def train_worker(connection: Connection, spec: BaseSpec, layout: Layout) -> None:
    """Train the tasks of a share. The first worker of several receives them, and the others follow it."""
    position = read_position()
    if position is None:
        run_tasks(connection, resident_executor(load_base(spec, CPU)), layout)
        return
    position = replace(position, replicas=layout.replicas, shards=layout.shards)
    connections = connect(position, CPU)
    if position.worker > 0:
        serve(connections, CPU)
    else:
        control = WorkerControl(connections)
        with tempfile.TemporaryDirectory() as folder:
            driver = open_pipeline(control, spec, CPU, layout, lambda job: Path(folder) / job)
            run_tasks(connection, driver, layout)
            control.end_workers()
    dist.destroy_process_group()


def run_tasks(connection: Connection, executor: Executor | Driver, layout: Layout) -> None:
    while (task := connection.recv()) is not None:
        base, step = executor.base, 0
        for number, name in enumerate(task.jobs):
            adapter = JobAdapter(name, LoraSpec(rank=RANK), number)
            executor.attach(
                new_training(
                    adapter, Recipe(steps=1000), base.trained_sites, base.dtype, CPU, base.whole_sites
                )
            )

        def run_window(step: int, rounds: int, task: ShareTask = task) -> float:
            pacing = None
            if isinstance(executor, Driver):
                pacing = Pacing(executor.paces.stages(), spare_microbatches=SPARE)
            windows = [task.case.window(name, step, rounds) for name in task.jobs]
            program = plan_window(windows, layout, CAPACITY, pacing=pacing)
            began = time.perf_counter()
            for _ in executor.run(program, fetch, lambda: False):
                pass
            return time.perf_counter() - began

        # The first passes of a process, and of a size, are slow.
        run_window(step, 1)
        step += 1
        connection.send("ready")
        assert connection.recv() == "begin"
        taken = []
        for _ in range(task.repeats):
            taken.append(run_window(step, task.rounds))
            step += task.rounds
        connection.send(sum(taken) / len(taken))
        for name in task.jobs:
            executor.detach(name)


# -- processes --------------------------------------------------------------------------------------------


@contextmanager
def started_workers(
    setting: Setting, teams: Sequence[int], target: Callable[..., None], *given: Any
) -> Iterator[list[Connection]]:
    """Start a process for every worker of every team, and yield the connections to the first of each."""
    context = multiprocessing.get_context("forkserver")
    # Workers are forked from a process that has imported everything.
    context.set_forkserver_preload(PRELOADED)
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in teams]
    processes, firsts = [], []
    for store, workers in zip(stores, teams, strict=True):
        for worker in range(workers):
            mine, theirs = context.Pipe()
            variables = worker_environment(worker, workers, store.port, time.time())
            process = context.Process(
                target=be_worker, args=(variables, setting.threads, theirs, target, given), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            if worker == 0:
                firsts.append(mine)
    try:
        yield firsts
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()


def be_worker(
    variables: Mapping[str, str],
    threads: int,
    connection: Connection,
    target: Callable[..., None],
    given: Sequence[Any],
) -> None:
    os.environ.update({**variables, "OMP_NUM_THREADS": str(threads)})
    torch.set_num_threads(threads)
    target(connection, *given)


def answer(connection: Connection) -> Any:
    """Return what a worker sends."""
    if not connection.poll(ANSWER_SECONDS):
        raise TimeoutError(f"no answer in {ANSWER_SECONDS:.0f} s")
    return connection.recv()


# -- the verdict ------------------------------------------------------------------------------------------


def judge(found: Mapping[str, Sequence[DivisionSpeed]]) -> dict[str, Any]:
    """Return Kendall's tau over the pairs of all cases and of each case, and how much slower the chosen
    divisions are."""
    agreements: dict[str, list[bool]] = {
        name: [
            (one.predicted > other.predicted) == (one.measured > other.measured)
            for one, other in combinations(speeds, 2)
            if abs(one.measured - other.measured) > ALIKE * max(one.measured, other.measured)
        ]
        for name, speeds in found.items()
    }
    every = [agrees for pairs in agreements.values() for agrees in pairs]
    slower = {
        name: 1.0 - chosen(speeds).measured / max(one.measured for one in speeds)
        for name, speeds in found.items()
    }
    worst = max(slower.values(), default=0.0)
    return {
        "tau": round(kendall_tau(every), 3),
        "taus": {name: round(kendall_tau(pairs), 3) for name, pairs in agreements.items()},
        "pairs": len(every),
        "largest_loss_of_the_choice": round(worst, 3),
        "losses_of_the_choice": {name: round(loss, 3) for name, loss in slower.items()},
        "passed": kendall_tau(every) >= TAU_BAR and worst <= CHOICE_BAR,
    }


def kendall_tau(agreements: Sequence[bool]) -> float:
    """Return the share of pairs that agree minus the share of those that do not; 1 without pairs."""
    return 2 * sum(agreements) / len(agreements) - 1 if agreements else 1.0


def chosen(speeds: Sequence[DivisionSpeed]) -> DivisionSpeed:
    """Return the division that the search chooses: the simplest of those that are predicted to be fastest."""
    if not speeds:
        raise PlanError("nothing was measured")
    fastest = max(one.predicted for one in speeds)
    return min(
        (one for one in speeds if one.predicted >= (1 - SAME_SPEED) * fastest), key=lambda one: one.complexity
    )


def table(speeds: Sequence[DivisionSpeed], titles: bool = True) -> str:
    rows = [
        (one.division, f"{one.predicted:,.0f}", f"{one.measured:,.0f}", f"{one.predicted / one.measured:.2f}")
        for one in sorted(speeds, key=lambda one: -one.measured)
    ]
    if not titles:
        return "  ".join(rows[0])
    return aligned(("division", "predicted tokens/s", "measured", "ratio"), rows)


if __name__ == "__main__":
    main()
