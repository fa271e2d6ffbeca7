"""Idle share of pipelines whose windows drain or hand over, in the simulator, by the length of windows.

Stages are equal, a backward takes twice the time of a forward, and every job has batches of eight samples of
16 to 512 tokens. Windows that hand over are simulated as one program: a device that has ended its list of a
window begins the next. The time in which the run fills and drains once is left out. `at seams` is the idle
share if all devices wait for the last one at every seam, as workers do, since they report to the first one.

    python -m benchmarks.plan_handover [--spare N] [--toy] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned
from weftune.plan.cost.time import Line
from weftune.plan.program.handover import FINISHED, join_windows, unfinished_work
from weftune.plan.program.prices import PricedCluster
from weftune.plan.program.program import GlobalBatch, PlacedSample, Program
from weftune.plan.program.simulate import Timeline, simulate
from weftune.plan.window.pace import StagePace, pace_prices
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.plan.window.rounds import JobWindow

PACE = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))
CAPACITY, SAMPLES, LENGTHS = 1024, 8, (16, 512)
ROUNDS = (16, 5, 2)
"""Rounds in a window."""


@dataclass(frozen=True, slots=True)
class Setting:
    stages: int
    jobs: int
    spare: int = 1
    """Microbatches in flight beyond those of 1F1B."""
    rounds_in_all: int = 32
    replicas: int = 1
    """Copies of all stages, which divide the samples of every batch."""

    @property
    def rules(self) -> PipelineRules:
        paces = (PACE,) * self.stages
        return PipelineRules(CAPACITY, paces, spare_microbatches=self.spare, replicas=self.replicas)


SETTINGS = (Setting(4, 4), Setting(8, 4), Setting(8, 8), Setting(4, 8, replicas=2))


def batch(job: str, step: int) -> GlobalBatch:
    random = Random(f"{job} {step}")
    lengths = [random.randint(*LENGTHS) for _ in range(SAMPLES)]
    offsets = [0, *accumulate(lengths)]
    samples = tuple(PlacedSample(number, one, offsets[number]) for number, one in enumerate(lengths))
    return GlobalBatch(job, step, samples, offsets[-1])


def plan_windows(setting: Setting, rounds: int, hands_over: bool) -> list[Program]:
    """Return the programs of consecutive windows of `rounds` rounds, up to the end of all batches."""
    programs, left = [], FINISHED
    for first in range(0, setting.rounds_in_all, rounds):
        steps = range(first + 1, min(first + rounds, setting.rounds_in_all) + 1)
        windows = [
            JobWindow(job, first, tuple(batch(job, step) for step in steps), (), frozenset(), frozenset())
            for job in (f"job{number}" for number in range(setting.jobs))
        ]
        is_last = steps.stop > setting.rounds_in_all
        program = plan_pipeline(windows, setting.rules, left, hands_over and not is_last)
        left = unfinished_work(program)
        programs.append(program)
    return programs


def timeline(program: Program) -> Timeline:
    prices = pace_prices(program.microbatches, (PACE,) * len(program.stages))
    return simulate(program, prices, PricedCluster(len(program.devices)))


def idle_between(timelines: Sequence[Timeline]) -> float:
    """Return the share of all devices' time in which they do not compute, in windows one after another."""
    seconds = sum(one.makespan for one in timelines)
    busy = sum(one.makespan * sum(one.busy_fractions()) / one.devices for one in timelines)
    return 1 - busy / seconds


def steady_idle(programs: Sequence[Program]) -> float:
    """Return the idle share of windows that run without a pause, while forwards remain."""
    joined = timeline(join_windows(programs))
    shares = joined.bubbles(joined.steady_span())
    return sum(shares) / len(shares)


def idle_share(setting: Setting, rounds: int, hands_over: bool) -> float:
    programs = plan_windows(setting, rounds, hands_over)
    return steady_idle(programs) if hands_over else idle_between([*map(timeline, programs)])


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    programs = plan_windows(setting, rounds, hands_over=True)
    return {
        "stages": setting.stages,
        "jobs": setting.jobs,
        "replicas": setting.replicas,
        "spare": setting.spare,
        "rounds": rounds,
        "drained": idle_share(setting, rounds, hands_over=False),
        "handed_over": steady_idle(programs),
        "at_seams": idle_between([*map(timeline, programs)]),
    }


def main() -> None:
    parser = arguments("Idle share of pipelines whose windows drain or hand over.")
    parser.add_argument("--toy", action="store_true", help="a few rounds of one setting, to see that it runs")
    parser.add_argument("--spare", type=int, default=1, help="microbatches in flight beyond those of 1F1B")
    options = parser.parse_args()
    settings = [replace(one, spare=options.spare) for one in SETTINGS]
    if options.toy:
        settings = [Setting(2, 2, rounds_in_all=4)]
    rows = [measure(one, rounds) for one in settings for rounds in ((2,) if options.toy else ROUNDS)]
    titles = ["stages x jobs", "replicas", "spare", "rounds per window", "drained", "handed over", "at seams"]
    cells = [
        [f"{row['stages']} x {row['jobs']}", *(str(row[key]) for key in ("replicas", "spare", "rounds"))]
        + [f"{row[key]:.1%}" for key in ("drained", "handed_over", "at_seams")]
        for row in rows
    ]
    print(aligned(titles, cells))
    finish({"rows": rows}, options.json)


if __name__ == "__main__":
    main()
