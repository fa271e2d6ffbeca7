"""One job of long samples in a pipeline of CPU processes: whole samples against chunks that reuse keys.

A random Llama is cut into stages, one process each. One job trains global batches of a few long samples, so
that the pipeline fills and drains with every batch. The planner orders whole samples, then chunks. As in a
run, the first window of each case has whole samples and teaches the planner the speed of the stages; the
second one teaches it what smaller passes take; those after it are timed. The idle share is the part of a
window in which a worker is neither in a pass nor in a step, as a mean over workers. In one more window,
activations are counted: the tensors that autograd keeps for backwards, and the sums of the gradients of keys
and values. Those of chunks are predicted from the bytes that a row of the whole samples keeps.

    python -m benchmarks.pipeline_chunks [--stages N] [--threads N] [--length N] [--samples N] [--simulate]
        [--toy] [--json FILE]

With `--simulate`, nothing is trained: the simulator prices passes in proportion to their rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import pipeline_bubbles
from benchmarks.pipeline_bubbles import CPU, Cut, measured_cut, opened, write_model
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.base import chunks
from weftune.base.load import inspect
from weftune.bench.result import arguments, finish
from weftune.core.batch import Microbatch, Segment
from weftune.launch.workers import worker_environment
from weftune.plan.cost.estimate import stage_shape
from weftune.plan.cost.memory import MemoryModel, decoder_row_bytes
from weftune.plan.cost.memory_fit import rows_in_flight
from weftune.plan.layout.choose import CPU_CHUNK_ROWS
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.prices import PricedCluster
from weftune.plan.program.program import ForwardPass, GlobalBatch, MicrobatchPlan, PlacedSample, Program
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import StagePace, guess_pace, pace_prices
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.plan.window.rounds import JobWindow
from weftune.run.executor import Executor
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training
from weftune.run.workers.driver import Driver
from weftune.run.workers.groups import connect, read_position
from weftune.run.workers.paces import Paces
from weftune.run.workers.trace import make_timeline
from weftune.run.workers.worker import serve

JOB = "a"
LEARNING = 2
"""Windows of each case before those that are timed."""
SIMULATED = ((2, 2), (2, 6), (4, 2), (4, 6), (4, 12), (8, 6))
"""Stages and samples per global batch of the simulated cases."""


@dataclass(frozen=True, slots=True)
class Setting(pipeline_bubbles.Setting):
    length: int = 4096
    samples: int = 6
    """Samples of a global batch."""
    steps: int = 2
    """Global batches per window."""
    least_rows: int = CPU_CHUNK_ROWS
    """Fewest rows of a chunk."""

    @property
    def rows(self) -> int:
        return self.length

    @property
    def windows_per_case(self) -> int:
        """Number of windows of each case: the last one is counted instead of timed."""
        return LEARNING + self.windows + 1


TOY = Setting(
    stages=2, layers=2, hidden=32, vocabulary=64, length=96, samples=3, steps=1, windows=1, least_rows=8
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The windows of one case, on average."""

    name: str
    chunk_rows: int
    idle: float
    seconds_per_step: float
    peak_bytes: tuple[int, ...]
    """Largest number of bytes of activations on each worker."""


def main() -> None:
    options = chunk_arguments().parse_args()
    if options.simulate:
        finish({"simulated": simulated_cases(options.length)}, options.json)
        return
    setting = (
        TOY
        if options.toy
        else Setting(
            stages=options.stages, threads=options.threads, length=options.length, samples=options.samples
        )
    )
    finish(measure(setting), options.json)


def chunk_arguments() -> argparse.ArgumentParser:
    parser, usual = arguments(__doc__.partition("\n")[0]), Setting()
    parser.add_argument("--stages", type=int, default=usual.stages)
    parser.add_argument("--threads", type=int, default=usual.threads, help="of each process")
    parser.add_argument("--length", type=int, default=usual.length, help="tokens per sample")
    parser.add_argument("--samples", type=int, default=usual.samples, help="samples per global batch")
    parser.add_argument("--simulate", action="store_true", help="only simulate, with passes as long as rows")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    return parser


# -- simulated --------------------------------------------------------------------------------------------


def simulated_cases(length: int) -> list[dict[str, Any]]:
    """Print and return the idle shares of whole samples and of chunks, for several pipelines."""
    print("stages  samples   whole  chunks   rows of a chunk   step")
    found = []
    for stages, samples in SIMULATED:
        setting = Setting(stages=stages, length=length, samples=samples)
        whole, cut = (
            simulated(setting, (guess_pace(1),) * stages, least) for least in (0, setting.least_rows)
        )
        step = cut[1] / whole[1]
        rows = max(one.rows for one in cut[2].microbatches)
        print(f"{stages:6}  {samples:7}  {whole[0]:6.1%}  {cut[0]:6.1%}  {rows:16}  {step:5.2f}")
        found.append(
            {
                "stages": stages,
                "samples": samples,
                "whole": whole[0],
                "chunks": cut[0],
                "rows": rows,
                "step": step,
            }
        )
    return found


def simulated(setting: Setting, paces: tuple[StagePace, ...], least: int) -> tuple[float, float, Program]:
    """Return the simulated idle share and seconds of one window, and its Program."""
    program = plan(setting, paces, least, 0)
    cluster = PricedCluster(setting.stages)
    timeline = simulate(program, pace_prices(program.microbatches, paces), cluster)
    return 1 - mean(timeline.busy_fractions()), timeline.makespan, program


def plan(setting: Setting, paces: tuple[StagePace, ...], least: int, step: int) -> Program:
    rules = PipelineRules(setting.length, paces, spare_microbatches=1, min_chunk_rows=least)
    return plan_pipeline([window(setting, step)], rules)


def window(setting: Setting, step: int) -> JobWindow:
    """Return the next global batches after a step."""
    length = setting.length
    samples = tuple(PlacedSample(n, length, n * length, length - 1) for n in range(setting.samples))
    supervised = setting.samples * (length - 1)
    numbers = range(step + 1, step + setting.steps + 1)
    batches = tuple(GlobalBatch(JOB, number, samples, supervised) for number in numbers)
    return JobWindow(JOB, step, batches, (), frozenset(), frozenset())


# -- measured ---------------------------------------------------------------------------------------------


def measure(setting: Setting) -> dict[str, Any]:
    """Train whole samples, then chunks, in one pipeline whose first worker is this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spec = write_model(folder, setting)
            cut = measured_cut(spec, setting)
            print(cut.told(setting.rows), "\n", flush=True)
            peaks: list[list[int]] = []
            with (
                others(setting, peaks),
                counted_activations(setting.windows_per_case) as own,
                opened(spec, cut.held, folder, setting) as one,
            ):
                windows = [run_case(one, setting, cut, least) for least in (0, setting.least_rows)]
            peaks.insert(0, own.peaks)
            return report(setting, inspect(spec, CPU), cut, windows, peaks)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Window:
    program: Program
    idle: float
    seconds: float


def run_case(pipeline: Driver, setting: Setting, cut: Cut, least: int) -> list[Window]:
    base = pipeline.base
    adapter = JobAdapter(JOB, LoraSpec(rank=16), 0)
    pipeline.attach(
        new_training(adapter, Recipe(steps=1000), base.shape.sites, base.dtype, base.device, base.whole_sites)
    )
    pipeline.paces = Paces([held.stop - held.start for held in cut.held])
    found = []
    for number in range(setting.windows_per_case):
        # As in a run, nothing is cut until passes have been measured.
        rows = least if number else 0
        program = plan(setting, pipeline.paces.stages(), rows, number * setting.steps)
        for _ in pipeline.run(program, fetch, lambda: False):
            pass
        timeline = make_timeline(tuple(pipeline.reports))
        found.append(Window(program, 1 - mean(timeline.busy_fractions()), timeline.makespan))
    pipeline.detach(JOB)
    return found


def report(
    setting: Setting, shape: Any, cut: Cut, cases: Sequence[Sequence[Window]], peaks: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Print and return the measured numbers of both cases. `peaks` are the bytes of each worker in the last
    window of each case."""
    found = []
    for number, (name, windows) in enumerate(zip(("whole samples", "chunks"), cases, strict=True)):
        timed = windows[LEARNING:-1]
        one = Measured(
            name,
            max(plan.rows for plan in windows[-1].program.microbatches),
            mean(each.idle for each in timed),
            mean(each.seconds for each in timed) / setting.steps,
            tuple(own[number] for own in peaks),
        )
        found.append(one)
        sizes = ", ".join(f"{size / 2**20:.1f}" for size in one.peak_bytes)
        print(
            f"{name:14} {one.chunk_rows:5} rows  idle {one.idle:5.1%}  "
            f"{one.seconds_per_step:7.3f} s per step  activations {sizes} MiB"
        )
    whole, cut_up = found
    predicted = predicted_bytes(shape, cut, [case[-1].program for case in cases], whole.peak_bytes)
    errors = [mine / theirs - 1 for mine, theirs in zip(predicted, cut_up.peak_bytes, strict=True)]
    share = cut_up.seconds_per_step / whole.seconds_per_step
    print(f"\nA step takes {share:.2f} of its time with whole samples.")
    print(f"Predicted activations of chunks: {', '.join(f'{error:+.1%}' for error in errors)} of measured.")
    return {
        "setting": asdict(setting),
        "cases": [asdict(one) for one in found],
        "step": share,
        "predicted_bytes": predicted,
        "errors": errors,
    }


def predicted_bytes(
    shape: Any, cut: Cut, programs: Sequence[Program], whole_bytes: Sequence[int]
) -> list[float]:
    """Return the activation bytes of chunks on each worker, from those of whole samples."""
    memory = MemoryModel(shape, 0, layout=pipeline_layout(cut.held))
    whole, chunked = programs
    rows = rows_in_flight(memory, whole, [0.0] * len(cut.held))
    each = [size / count for size, count in zip(whole_bytes, rows, strict=True)]
    shares = [
        decoder_row_bytes(stage_shape(shape, held)) / size for held, size in zip(cut.held, each, strict=True)
    ]
    return [count * size for count, size in zip(rows_in_flight(memory, chunked, shares), each, strict=True)]


def fetch(plan: MicrobatchPlan, _kind: type[ForwardPass]) -> Microbatch:
    """Return random tokens, all of them supervised, for a microbatch of one sample or chunk."""
    ((segment,),) = (plan.segments,)
    (placed,) = segment.samples
    tokens_T = torch.randint(0, 64, (placed.length,))
    return Microbatch(
        tokens_T=tokens_T,
        positions_T=torch.arange(placed.length) + (placed.chunk_start or 0),
        targets_T=tokens_T.roll(-1),
        token_index_T=torch.arange(placed.length) + placed.offset,
        sample_lengths=(placed.length,),
        segments=(Segment(segment.job, segment.step, 0, placed.length),),
    )


# -- activations ------------------------------------------------------------------------------------------


class KeptTensor:
    """A tensor that autograd keeps, for as long as it does."""

    def __init__(self, counter: ActivationCounter, tensor: Tensor) -> None:
        self.tensor = tensor
        weakref.finalize(self, counter.release, counter.hold(tensor))


class ActivationCounter:
    """Bytes of all tensors that are kept from a forward to its backward; memory that tensors share counts
    once."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        """Largest number of bytes in each window that was counted."""
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._held = self._peak = 0

    def pack(self, tensor: Tensor) -> KeptTensor | Tensor:
        source = tensor if tensor._base is None else tensor._base
        return tensor if isinstance(source, nn.Parameter) else KeptTensor(self, tensor)

    def unpack(self, kept: KeptTensor | Tensor) -> Tensor:
        return kept.tensor if isinstance(kept, KeptTensor) else kept

    def hold(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._users[address] = self._users.get(address, 0) + 1
        if self._users[address] == 1:
            self._sizes[address] = storage.nbytes()
            self._held += storage.nbytes()
            self._peak = max(self._peak, self._held)
        return address

    def release(self, address: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._held -= self._sizes.pop(address)

    def begin_window(self) -> None:
        self._peak = self._held

    def end_window(self) -> None:
        self.peaks.append(self._peak)


@contextmanager
def counted_activations(windows: int) -> Iterator[ActivationCounter]:
    """Count the activations of every last one of `windows` windows that this process runs in the context."""
    counter, number = ActivationCounter(), count(1)
    run, zeros = Executor.run, chunks._zeros_like

    def counted_run(self: Executor, *given: Any, **named: Any) -> Iterator[Any]:
        if next(number) % windows:
            yield from run(self, *given, **named)
            return
        counter.begin_window()
        chunks._zeros_like = counted_zeros
        with saved_tensors_hooks(counter.pack, counter.unpack):
            yield from run(self, *given, **named)
        chunks._zeros_like = zeros
        counter.end_window()

    def counted_zeros(x: Tensor) -> Tensor:
        made = zeros(x)
        weakref.finalize(made, counter.release, counter.hold(made))
        return made

    Executor.run = counted_run  # type: ignore[method-assign]
    try:
        yield counter
    finally:
        Executor.run, chunks._zeros_like = run, zeros  # type: ignore[method-assign]


# -- processes --------------------------------------------------------------------------------------------


@contextmanager
def others(setting: Setting, peaks: list[list[int]]) -> Iterator[None]:
    """Run all workers but the first, which this process becomes. Their peaks are added to `peaks` at the
    end."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    environments = [
        worker_environment(worker, setting.stages, store.port, time.time())
        for worker in range(setting.stages)
    ]
    pipes = [context.Pipe(duplex=False) for _ in environments[1:]]
    processes = [
        context.Process(target=be_worker, args=(one, setting, sender), daemon=True)
        for one, (_, sender) in zip(environments[1:], pipes, strict=True)
    ]
    before = dict(os.environ)
    for process in processes:
        process.start()
    os.environ.update(environments[0])
    try:
        yield
        peaks += [receiver.recv() for receiver, _ in pipes]
        for process in processes:
            process.join(30)
    finally:
        os.environ.clear()
        os.environ.update(before)
        for process in processes:
            process.kill()


def be_worker(variables: dict[str, str], setting: Setting, sender: Connection) -> None:
    os.environ.update(variables)
    torch.set_num_threads(setting.threads)
    position = read_position()
    assert position is not None
    with counted_activations(setting.windows_per_case) as counter:
        serve(connect(position, CPU), CPU)
    sender.send(counter.peaks)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
