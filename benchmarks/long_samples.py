"""Optimizer steps on long samples on one GPU: time and peak memory, against PEFT with gradient checkpointing.

    python -m benchmarks.long_samples [--shape 8b] [--layers N] [--jobs N] [--lengths 32768,131072]
                                      [--modes chosen,attention,recomputed,offloaded,inputs] [--rank R]
                                      [--steps N] [--long-steps N] [--memory GIB] [--no-peft] [--profile]

Every job trains one sample per step. Modes of Weftune:
chosen      what the memory model chooses with the memory of the device, or with --memory
attention   all layers recomputed in tiles of rows, outputs of attention kept on the device
recomputed  all layers recomputed in tiles of rows, attention too
offloaded   as `attention`, with all kept tensors in host memory
inputs      as `recomputed`, with all kept tensors in host memory
PEFT uses SDPA, gradient checkpointing and, where installed, Liger; several jobs run one after another.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise

from benchmarks.where import drawn, spent, traced
from weftune.bench.baselines import BaselineWork, job_step, peft_model
from weftune.bench.gpu_step import attach_jobs
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, random_ids, toy_size
from weftune.bench.timing import (
    Hardware,
    MeasuredStep,
    bench_hardware,
    measure_or_explain,
    peak_bytes,
    synchronise,
)
from weftune.bench.weftune_side import AttachedJobs, resident_jobs
from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.memory_fit import window_need
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Recompute
from weftune.run.measure.memory import budget_bytes
from weftune.trainer.options import host_budget

TILE_ROWS = 8192
GIB = 2**30
PEFT = "PEFT, checkpointing, Liger"
LONG = 1 << 16
"""Tokens beyond which a single step is measured."""


@dataclass(frozen=True, slots=True)
class LongStep:
    """A measured step."""

    name: str
    tokens: int
    measured: MeasuredStep
    predicted_bytes: int | None = None

    def line(self) -> str:
        if self.measured.seconds is None:
            return f"{self.tokens:>8,}  {self.name:<40} {self.measured.note}"
        peak = (self.measured.peak_bytes or 0) / GIB
        promise = "" if self.predicted_bytes is None else f"  predicted {self.predicted_bytes / GIB:7.2f} GiB"
        return f"{self.tokens:>8,}  {self.name:<40} {self.measured.seconds:8.3f} s  {peak:7.2f} GiB{promise}"


def summary(rows: Sequence[LongStep]) -> list[str]:
    """Return the time of every row relative to PEFT, and the growth of peak memory between lengths."""
    by_name: dict[str, dict[int, MeasuredStep]] = {}
    for row in rows:
        if row.measured.seconds is not None:
            by_name.setdefault(row.name, {})[row.tokens] = row.measured
    lines, peft = [], by_name.get(PEFT, {})
    for name, own in by_name.items():
        for tokens in sorted(own.keys() & peft.keys()) if name != PEFT else ():
            ratio = (own[tokens].seconds or 0.0) / (peft[tokens].seconds or 1.0)
            lines.append(f"{tokens:>8,}  {name:<40} {ratio:8.3f} of PEFT's time")
        for (short, before), (tall, after) in pairwise(sorted(own.items())):
            growth = ((after.peak_bytes or 0) - (before.peak_bytes or 0)) / GIB / (tall - short) * 1024
            lines.append(f"{short:,} to {tall:,}  {name:<32} {growth:8.3f} GiB per 1,024 tokens")
    return lines


def timed(step: Callable[[], object], hardware: Hardware, steps: int) -> MeasuredStep:
    """Measure the median of `steps` steps after one more, and the peak memory of all. Of 0 steps, the one
    before is measured."""
    taken = []
    for _ in range(steps + 1):
        synchronise(hardware.device)
        began = time.perf_counter()
        step()
        synchronise(hardware.device)
        taken.append(time.perf_counter() - began)
    return MeasuredStep(statistics.median(taken[1:] or taken), peak_bytes(hardware.device))


def recompute_of(mode: str, layers: int) -> Recompute:
    away = layers if mode in ("offloaded", "inputs") else 0
    return Recompute(True, layers, TILE_ROWS, mode in ("attention", "offloaded"), away)


class WeftuneCase:
    """Jobs with one sample per step on a base of random weights."""

    def __init__(self, size: Size, work: BaselineWork, hardware: Hardware, memory: float | None) -> None:
        self._work, self._hardware = work, hardware
        self._budget = budget_bytes(hardware.device) if memory is None else int(memory * GIB)
        self.attached: AttachedJobs = resident_jobs(build(size, hardware), hardware.device)
        attach_jobs(self.attached, size, work)
        executor = self.attached.executor
        self._jobs = [
            JobShape(name, 0, order, one.layout.size, work.length, work.length)
            for order, (name, one) in enumerate(executor.attached.items())
        ]
        layout = one_device_layout(executor.base.shape.layers)
        self.memory = MemoryModel(
            executor.base.shape,
            self._budget,
            uses_fused_ops=True,
            layout=layout,
            host_budget_bytes=host_budget(),
        )

        self._capacity = max(work.length, min(TILE_ROWS, work.tokens))

    def run(self, mode: str, steps: int) -> LongStep:
        attached, memory = self.attached, self.memory
        if mode == "chosen":
            attached.recompute = memory.choose_recompute(self._jobs, self._capacity)
        else:
            attached.recompute = recompute_of(mode, attached.base.shape.layers)
        program = attached.plan(1, self._capacity)
        predicted = window_need(memory, self._jobs, program).total_bytes(memory.fit)
        found = measure_or_explain(partial(timed, self._step, self._hardware, steps), self._hardware)
        print(attached.recompute)
        return LongStep(f"Weftune, {mode}", self._work.length, found, predicted)

    def profiled(self) -> str:
        """Return the device time of a step by kind of work, in the mode that ran last."""
        return drawn(spent(traced(self._step, self._hardware.device)))

    def _step(self) -> None:
        self.attached.run(self.attached.plan(1, self._capacity))


def with_peft(size: Size, work: BaselineWork, hardware: Hardware, steps: int) -> MeasuredStep:
    """Measure PEFT with gradient checkpointing, one job after another."""
    if importlib.util.find_spec("liger_kernel") is not None:
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{size.family}")()
    model = peft_model(size, work.rank, hardware, float32_adapters=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids_BL = random_ids(size, 1, work.length, hardware)
    one = timed(job_step(model, ids_BL), hardware, steps)
    assert one.seconds is not None
    return MeasuredStep(one.seconds * work.jobs, one.peak_bytes)


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lengths", default="32768", help="tokens per sample, separated by commas")
    parser.add_argument("--modes", default="chosen,attention,recomputed,offloaded")
    parser.add_argument(
        "--steps", type=int, default=2, help="timed steps after one more, of samples up to 65,536 tokens"
    )
    parser.add_argument("--long-steps", type=int, default=0, help="the same for longer samples")
    parser.add_argument("--memory", type=float, help="GiB of the device that the memory model may use")
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--profile", action="store_true", help="show the device time by kind of work")
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, to try the script")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    lengths = [int(length) for length in options.lengths.split(",")]
    size = SIZES[options.shape]
    size = replace(size, layers=options.layers or size.layers, context=max(size.context, *lengths))
    size = replace(toy_size(size), context=size.context) if options.toy else size
    rows: list[LongStep] = []

    def steps_at(length: int) -> int:
        # Shorter samples have compiled the kernels.
        return options.steps if length <= LONG else options.long_steps

    def show(row: LongStep) -> None:
        rows.append(row)
        print(row.line(), flush=True)

    work = [BaselineWork(jobs=options.jobs, batch=1, length=length, rank=options.rank) for length in lengths]
    for one in work:
        case = WeftuneCase(size, one, hardware, options.memory)
        for mode in options.modes.split(","):
            show(case.run(mode, steps_at(one.length)))
            if options.profile:
                print(case.profiled(), flush=True)
        del case
    for one in [] if options.no_peft else work:
        run = partial(with_peft, size, one, hardware, steps_at(one.length))
        show(LongStep(PEFT, one.length, measure_or_explain(run, hardware)))
    for line in summary(rows):
        print(line)
    finish({"size": asdict(size), "jobs": options.jobs, "steps": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
