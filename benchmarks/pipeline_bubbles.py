"""Bubbles of a real pipeline on CPU processes, worker by worker, beside the simulator's prediction.

A random Llama is cut into stages, a process each, by the times of a profile that is measured first; what a
microbatch then takes on each stage stands beside the bubbles, since of stages that are not alike the faster
must wait. Every job trains batches of equally long samples, so many microbatches a batch. One job runs in
plain 1F1B; then 1, 2, 4 and 8 jobs run as the planner orders them. A process plans a window while the one
before it runs, as in `weftune train`. The first two windows of each case teach the planner how fast the
stages are and how much their passes vary; those after them are foreseen from the windows before them, and
measured. Beside that stands what would be foreseen if no pass varied. A worker is busy in its passes and its
Steps only; bubbles are those of the steady part, between filling and draining.

With `--handover`, windows of several jobs hand over as those of `weftune train` do: the pipeline fills in the
first window and drains in the last one, which are not counted, and bubbles are those of all windows between
them with the time between two windows.

    python -m benchmarks.pipeline_bubbles [--stages N] [--threads N] [--delay SECONDS] [--spare N]
        [--windows N] [--handover] [--toy] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.bubbles import Found, bars, table, told
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.load import inspect, load_config, model_source
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.core.shapes import LayerRange, ModelShape
from weftune.launch.workers import worker_environment
from weftune.plan.cost.time import PassWork
from weftune.plan.layout.stages import PartCosts, cut_layers, measured_costs
from weftune.plan.program.handover import FINISHED, Unfinished, unfinished_work
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import (
    NOTHING,
    Backward,
    Forward,
    GlobalBatch,
    PlacedSample,
    Program,
)
from weftune.plan.program.simulate import Timeline
from weftune.plan.window.pace import StagePace
from weftune.plan.window.pipeline import PipelineOrder
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing
from weftune.run.profile import measure_profile
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training
from weftune.run.workers.agreed import WorkerReport
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.groups import connect, read_position
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.paces import Paces
from weftune.run.workers.trace import make_timeline
from weftune.run.workers.worker import serve
from weftune.trainer.planner import PlannerProcess
from weftune.trainer.warm_up import random_microbatch

CPU = torch.device("cpu")
RANKS = (8, 16, 4, 32)
"""Of the adapters, in turn."""
PROFILED = 512
"""Tokens of the longest sample that a profile is measured with."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and on how many processes."""

    stages: int = 4
    threads: int = 1
    delay: float = 0.0
    layers: int = 12
    hidden: int = 384
    """So wide that passes are arithmetic for the most part, and both ends small beside a layer: three a
    stage are alike whatever the ends take, up to a seventh of a layer."""
    vocabulary: int = 256
    length: int = 256
    """Tokens of a sample."""
    samples: int = 1
    """Of a microbatch; with more than one the planner could cut it finer."""
    microbatches: int = 4
    """Of a job's global batch."""
    windows: int = 2
    spare: int = 6
    """Microbatches in flight beyond what 1F1B has, in our orders. Where passes vary by a tenth, four stages
    lose five percent of the time with one of them and less than one percent with six, by the simulator."""
    hands_over: bool = False
    """Whether windows leave microbatches in flight for the next one."""

    @property
    def rows(self) -> int:
        return self.length * self.samples


TOY = Setting(stages=2, layers=3, hidden=32, vocabulary=64, length=8, samples=2, microbatches=2, spare=1)


@dataclass(frozen=True, slots=True)
class Case:
    jobs: int
    steps: int
    """Of every job in a window: fewer jobs make more, so that as many passes are measured."""
    order: PipelineOrder | None = None

    @property
    def name(self) -> str:
        return "1 job, 1F1B" if self.order else f"{self.jobs} job{'s' if self.jobs > 1 else ''}, ours"


CASES = (Case(1, 4, PipelineOrder.alternating), Case(1, 4), Case(2, 5), Case(4, 3), Case(8, 2))
UNCOUNTED = 2
"""Windows of a case before those that are measured."""
FIRST = Case(1, 1)
"""Runs before all others and is not counted: the first passes of a process are slow."""


def main() -> None:
    options = bubble_arguments().parse_args()
    setting = setting_asked(options)
    cut, found = measure(setting)
    print(told(found))
    numbers = {
        "setting": asdict(setting),
        "cut": asdict(cut),
        "cases": [asdict(one) for one in found],
        "bars": [asdict(bar) | {"kept": bar.kept} for bar in bars(found)],
    }
    finish(numbers, options.json)


def bubble_arguments() -> argparse.ArgumentParser:
    parser, usual = arguments("Bubbles of a real pipeline, beside the simulator's prediction."), Setting()
    parser.add_argument("--stages", type=int, default=usual.stages)
    parser.add_argument("--threads", type=int, default=usual.threads, help="of each process")
    parser.add_argument(
        "--delay", type=float, default=usual.delay, help="seconds that every message takes more"
    )
    parser.add_argument("--spare", type=int, default=usual.spare, help="more in flight than 1F1B has")
    parser.add_argument("--windows", type=int, default=usual.windows, help="windows that are measured")
    parser.add_argument("--handover", action="store_true", help="windows do not drain")
    parser.add_argument("--toy", action="store_true", help="tiny, to see that it runs")
    return parser


def setting_asked(options: argparse.Namespace) -> Setting:
    if options.toy:
        return replace(TOY, hands_over=options.handover)
    return Setting(
        stages=options.stages,
        threads=options.threads,
        delay=options.delay,
        spare=options.spare,
        windows=options.windows,
        hands_over=options.handover,
    )


def measure(setting: Setting) -> tuple[Cut, list[Found]]:
    """Every case in one pipeline, whose first worker is this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spec = write_model(folder, setting)
            # Before the others start: they would take cores while they do.
            cut = measured_cut(spec, setting)
            print(cut.told(setting.rows), "\n", flush=True)
            with others(setting), opened(spec, cut.held, folder, setting) as pipeline:
                run_case(pipeline, setting, FIRST, cut)
                found = []
                for case in CASES:
                    found.append(run_case(pipeline, setting, case, cut))
                    print(table(found[-1:]), "\n", flush=True)
        return cut, found
    finally:
        torch.set_num_threads(before)


@contextmanager
def opened(spec: BaseSpec, held: Sequence[LayerRange], folder: Path, setting: Setting) -> Iterator[Driver]:
    position = read_position()
    assert position is not None
    staff = WorkerControl(connect(position, CPU))
    yield open_pipeline(
        staff,
        spec,
        CPU,
        pipeline_layout(held),
        lambda job: folder / "checkpoints" / job,
        setting.delay,
    )
    staff.end_workers()
    torch.distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers of each stage, and the costs that they were chosen by."""

    held: tuple[LayerRange, ...]
    costs: PartCosts

    def told(self, rows: int) -> str:
        counts = " + ".join(str(one.stop - one.start) for one in self.held)
        times = ", ".join(f"{1e3 * self.costs.stage_cost(one):.1f}" for one in self.held)
        return f"Stages of {counts} layers; by the profile {rows} rows take {times} ms on them."


def measured_cut(spec: BaseSpec, setting: Setting) -> Cut:
    shape = inspect(spec, CPU)
    config = load_config(spec, model_source(spec)).text_config
    profile = measure_profile(config, shape, spec.model, CPU, lambda *_: None)
    costs = measured_costs(profile, shape, work_of_one(setting, shape))
    return Cut(cut_layers(shape, setting.stages, costs), costs)


def work_of_one(setting: Setting, shape: ModelShape) -> PassWork:
    """A microbatch of one job, its adapter of the mean rank."""
    rank = sum(RANKS) / len(RANKS)
    per_row = int(rank * sum(site.in_features + site.out_features for site in shape.sites))
    return PassWork(
        tokens=setting.rows,
        squares=setting.rows * setting.length,
        samples=setting.samples,
        supervised=setting.rows,
        adapted=setting.rows * per_row,
        segments=1,
    )


def write_model(folder: Path, setting: Setting) -> BaseSpec:
    config = LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden * 11 // 4,
        num_hidden_layers=setting.layers,
        num_attention_heads=max(1, setting.hidden // 64),
        num_key_value_heads=max(1, setting.hidden // 64),
        max_position_embeddings=max(setting.length, PROFILED),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return BaseSpec(model=str(folder), dtype="float32")


@dataclass(frozen=True, slots=True)
class Window:
    """One that was measured."""

    program: Program
    reports: tuple[WorkerReport, ...]
    paces: Paces
    """As measured before this window. Predictions are made from them after all windows, since the workers
    wait for this process between two of them."""


def run_case(pipeline: Driver, setting: Setting, case: Case, cut: Cut) -> Found:
    names = [f"job{number}" for number in range(case.jobs)]
    base = pipeline.base
    for number, name in enumerate(names):
        adapter = JobAdapter(name, LoraSpec(rank=RANKS[number % len(RANKS)]), number)
        recipe = Recipe(steps=1000)
        training = new_training(adapter, recipe, base.shape.sites, base.dtype, base.device, base.whole_sites)
        pipeline.attach(training)
    # A stage whose neighbours wait half of the time is not as fast as one beside busy ones.
    pipeline.paces = Paces([held.stop - held.start for held in cut.held])
    hands_over = setting.hands_over and case.order is None
    last = UNCOUNTED - 1 + setting.windows + hands_over

    def plan(number: int, unfinished: Unfinished, paces: tuple[StagePace, ...]) -> Program:
        courses = [course(name, number * case.steps, case, setting) for name in names]
        pacing = Pacing(paces, case.order, setting.spare, hands_over=hands_over and number < last)
        return process.plan_window(courses, pipeline.layout, setting.rows, False, NOTHING, pacing, unfinished)

    with closing(PlannerProcess()) as process, ThreadPoolExecutor(1) as planner:
        windows, program = [], plan(0, FINISHED, pipeline.paces.stages())
        for number in range(last + 1):
            known = deepcopy(pipeline.paces)
            following = (number + 1, unfinished_work(program), known.stages()) if number < last else None
            ahead = following and planner.submit(plan, *following)
            for _ in pipeline.run(program, fetch, lambda: False):
                pass
            if UNCOUNTED <= number < UNCOUNTED + setting.windows:
                windows.append(Window(program, tuple(pipeline.reports), known))
            program = ahead.result() if ahead else program
    for name in names:
        pipeline.detach(name)
    return found_in(windows, case, setting)


def found_in(windows: Sequence[Window], case: Case, setting: Setting) -> Found:
    """The means over all windows. Windows that hand over are one timeline."""
    parts = [windows] if windows[0].program.hands_over else [[one] for one in windows]
    measured = [make_timeline(joined_reports([one.reports for one in part])) for part in parts]
    varied = [(one, one.paces.varied_timelines(one.program)) for one in windows]
    seconds = sum(one.makespan for one in measured)
    tokens = len(windows) * case.steps * case.jobs * setting.microbatches * setting.rows
    return Found(
        name=case.name,
        jobs=case.jobs,
        passes=means([[pass_seconds(report) for report in one.reports] for one in windows]),
        measured=means([steady_bubbles(one) for one in measured]),
        predicted=means([predicted_bubbles(one, draw) for one, draws in varied for draw in draws]),
        even=means([predicted_bubbles(one, one.paces.timeline(one.program)) for one in windows]),
        spread=means([[pass_spread(report) for report in one.reports] for one in windows]),
        tokens_per_second=tokens / seconds,
        predicted_seconds=sum(mean(draw.makespan for draw in draws) for _, draws in varied),
        seconds=seconds,
        seam_seconds=seam_seconds(windows) if len(parts) == 1 else 0.0,
    )


def seam_seconds(windows: Sequence[Window]) -> float:
    """Return the mean seconds between the last action of a window and the first one of the next."""
    spans = [
        (min(one.start for one in times), max(one.stop for one in times))
        for window in windows
        for times in [[one for report in window.reports for one in report.times]]
    ]
    gaps = [start - stop for (_, stop), (start, _) in pairwise(spans)]
    return mean(gaps) if gaps else 0.0


def joined_reports(windows: Sequence[Sequence[WorkerReport]]) -> list[WorkerReport]:
    """The reports of all workers for consecutive windows, as those of one window."""
    return [
        WorkerReport(times=[one for report in reports for one in report.times])
        for reports in zip(*windows, strict=True)
    ]


def predicted_bubbles(window: Window, timeline: Timeline) -> tuple[float, ...]:
    """Where a window hands over, it neither fills nor drains."""
    return timeline.bubbles() if window.program.hands_over else steady_bubbles(timeline)


def steady_bubbles(timeline: Timeline) -> tuple[float, ...]:
    return timeline.bubbles(timeline.steady_span())


def pass_seconds(report: WorkerReport) -> float:
    """Of a microbatch, on average."""
    return sum(mean(times) for times in pass_times(report))


def pass_spread(report: WorkerReport) -> float:
    """The standard deviation of a pass, as a share of the mean of its kind."""
    return pstdev(one / mean(times) for times in pass_times(report) for one in times)


def pass_times(report: WorkerReport) -> list[list[float]]:
    """Seconds of all forwards, and of all backwards."""
    return [
        [one.stop - one.start for one in report.times if isinstance(one.action, kind)]
        for kind in (Forward, Backward)
    ]


def means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(mean(column) for column in zip(*rows, strict=True))


def course(job: str, step: int, case: Case, setting: Setting) -> JobWindow:
    count = setting.samples * setting.microbatches
    samples = tuple(PlacedSample(i, setting.length, i * setting.length) for i in range(count))
    numbers = range(step + 1, step + case.steps + 1)
    batches = tuple(GlobalBatch(job, number, samples, count * (setting.length - 1)) for number in numbers)
    return JobWindow(job, step, batches, (), frozenset(), frozenset())


fetch = partial(random_microbatch, 64)
"""Function that returns random tokens for a planned microbatch."""


@contextmanager
def others(setting: Setting) -> Iterator[None]:
    """The processes of all workers but the first, which this process becomes."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    environments = [
        worker_environment(worker, setting.stages, store.port, time.time())
        for worker in range(setting.stages)
    ]
    processes = [
        context.Process(target=be_worker, args=(one, setting.threads), daemon=True)
        for one in environments[1:]
    ]
    before = dict(os.environ)
    for process in processes:
        process.start()
    os.environ.update(environments[0])
    try:
        yield
        for process in processes:
            process.join(30)
    finally:
        os.environ.clear()
        os.environ.update(before)
        for process in processes:
            process.kill()


def be_worker(variables: dict[str, str], threads: int) -> None:
    os.environ.update(variables)
    torch.set_num_threads(threads)
    position = read_position()
    assert position is not None
    serve(connect(position, CPU), CPU)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
