"""Ways to group jobs, order passes and size microbatches, in the simulator.

Each of 20 mixes has 2 to 16 jobs on real datasets, tokenised as a run would. Its windows are planned by a
simple planner, by the planner, and by the planner with one more mechanism: the planner's program is then one
of several candidates. The program with the least simulated time is taken, by the paces of stages that a run
measures. `all` has the candidates of every mechanism. All windows are then simulated with the costs of a data
sheet, which include what paces omit: attention, segments, the head, links. A gain is the time saved, relative
to the simple planner, which tries no smaller microbatches once they stop to help, and which divides jobs into
groups by a formula. On one device it is the only one. Memory is assumed to suffice, also for microbatches of
twice the capacity.

    python -m benchmarks.plan_groups [--data FOLDER] [--base MODEL] [--mixes N] [--json FILE]
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.make_lengths import SHARED_DATA
from benchmarks.studies.bases import SHAPE_8B, SHAPE_135M
from benchmarks.studies.fusion import (
    GroupLoad,
    PipelineCost,
    Stage,
    StagePass,
    fuse,
    one_adapter,
)
from weftune.base.load import load_tokenizer
from weftune.base.spec import DEMO, BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.core.files import cache_folder
from weftune.core.shapes import JobShape, ModelShape
from weftune.data.prepare import Prepared, SharedData
from weftune.data.spec import DataSpec, RowKind
from weftune.jobs.courses import Curriculum
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import data_sheet_speed
from weftune.plan.cost.memory import SPARE
from weftune.plan.cost.prior import flop_terms
from weftune.plan.cost.time import Rate
from weftune.plan.layout.choose import MAX_TOKENS, MIN_ROWS, WINDOW_ROUNDS
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.layout.stages import cut_layers
from weftune.plan.pack.merge import JobLengths, head_tail_groups
from weftune.plan.program.handover import FINISHED, Unfinished, join_windows, unfinished_work
from weftune.plan.program.layout import Layout, one_device_layout, pipeline_layout
from weftune.plan.program.program import (
    GlobalBatch,
    Program,
    sample_groups,
)
from weftune.plan.window.orders import Work, cut_program, multi_job
from weftune.plan.window.pace import (
    StagePace,
    WindowPace,
    guess_pace,
    pace_prices,
    shorten_windows,
    simulated_paces,
)
from weftune.plan.window.pipeline import (
    GROUP_COUNTS,
    SPLITS,
    Groups,
    PipelineOrder,
    PipelineRules,
    Timed,
    choose_groups,
    divide_into_microbatches,
    mix_groups,
    order_passes,
    order_turns,
    plan_pipeline,
    window_seconds,
)
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window

DATASETS: Mapping[str, RowKind] = {
    "dolly_nocontext": "answers",
    "dpo_en_demo": "pairs",
    "glaive_toolcall": "answers",
    "gsm8k_train": "answers",
    "openbookqa_train": "answers",
    "rte_train": "answers",
    "self_instruct_seed175": "answers",
    "sst2_train7k": "answers",
    "svamp": "answers",
    "xsum_500": "answers",
}
MIXES, JOB_COUNTS, BATCH_SIZES, RANK = 20, (2, 3, 4, 6, 8, 12, 16), (4, 8, 16, 32), 16
MAX_ROUNDS = 6
"""Maximum rounds in a window of a pipeline. It has fewer if they are predicted to take ten seconds."""
CAPACITY_FACTORS = (0.25, 0.5, 2.0, 4.0)
"""Capacities that are tried on one device, relative to the fixed one."""
MAX_PIPELINE_SPLITS = 8
"""Maximum factor by which microbatches of pipelines are tried smaller than the capacity. Twice the capacity
is tried, too."""
MAX_LOSS = 0.01
"""Relative time that a mechanism may lose in a mix."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Devices, base and windows for which mixes are planned."""

    name: str
    cluster: str
    shape: ModelShape = SHAPE_8B
    stages: int = 1
    hands_over: bool = False
    windows: int = 2
    flops: float = 0.0
    """FLOP/s of a CPU. 0 takes those of the cluster's devices."""

    @property
    def is_gpu(self) -> bool:
        return not self.flops

    @property
    def layout(self) -> Layout:
        if self.stages == 1:
            return one_device_layout(self.shape.layers)
        return pipeline_layout(cut_layers(self.shape, self.stages))

    @property
    def times(self) -> StageTimes:
        cluster = parse_cluster(self.cluster)
        flops = self.flops or data_sheet_speed(cluster.devices[0]).flops
        output_bytes = self.shape.hidden * self.shape.bytes_per_value
        terms, link = flop_terms(self.shape).multiply_by(1 / flops), None if self.flops else cluster.link
        return StageTimes(self.shape.layers, terms, Rate(), link, output_bytes)


CPU_FLOPS = 5e11
"""FLOP/s that 16 cores reach. Only the length of a window depends on it."""
SETTINGS = (
    Setting("one GPU", "H200"),
    Setting("one CPU", "H200", SHAPE_135M, flops=CPU_FLOPS),
    Setting("4 stages, drained", "4xA100-80G", stages=4),
    Setting("4 stages, handed over", "4xA100-80G", stages=4, hands_over=True),
    Setting("8 stages, handed over", "8xH100", stages=8, hands_over=True),
    Setting(
        "4 CPU stages, handed over", "4xA100-80G", SHAPE_135M, stages=4, hands_over=True, flops=CPU_FLOPS
    ),
)


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs that train together."""

    number: int
    jobs: tuple[Curriculum, ...]
    batch_sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.number + 1}: {len(self.jobs)} jobs"

    @property
    def told(self) -> tuple[str, ...]:
        return tuple(f"{one.job} by {size}" for one, size in zip(self.jobs, self.batch_sizes, strict=True))

    def shapes(self, shape: ModelShape) -> dict[str, JobShape]:
        trainable = RANK * sum(site.in_features + site.out_features for site in shape.sites)
        return {
            one.job: JobShape(one.job, 0, at, trainable, int(one.data.train.lengths.max()))
            for at, one in enumerate(self.jobs)
        }

    def capacity(self, setting: Setting) -> int:
        """Return the token capacity of microbatches, which has room for the longest sample."""
        longest = max(int(one.data.train.lengths.max()) * one.data.train.group_size for one in self.jobs)
        return max(MAX_TOKENS[setting.is_gpu], longest)

    def windows(self, step: int, rounds: int) -> list[JobWindow]:
        return [one.job_window(step, rounds, False) for one in self.jobs]


def draw_mix(number: int, data: Mapping[str, Prepared]) -> Mix:
    random = Random(f"mix {number}")
    jobs, sizes = [], []
    for at in range(random.choice(JOB_COUNTS)):
        name = random.choice(sorted(data))
        size = min(random.choice(BATCH_SIZES), data[name].train.rows)
        order = data[name].train.sample_order(size, number)
        jobs.append(Curriculum(f"{at:02}-{name}", data[name], order, 1 << 30, frozenset(), frozenset()))
        sizes.append(size)
    return Mix(number, tuple(jobs), tuple(sizes))


def read_data(folder: Path, base: str) -> dict[str, Prepared]:
    shared = SharedData(load_tokenizer(BaseSpec(model=base)), cache_folder() / "tokens")
    return {
        name: shared.prepare(
            DataSpec(path=str(folder / f"{name}.jsonl"), skip_bad_rows=True), None, row_kind=kind
        )
        for name, kind in DATASETS.items()
    }


# -- one device ----------------------------------------------------------------------------------------------

Plan = Callable[[Sequence[JobWindow]], list[Program]]
"""A function that returns the candidates for a window of one device."""


def one_device_plans(setting: Setting, capacity: int) -> dict[str, Plan]:
    layout, ladder = setting.layout, setting.is_gpu

    def simple_rounds(windows: Sequence[JobWindow]) -> list[Program]:
        return [plan_window(windows, layout, capacity, ladder)]

    def grouped(windows: Sequence[JobWindow]) -> list[Program]:
        return [grouped_rounds(windows, groups, layout, capacity, ladder) for groups in head_tails(windows)]

    def fused(windows: Sequence[JobWindow]) -> list[Program]:
        pipeline = pipeline_cost(guess_pace(setting.shape.layers))
        return [
            grouped_rounds(windows, groups, layout, capacity, ladder) for groups in fusions(windows, pipeline)
        ]

    def sized(windows: Sequence[JobWindow]) -> list[Program]:
        longest = max(length for one in windows for length in run_lengths(one.batches))
        sizes = (max(longest, int(factor * capacity)) for factor in CAPACITY_FACTORS)
        return [plan_window(windows, layout, size, ladder) for size in sizes]

    return {
        "simple": simple_rounds,
        "head-tail": grouped,
        "fusion": fused,
        "capacity": sized,
    }


def grouped_rounds(
    windows: Sequence[JobWindow], groups: Groups, layout: Layout, capacity: int, ladder: bool
) -> Program:
    """Return the rounds of a window in which only jobs of a group share microbatches."""
    by_job = {one.job: one for one in windows}
    rounds = max(len(one.batches) for one in windows)
    parts = []
    for turn in range(rounds):
        for members in groups:
            own = [
                replace(
                    by_job[job], step=by_job[job].step + turn, batches=by_job[job].batches[turn : turn + 1]
                )
                for job in members
            ]
            parts.append(plan_window(own, layout, capacity, ladder))
    program = parts[0]
    for part in parts[1:]:
        program = program.followed_by(part)
    return program


# -- groups --------------------------------------------------------------------------------------------------


def run_lengths(batches: Sequence[GlobalBatch]) -> list[int]:
    """Return the tokens of every sample, or of every pair, that must share a microbatch."""
    return [
        sum(placed.length for placed in together)
        for batch in batches
        for together in sample_groups(batch.samples)
    ]


def job_lengths(windows: Sequence[JobWindow]) -> list[JobLengths]:
    found = []
    for one in windows:
        if one.batches:
            first = one.batches[0]
            found.append(JobLengths(one.job, first.tokens / len(first.samples), first.tokens))
    return found


def head_tails(windows: Sequence[JobWindow]) -> list[Groups]:
    """Return head-tail groups of every number."""
    jobs = job_lengths(windows)
    return [
        tuple(tuple(job.job for job in members) for members in head_tail_groups(jobs, count))
        for count in GROUP_COUNTS
        if count <= len(jobs)
    ]


def fusions(windows: Sequence[JobWindow], pipeline: PipelineCost) -> list[Groups]:
    """Return MuxTune's fusion groups of every number."""
    tokens = {one.job: sum(run_lengths(one.batches[:1])) for one in windows if one.batches}
    nothing = (one_adapter(0.0, 0.0, 1.0),) * len(pipeline.stages)
    # A round of a group is divided into as many microbatches as all groups have together.
    loads = [
        GroupLoad((job,), max(1, count // pipeline.microbatches), 0, nothing) for job, count in tokens.items()
    ]
    by_count = fuse(loads, pipeline).by_count
    return [
        tuple(load.jobs for load in by_count[count].groups) for count in GROUP_COUNTS if count in by_count
    ]


def pipeline_cost(*paces: StagePace) -> PipelineCost:
    stages = tuple(Stage(StagePass(pace.forward), StagePass(pace.backward), 0, 0, 0, 1) for pace in paces)
    return PipelineCost(stages, len(stages))


# -- pipelines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """What a window of a pipeline is planned from."""

    windows: Sequence[JobWindow]
    rules: PipelineRules
    capacity: int
    """Token capacity of the planner. That of `rules` is twice as large if larger microbatches are tried."""
    inherited: Unfinished
    hands_over: bool

    @property
    def batches(self) -> list[GlobalBatch]:
        turns = range(max(len(one.batches) for one in self.windows))
        return [one.batches[turn] for turn in turns for one in self.windows if turn < len(one.batches)]

    def sizes(self, splits: Sequence[int]) -> Iterator[int]:
        longest = max(run_lengths(self.batches))
        yield from dict.fromkeys(max(longest, -(-self.capacity // one)) for one in splits)

    def planned_groups(self, size: int) -> Groups:
        return choose_groups(self.batches, [one.job for one in self.windows], size, self.rules)

    def programs(
        self,
        groups: Groups,
        size: int,
        order: PipelineOrder = PipelineOrder.multi_job,
    ) -> Iterator[Timed]:
        rules = replace(self.rules, order=order)
        for turns in order_turns(groups, self.batches, self.inherited):
            work = divide_into_microbatches(self.batches, turns, size, rules, self.inherited)
            prices = pace_prices(work.microbatches, rules.paces)
            yield self.timed(order_passes(order, work, prices, turns, rules), work)

    def timed(self, program: Program, work: Work) -> Timed:
        prices = pace_prices(work.microbatches, self.rules.paces)
        if self.hands_over:
            program = cut_program(program, prices)
        return Timed(program, window_seconds(program, prices))


Candidates = Callable[[Window], Iterator[Timed]]


def planned(window: Window) -> Iterator[Timed]:
    program = plan_pipeline(window.windows, window.rules, window.inherited, window.hands_over)
    yield Timed(program, window_seconds(program, pace_prices(program.microbatches, window.rules.paces)))


def simple(window: Window) -> Iterator[Timed]:
    """The planner without a search for groups: microbatches become smaller while that helps."""
    best: Timed | None = None
    for size in window.sizes(SPLITS):
        groups = window.planned_groups(size)
        orders = (PipelineOrder.multi_job, PipelineOrder.alternating)
        programs = [one for order in orders for one in window.programs(groups, size, order=order)]
        found = min(programs, key=lambda one: one.seconds)
        if best is not None and found.seconds >= best.seconds:
            break
        best = found
    if best is not None:
        yield best


def head_tail_candidates(window: Window) -> Iterator[Timed]:
    for size in window.sizes(SPLITS):
        for groups in head_tails(window.windows):
            yield from window.programs(groups, size)


def fusion_candidates(window: Window) -> Iterator[Timed]:
    for size in window.sizes(SPLITS):
        for groups in fusions(window.windows, pipeline_cost(*window.rules.paces)):
            yield from window.programs(groups, size)


def template_candidates(window: Window) -> Iterator[Timed]:
    """GPipe and MuxTune's template, which runs buckets one after another. Neither can hand over."""
    if window.hands_over or window.inherited.batches:
        return
    for size in window.sizes(SPLITS):
        for order in (PipelineOrder.template, PipelineOrder.gpipe):
            yield from window.programs(window.planned_groups(size), size, order=order)


def interleaved_candidates(window: Window) -> Iterator[Timed]:
    """The microbatches of all groups alternate, instead of whole rounds."""
    for size in window.sizes(SPLITS):
        for groups in head_tails(window.windows):
            if len(groups) == 1:
                continue
            (turns, *_) = order_turns(groups, window.batches, window.inherited)
            work = divide_into_microbatches(
                window.batches, turns, size, window.rules, window.inherited, moves_samples=False
            )
            work = mix_groups(work, turns)
            prices = pace_prices(work.microbatches, window.rules.paces)
            yield window.timed(multi_job(work, window.rules.stages, prices, SPARE), work)


def capacity_candidates(window: Window) -> Iterator[Timed]:
    for size in (window.rules.capacity, *window.sizes(range(1, MAX_PIPELINE_SPLITS + 1))):
        yield from window.programs(window.planned_groups(size), size)


MECHANISMS: Mapping[str, Candidates] = {
    "head-tail": head_tail_candidates,
    "fusion": fusion_candidates,
    "template": template_candidates,
    "interleaved": interleaved_candidates,
    "capacity": capacity_candidates,
}

WAYS = {"simple": simple, "planner": planned, **MECHANISMS}


# -- runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One mix in one setting."""

    setting: str
    mix: str
    jobs: tuple[str, ...]
    """Name, dataset and batch size of each job."""
    rounds: int
    """Rounds in a window."""
    seconds: dict[str, float]
    """Simulated seconds of all windows with the simple planner, with the planner, and with each mechanism
    added to it."""
    planning: dict[str, float]
    """Seconds of planning per window."""

    @property
    def gains(self) -> dict[str, float]:
        return {
            name: 1 - one / self.seconds["simple"] for name, one in self.seconds.items() if name != "simple"
        }


def run_one_device(setting: Setting, mix: Mix) -> Row:
    layout, times, shapes = setting.layout, setting.times, mix.shapes(setting.shape)

    def priced(program: Program) -> float:
        return times.timeline(program, layout, shapes).makespan

    plans = one_device_plans(setting, mix.capacity(setting))
    windows = mix.windows(0, WINDOW_ROUNDS)
    seconds: dict[str, float] = {}
    planning: dict[str, float] = {}
    for name, plan in plans.items():
        began = time.perf_counter()
        least = min(map(priced, plan(windows)))
        planning[name] = time.perf_counter() - began
        seconds[name] = min(least, seconds.get("simple", least))
    seconds["all"] = min(seconds.values())
    return Row(setting.name, mix.label, mix.told, WINDOW_ROUNDS, seconds, planning)


class _Planner:
    """Plans windows of one mix, and keeps the plans of windows that several mechanisms share."""

    def __init__(self, capacity: int, paces: tuple[StagePace, ...], min_rows: int) -> None:
        self.capacity = capacity
        self.rules = PipelineRules(capacity, paces, spare_microbatches=SPARE, min_rows=min_rows)
        self._plans: list[tuple[tuple[str, Window], Timed, float]] = []

    def plan(
        self, name: str, windows: Sequence[JobWindow], inherited: Unfinished, hands_over: bool
    ) -> tuple[Timed, float]:
        """Return the planner's program with a mechanism added, and the seconds of planning."""
        # Windows that hand over have one capacity.
        factor = 2 if name == "capacity" else 1
        rules = replace(self.rules, capacity=factor * self.capacity)
        window = Window(windows, rules, self.capacity, inherited, hands_over)
        if name in ("simple", "planner"):
            return self._fastest(name, window)
        best, took = self._fastest("planner", window)
        for one in MECHANISMS if name == "all" else (name,):
            found, seconds = self._fastest(one, window)
            took += seconds
            best = min(best, found, key=lambda each: each.seconds)
        return best, took

    def _fastest(self, name: str, window: Window) -> tuple[Timed, float]:
        for key, found, seconds in self._plans:
            if key == (name, window):
                return found, seconds
        began = time.perf_counter()
        never = Timed(Program(1, (), (), (), ()), math.inf)
        found = min((never, *WAYS[name](window)), key=lambda each: each.seconds)
        self._plans.append(((name, window), found, time.perf_counter() - began))
        return found, self._plans[-1][2]


def run_pipeline(setting: Setting, mix: Mix) -> Row:
    layout, times, shapes = setting.layout, setting.times, mix.shapes(setting.shape)
    capacity = mix.capacity(setting)
    guessed = tuple(guess_pace(stage.layer_count) for stage in layout.stages)
    first = plan_pipeline(mix.windows(0, 2), PipelineRules(capacity, guessed, spare_microbatches=SPARE))
    timeline = times.timeline(first, layout, shapes)
    row_seconds = timeline.makespan / sum(one.rows for one in first.microbatches)
    paces = simulated_paces(first, timeline)
    seconds: dict[str, float] = {}
    planning: dict[str, float] = {}
    rounds, planner = 0, _Planner(capacity, paces, MIN_ROWS[setting.is_gpu])
    for name in ("simple", "planner", *MECHANISMS, "all"):
        programs: list[Program] = []
        inherited, step, took = FINISHED, 0, 0.0
        for number in range(setting.windows):
            given = shorten_windows(mix.windows(step, MAX_ROUNDS), WindowPace(row_seconds))
            rounds = max(len(one.batches) for one in given)
            hands_over = setting.hands_over and number + 1 < setting.windows
            best, each = planner.plan(name, given, inherited, hands_over)
            took += each
            programs.append(best.program)
            inherited, step = unfinished_work(best.program), step + rounds
        if setting.hands_over:
            seconds[name] = times.timeline(join_windows(programs), layout, shapes).makespan
        else:
            seconds[name] = sum(times.timeline(one, layout, shapes).makespan for one in programs)
        planning[name] = took / setting.windows
    return Row(setting.name, mix.label, mix.told, rounds, seconds, planning)


def run(setting: Setting, mix: Mix) -> Row:
    return run_one_device(setting, mix) if setting.stages == 1 else run_pipeline(setting, mix)


# -- output --------------------------------------------------------------------------------------------------


def mix_table(rows: Sequence[Row]) -> str:
    names = list(rows[0].gains)
    cells = [
        [row.mix, str(row.rounds), f"{row.seconds['simple']:.2f} s"]
        + [f"{row.gains[name]:+.1%}" for name in names]
        for row in rows
    ]
    return aligned(["mix", "rounds", "simple", *names], cells)


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """Return, for each mechanism: least, median and greatest gain, and the seconds of planning a window."""
    lines = []
    for name in rows[0].gains:
        gains = [row.gains[name] for row in rows]
        took = [row.planning[name] for row in rows if name in row.planning]
        cells = [f"{one:+.1%}" for one in (min(gains), median(gains), max(gains))]
        worse = sum(gain < -MAX_LOSS for gain in gains)
        lines.append([name, *cells, f"{worse}", f"{max(took):.1f} s" if took else ""])
    return lines


def main() -> None:
    parser = arguments("Ways to group, order and size, beside the planner of windows.")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="the folder of the JSONL files")
    parser.add_argument("--base", default=DEMO, help="the model whose tokenizer counts tokens")
    parser.add_argument("--mixes", type=int, default=MIXES)
    parser.add_argument("--settings", nargs="*", help="only settings whose names contain one of these words")
    options = parser.parse_args()
    missing = [name for name in DATASETS if not (options.data / f"{name}.jsonl").is_file()]
    if missing:
        print(f"{options.data} has no {missing[0]}.jsonl; name the folder of the datasets with --data")
        sys.exit(2)
    data = read_data(options.data, options.base)
    mixes = [draw_mix(number, data) for number in range(options.mixes)]
    found: list[Row] = []
    for setting in SETTINGS:
        if options.settings and not any(word in setting.name for word in options.settings):
            continue
        rows = []
        for mix in mixes:
            rows.append(run(setting, mix))
            print(f"{setting.name}, {mix_table(rows[-1:])}", flush=True)
        print(f"\n{setting.name}\n{mix_table(rows)}\n")
        titles = ["gain of", "least", "median", "greatest", "over 1 % slower", "planning"]
        print(f"{aligned(titles, summary(rows))}\n", flush=True)
        found += rows
    finish({"rows": [asdict(row) for row in found]}, options.json)


if __name__ == "__main__":
    main()
