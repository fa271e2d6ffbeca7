"""How much of the sums over shards overlaps with computation, on CPU processes with a delayed link.

A random model with Llama 3's proportions of attention and feed-forward is divided into two shards. Every sum
of hidden states completes no earlier than on a link with a fixed number of bytes per second, on which one sum
follows another. The link is chosen so that the sums take a given share of the time of all computation. While
a process waits for the link, it uses no core. With `--processes 2`, each shard has a process, and gloo
computes the sums. With `--processes 1`, there is only the process of the first shard, whose sums only take
time, and the clock counts the seconds in which this process computes or waits for the link. So other work on
the machine does not count, while two processes wait for each other whenever one of them has no core.

A round is one global batch of a job with its optimizer step. It is measured without overlap, and with pairs
of microbatches that overlap. Each time is divided by the busier of
computation (the same round with sums that do nothing) and link. The third row is what the simulator predicts
from the measured times of half layers. Rounds take turns, and the fastest of each kind counts.

    python -m benchmarks.shard_overlap [--processes N] [--repeats N] [--layers N] [--toy] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pipeline_bubbles import fetch
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.shards import load_shard
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.core.shapes import LayerRange
from weftune.core.shards import ShardTeam, WaitForSum
from weftune.launch.workers import worker_environment
from weftune.plan.cost.time import Line
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.prices import HalfPrice, PassPrice, PricedCluster, Prices
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Forward,
    ForwardHalf,
    GlobalBatch,
    HalfPass,
    PlacedSample,
    Program,
)
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import StagePace
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Pacing, plan_window
from weftune.run.executor import Executor
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training
from weftune.run.workers.agreed import Agreed, TimedAction
from weftune.run.workers.groups import WorkerConnections, WorkerPosition, connect, read_position
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import shard_team, worker_executor

CPU = torch.device("cpu")
SHARDS = 2
JOB = "job"
SHARES = (0.3, 0.6, 1.0)
"""Times of the link as shares of the time of computation."""
Order = Literal["plain", "overlapped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    processes: int = SHARDS
    layers: int = 8
    hidden: int = 384
    """Width of the hidden states. The feed-forward is 3.5 times as wide, and there are four query heads for
    each key/value head, as in Llama 3 8B."""
    length: int = 256
    """Tokens of a sample. A microbatch is one sample."""
    samples: int = 4
    """Samples of the job's global batch."""
    repeats: int = 7
    """Rounds of each kind, of which the fastest counts."""


TOY = Setting(layers=2, hidden=64, length=16, repeats=1)


class WallClock:
    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class ComputeClock(WallClock):
    """A clock that counts the seconds in which this process computes, and its waits without waiting."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.process_time() + self._waited

    def wait_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())


class DelayedLink:
    """A link between the shards, on which sums of hidden states follow one another."""

    def __init__(self, clock: WallClock) -> None:
        self.clock = clock
        self.seconds_per_byte = 0.0
        self.is_used = True
        """Whether sums are computed at all. Otherwise every shard keeps its own values."""
        self.busy_seconds = 0.0
        self.summed_bytes = 0
        self._free_at = 0.0

    def delay(self, team: ShardTeam) -> ShardTeam:
        """Return the team with sums that take the time of this link."""
        assert team.start_sum is not None
        start_at_once = team.start_sum

        def start_sum(tensor: Tensor) -> WaitForSum:
            if tensor.ndim == 1:
                # Gradients of adapters, flags and sums of losses are small, and belong to no half layer.
                return start_at_once(tensor)
            size = tensor.numel() * tensor.element_size()
            self.summed_bytes += size
            if not self.is_used:
                return lambda: None
            wait_for_sum = start_at_once(tensor)
            seconds = size * self.seconds_per_byte
            self.busy_seconds += seconds
            self._free_at = end = max(self.clock.now(), self._free_at) + seconds

            def wait() -> None:
                wait_for_sum()
                self.clock.wait_until(end)

            return wait

        return replace(team, sum_over_shards=lambda tensor: start_sum(tensor)(), start_sum=start_sum)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Measured seconds of a round, and its actions with their times of the wall clock."""

    seconds: float
    link_seconds: float
    summed_bytes: int
    seconds_per_wall_second: float
    actions: tuple[TimedAction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResult:
    """Times of a round, each divided by the busier of computation and link."""

    share: float
    compute_seconds: float
    link_seconds: float
    plain: float
    overlapped: float
    predicted: float


def main() -> None:
    options = overlap_arguments().parse_args()
    usual = Setting(layers=options.layers, repeats=options.repeats)
    setting = replace(TOY if options.toy else usual, processes=options.processes)
    found = measure(setting)
    print(table(found))
    finish({"setting": asdict(setting), "shares": [asdict(one) for one in found]}, options.json)


def overlap_arguments() -> argparse.ArgumentParser:
    parser, usual = arguments("Overlap of sums over shards with computation, on CPU processes."), Setting()
    parser.add_argument("--processes", type=int, choices=(1, SHARDS), default=usual.processes)
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--repeats", type=int, default=usual.repeats, help="rounds of each kind")
    parser.add_argument("--toy", action="store_true", help="tiny, to see that it runs")
    return parser


def table(found: Sequence[ShareResult]) -> str:
    names = ("link ÷ compute", "as measured", "without overlap", "with overlap", "predicted with overlap")
    lines = [" | ".join(names)]
    for one in found:
        measured_share = one.link_seconds / one.compute_seconds
        numbers = (one.share, measured_share, one.plain, one.overlapped, one.predicted)
        cells = (f"{number:{len(name)}.2f}" for name, number in zip(names, numbers, strict=True))
        lines.append(" | ".join(cells))
    return "\n".join(lines)


# -- processes -------------------------------------------------------------------------------------------


def measure(setting: Setting) -> list[ShareResult]:
    """Return the results that the first of the processes has measured."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        spec = write_model(Path(name), setting)
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=be_shard, args=(environment, spec, setting, sender), daemon=True)
            for environment in (
                worker_environment(worker, setting.processes, store.port, time.time())
                for worker in range(setting.processes)
            )
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            found: list[ShareResult] = receiver.recv()
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return found


def write_model(folder: Path, setting: Setting) -> BaseSpec:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden * 7 // 2,
        num_hidden_layers=setting.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=setting.length,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return BaseSpec(model=str(folder), dtype="float32")


def be_shard(variables: dict[str, str], spec: BaseSpec, setting: Setting, sender: Connection) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    connections, team = join_team()
    link = DelayedLink(ComputeClock() if setting.processes == 1 else WallClock())
    delayed, whole = link.delay(team), LayerRange(0, setting.layers, setting.layers)
    base = load_shard(spec, CPU, delayed, whole)
    transport = Transport(connections, base.shape.hidden, base.dtype, CPU)
    part = pipeline_layout([whole], shards=SHARDS, overlaps=True).for_worker(0)
    executor, agreed = worker_executor(base, part, transport, 0, delayed)
    adapter, recipe = JobAdapter(JOB, LoraSpec(rank=8), 0), Recipe(steps=10**6)
    executor.attach(new_training(adapter, recipe, base.trained_sites, base.dtype, CPU, base.whole_sites))
    found = Rounds(executor, agreed, link, setting).measure_shares()
    if team.shard == 0:
        sender.send(found)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def join_team() -> tuple[WorkerConnections, ShardTeam]:
    """Return the connections of this process and its team, which is a pretence if there is only one
    process."""
    if (position := read_position()) is None:
        alone = WorkerConnections(WorkerPosition(0, 1), {})
        return alone, ShardTeam(0, SHARDS, lambda tensor: None, start_sum=lambda tensor: lambda: None)
    connections = connect(replace(position, shards=SHARDS), CPU)
    team = shard_team(connections)
    assert team is not None
    return connections, team


# -- rounds ----------------------------------------------------------------------------------------------


class Rounds:
    def __init__(self, executor: Executor, agreed: Agreed, link: DelayedLink, setting: Setting) -> None:
        self._executor, self._agreed, self._link, self._setting = executor, agreed, link, setting
        self._step = 0

    def measure_shares(self) -> list[ShareResult]:
        """Return the results for all shares. All processes must call this at the same time."""
        orders: tuple[Order, ...] = ("plain", "overlapped")
        for order in orders:
            self._run(order, 0.0)
        rate_of_compute = self._rate_of_compute()
        rates = [share * rate_of_compute for share in SHARES]
        times: dict[tuple[Order, float | None], list[RoundTime]] = {}
        for _ in range(self._setting.repeats):
            for order in orders:
                for used in (None, *rates):
                    times.setdefault((order, used), []).append(self._run(order, used))
        best = {key: min(rounds, key=lambda one: one.seconds) for key, rounds in times.items()}
        compute_seconds = best["plain", None].seconds
        found = []
        for share, rate in zip(SHARES, rates, strict=True):
            plain, overlapped = best["plain", rate], best["overlapped", rate]
            busier = max(compute_seconds, overlapped.link_seconds)
            predicted = self._predicted_seconds(best["overlapped", None], rate)
            found.append(
                ShareResult(
                    share=share,
                    compute_seconds=compute_seconds,
                    link_seconds=overlapped.link_seconds,
                    plain=plain.seconds / busier,
                    overlapped=overlapped.seconds / busier,
                    predicted=predicted / busier,
                )
            )
        return found

    def _rate_of_compute(self) -> float:
        """Return the seconds per byte with which the sums of a round take as long as its computation. All
        processes agree on it."""
        rounds = [self._run("plain", None) for _ in range(2 * self._setting.repeats)]
        fastest = min(rounds, key=lambda one: one.seconds)
        rate = torch.tensor([fastest.seconds / fastest.summed_bytes], dtype=torch.float64)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(rate, 0)
        return rate.item()

    def _run(self, order: Order, rate: float | None) -> RoundTime:
        """Run a round. Sums take `rate` seconds per byte; with None, they do nothing."""
        link, self._step = self._link, self._step + 1
        program = self._plan(order)
        torch.manual_seed(self._step)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        link.is_used, link.seconds_per_byte = rate is not None, rate or 0.0
        link.busy_seconds, link.summed_bytes = 0.0, 0
        began, wall_began = link.clock.now(), time.perf_counter()
        for _ in self._executor.run(program, fetch):
            pass
        seconds, wall_seconds = link.clock.now() - began, time.perf_counter() - wall_began
        link.is_used, link.seconds_per_byte = True, 0.0
        passes = Forward | Backward | HalfPass
        actions = tuple(one for one in self._agreed.report.times if isinstance(one.action, passes))
        return RoundTime(seconds, link.busy_seconds, link.summed_bytes, seconds / wall_seconds, actions)

    def _plan(self, order: Order) -> Program:
        setting, step = self._setting, self._step
        count, length = setting.samples, setting.length
        placed = tuple(PlacedSample(at, length, at * length) for at in range(count))
        batch = GlobalBatch(JOB, step, placed, count * (length - 1))
        window = JobWindow(JOB, step - 1, (batch,), (), frozenset(), frozenset())
        layout = replace(self._executor.part.layout, overlaps=order == "overlapped")
        pacing = Pacing((StagePace(Line(0.0, 1.0), Line(0.0, 2.0)),))
        return plan_window([window], layout, length, pacing=pacing)

    def _predicted_seconds(self, computed: RoundTime, rate: float) -> float:
        """Return the simulated seconds of an overlapped round, given the times of its actions without
        sums."""

        def seconds_of(kind: type[Forward | Backward]) -> float:
            return computed.seconds_per_wall_second * mean(
                one.stop - one.start for one in computed.actions if isinstance(one.action, kind)
            )

        def half_seconds(kind: type[HalfPass], parity: int) -> float:
            return computed.seconds_per_wall_second * mean(
                one.stop - one.start
                for one in computed.actions
                if isinstance(one.action, kind) and one.action.index % 2 == parity
            )

        setting, half_layers = self._setting, 2 * self._setting.layers
        hidden_bytes = 4 * setting.hidden * setting.length
        one_sum = rate * hidden_bytes
        forward, backward = (
            HalfPrice(half_seconds(kind, 0), half_seconds(kind, 1), one_sum)
            for kind in (ForwardHalf, BackwardHalf)
        )
        # The embeddings are summed once, and the gradients of the last hidden states.
        ends = 2 * one_sum
        price = PassPrice(
            forward.computed_seconds(half_layers) + half_layers * one_sum + seconds_of(Forward) + ends,
            backward.computed_seconds(half_layers) + half_layers * one_sum + seconds_of(Backward),
            forward_sum_seconds=half_layers * one_sum + ends,
            backward_sum_seconds=half_layers * one_sum,
            forward_half=forward,
            backward_half=backward,
        )
        program = self._plan("overlapped")
        timeline = simulate(program, Prices(((price,),) * len(program.microbatches)), PricedCluster(1))
        return max(one.stop for one in timeline.events if isinstance(one.action, Backward))


if __name__ == "__main__":
    main()
