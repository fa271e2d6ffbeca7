"""Bubbles of a real pipeline on CPU processes, rank by rank, beside the simulator's prediction.

A random Llama is cut into stages, a process each, by the times of a profile that is measured first; what a
microbatch then takes on each stage stands beside the bubbles, since of stages that are not alike the faster
must wait. Every job trains batches of equally long samples, so many microbatches a batch. One job runs in
plain 1F1B; then 1, 2, 4 and 8 jobs run as the planner orders them. The first window of each case teaches the
planner how fast the stages are; those after it are measured. A rank is busy in its passes and its Steps;
bubbles are those of the steady part, between filling and draining.

    python -m benchmarks.pipeline_bubbles [--stages N] [--threads N] [--delay SECONDS] [--spare N]
        [--toy] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.result import arguments, finish
from benchmarks.table import aligned
from weft.adapters.kind import Member
from weft.adapters.lora.spec import LoraSpec
from weft.base.load import inspect, load_config
from weft.base.place import place as place_of
from weft.base.spec import BaseSpec
from weft.batch import Microbatch, Segment
from weft.launch import environment
from weft.plan.cost import Work
from weft.plan.cut import PartCosts, cut_layers, measured_costs
from weft.plan.pipeline_window import PipelineOrder, PipelineRules, plan_pipeline, timeline_foreseen
from weft.plan.planner import Course
from weft.plan.program import Backward, Forward, GlobalBatch, MicrobatchPlan, Placed
from weft.run.commands import Staff
from weft.run.pipeline import Pipeline, open_pipeline
from weft.run.profile import measure_profile
from weft.run.schedule import Recipe
from weft.run.stage_executor import RankReport
from weft.run.trace import timeline_of
from weft.run.training import new_training
from weft.run.wires import connect, place_here
from weft.run.worker import serve
from weft.shapes import LayerRange, ModelShape

CPU = torch.device("cpu")
JOBS = (1, 2, 4, 8)
RANKS = (8, 16, 4, 32)
"""Of the adapters, in turn."""
PROFILED = 512
"""Tokens of the longest sample that a profile is measured with."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and on how many processes."""

    stages: int = 4
    threads: int = 1
    """More would not help: the products of so narrow a base are small."""
    delay: float = 0.0
    layers: int = 40
    """Many, and both ends small beside one of them: ten layers a stage are alike whatever the ends take, up
    to half a layer."""
    hidden: int = 128
    vocabulary: int = 256
    length: int = 256
    """Tokens of a sample."""
    samples: int = 1
    """Of a microbatch; with more than one the planner could cut it finer."""
    microbatches: int = 4
    """Of a job's global batch."""
    steps: int = 3
    """Of every job in a window."""
    windows: int = 2
    spare: int = 1
    """Microbatches in flight beyond what 1F1B has, in our orders."""

    @property
    def rows(self) -> int:
        return self.length * self.samples


TOY = Setting(2, 1, 0.0, 3, 32, 64, 8, 2, 2, 2, 1)


@dataclass(frozen=True, slots=True)
class Case:
    jobs: int
    order: PipelineOrder | None

    @property
    def name(self) -> str:
        return "1 job, 1F1B" if self.order else f"{self.jobs} job{'s' if self.jobs > 1 else ''}, ours"


@dataclass(frozen=True, slots=True)
class Found:
    """A case: what each rank takes for a microbatch, the shares of the steady time in which it waits, and
    what the whole windows came to."""

    name: str
    passes: tuple[float, ...]
    """Seconds of a forward and a backward together."""
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    tokens_per_second: float
    predicted_seconds: float
    seconds: float


def main() -> None:
    asked = bubble_arguments().parse_args()
    setting = setting_asked(asked)
    cut, found = measure(setting)
    print(table(found))
    first = found[0].tokens_per_second
    for one in found[1:]:
        print(f"{one.name}: {one.tokens_per_second / first:.2f} × the tokens per second of 1F1B job by job")
    finish(
        {"setting": asdict(setting), "cut": asdict(cut), "cases": [asdict(one) for one in found]}, asked.json
    )


def bubble_arguments() -> argparse.ArgumentParser:
    parser, usual = arguments("Bubbles of a real pipeline, beside the simulator's prediction."), Setting()
    parser.add_argument("--stages", type=int, default=usual.stages)
    parser.add_argument("--threads", type=int, default=usual.threads, help="of each process")
    parser.add_argument(
        "--delay", type=float, default=usual.delay, help="seconds that every message takes more"
    )
    parser.add_argument("--spare", type=int, default=usual.spare, help="more in flight than 1F1B has")
    parser.add_argument("--toy", action="store_true", help="tiny, to see that it runs")
    return parser


def setting_asked(asked: argparse.Namespace) -> Setting:
    if asked.toy:
        return TOY
    return Setting(stages=asked.stages, threads=asked.threads, delay=asked.delay, spare=asked.spare)


def table(found: Sequence[Found]) -> str:
    titles = ["case", "rank", "ms a microbatch", "bubbles", "predicted", "tokens/s", "seconds", "predicted"]
    rows = []
    for one in found:
        for rank, (taken, measured, predicted) in enumerate(
            zip(one.passes, one.measured, one.predicted, strict=True)
        ):
            whole = [f"{one.tokens_per_second:.0f}", f"{one.seconds:.2f}", f"{one.predicted_seconds:.2f}"]
            own = [str(rank), f"{1e3 * taken:.1f}", f"{measured:.1%}", f"{predicted:.1%}"]
            rows.append([one.name, *own, *whole] if rank == 0 else ["", *own, "", "", ""])
    return aligned(titles, rows)


def measure(setting: Setting) -> tuple[Cut, list[Found]]:
    """Every case in one pipeline, whose first rank is this process."""
    cases = [Case(1, PipelineOrder.alternating), *(Case(jobs, None) for jobs in JOBS)]
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
                found = []
                for case in cases:
                    found.append(run_case(pipeline, setting, case))
                    print(table(found[-1:]), "\n", flush=True)
        return cut, found
    finally:
        torch.set_num_threads(before)


@contextmanager
def opened(spec: BaseSpec, held: Sequence[LayerRange], folder: Path, setting: Setting) -> Iterator[Pipeline]:
    place = place_here()
    assert place is not None
    staff = Staff(connect(place, CPU))
    yield open_pipeline(staff, spec, CPU, held, lambda job: folder / "checkpoints" / job, setting.delay)
    staff.dismiss()
    torch.distributed.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Cut:
    """The layers of each stage, and the costs that they were chosen by."""

    held: tuple[LayerRange, ...]
    costs: PartCosts

    def told(self, rows: int) -> str:
        counts = " + ".join(str(one.stop - one.start) for one in self.held)
        times = ", ".join(f"{1e3 * self.costs.of(one):.1f}" for one in self.held)
        return f"Stages of {counts} layers; by the profile {rows} rows take {times} ms on them."


def measured_cut(spec: BaseSpec, setting: Setting) -> Cut:
    shape = inspect(spec, CPU)
    profile = measure_profile(load_config(spec, place_of(spec)), shape, spec.model, CPU, lambda *_: None)
    costs = measured_costs(profile, shape, work_of_one(setting, shape))
    return Cut(cut_layers(shape, setting.stages, costs), costs)


def work_of_one(setting: Setting, shape: ModelShape) -> Work:
    """A microbatch of one job, its adapter of the mean rank."""
    rank = sum(RANKS) / len(RANKS)
    per_row = int(rank * sum(site.in_features + site.out_features for site in shape.sites))
    return Work(
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


def run_case(pipeline: Pipeline, setting: Setting, case: Case) -> Found:
    names = [f"job{number}" for number in range(case.jobs)]
    base = pipeline.base
    for number, name in enumerate(names):
        member = Member(name, LoraSpec(rank=RANKS[number % len(RANKS)]), number)
        recipe = Recipe(steps=1000)
        training = new_training(member, recipe, base.shape.sites, base.dtype, base.device, base.whole_sites)
        pipeline.attach(training)
    passes, shares, foreseen, seconds, predicted = [], [], [], 0.0, 0.0
    for window in range(setting.windows + 1):
        courses = [course(name, window * setting.steps, setting) for name in names]
        paces = pipeline.paces.stages()
        program = plan_pipeline(courses, PipelineRules(setting.rows, paces, case.order, spare=setting.spare))
        for _ in pipeline.run(program, fetch, lambda: False):
            pass
        if window == 0:
            continue
        measured, simulated = timeline_of(pipeline.reports), timeline_foreseen(program, paces)
        passes.append([pass_seconds(report) for report in pipeline.reports])
        shares.append(measured.bubbles(measured.steady()))
        foreseen.append(simulated.bubbles(simulated.steady()))
        seconds, predicted = seconds + measured.makespan, predicted + simulated.makespan
    for name in names:
        pipeline.detach(name)
    tokens = setting.windows * setting.steps * setting.microbatches * setting.rows * case.jobs
    each = means(passes), means(shares), means(foreseen)
    return Found(case.name, *each, tokens / seconds, predicted, seconds)


def pass_seconds(report: RankReport) -> float:
    """Of a microbatch, on average."""
    passes = [one for one in report.times if isinstance(one.action, Forward | Backward)]
    count = sum(isinstance(one.action, Backward) for one in passes)
    return sum(one.stop - one.start for one in passes) / count


def means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))


def course(job: str, step: int, setting: Setting) -> Course:
    count = setting.samples * setting.microbatches
    samples = tuple(Placed(i, setting.length, i * setting.length) for i in range(count))
    numbers = range(step + 1, step + setting.steps + 1)
    batches = tuple(GlobalBatch(job, number, samples, count * (setting.length - 1)) for number in numbers)
    return Course(job, step, batches, (), frozenset(), frozenset())


def fetch(plan: MicrobatchPlan, _held_out: bool) -> Microbatch:
    """Random tokens, all of them supervised."""
    lengths = [placed.length for segment in plan.segments for placed in segment.samples]
    offsets = [placed.offset for segment in plan.segments for placed in segment.samples]
    positions = [torch.arange(length) for length in lengths]
    tokens_T = torch.randint(0, 64, (sum(lengths),))
    segments, start = [], 0
    for segment in plan.segments:
        segments.append(Segment(segment.job, segment.step, start, start + segment.tokens))
        start += segment.tokens
    return Microbatch(
        tokens_T=tokens_T,
        positions_T=torch.cat(positions),
        targets_T=tokens_T.roll(-1),
        token_index_T=torch.cat([offset + p for offset, p in zip(offsets, positions, strict=True)]),
        sample_lengths=tuple(lengths),
        segments=tuple(segments),
    )


@contextmanager
def others(setting: Setting) -> Iterator[None]:
    """The processes of all ranks but the first, which this process becomes."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    environments = [environment(rank, setting.stages, store.port) for rank in range(setting.stages)]
    processes = [
        context.Process(target=be_rank, args=(one, setting.threads), daemon=True) for one in environments[1:]
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


def be_rank(variables: dict[str, str], threads: int) -> None:
    os.environ.update(variables)
    torch.set_num_threads(threads)
    place = place_here()
    assert place is not None
    serve(connect(place, CPU), CPU)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
