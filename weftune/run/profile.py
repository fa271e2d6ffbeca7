"""Measurement of the time and peak memory of passes over a shallow base, and of optimizer steps, on this
device. The executor runs the passes, so kernels and CUDA graphs are the same as in training.

Two bases of the same widths and different depths are measured, to separate the cost of a layer from all other
costs. Weights are random.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.batch import IGNORED, Microbatch, Segment
from weftune.core.shapes import ModelShape
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.profile import LayeredPass, Profile, ProfileKey, cpu_threads, profile_key
from weftune.plan.cost.time import PassTime, StateTime
from weftune.plan.program.program import (
    Backward,
    Evaluate,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    SegmentPlan,
    Step,
)
from weftune.run.assemble import resident_executor
from weftune.run.events import OutOfMemory, Passed
from weftune.run.measure.memory import peak_bytes, release_cached_memory, reset_peak, resident_bytes
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training

DEPTHS = (1, 4)
RANKS = (8, 64)
REPEATS = {"cpu": 3, "cuda": 5}
"""Maps each device type to the number of measured passes per `ProfileCase`. On a GPU two unmeasured passes
precede them: one compiles kernels, one captures a CUDA graph."""
RECIPE = Recipe(steps=10**9, learning_rate=1e-6, schedule="constant")

Watch = Callable[[int, int], None]
"""A callback that reports the progress of the measurement. It receives the number of cases measured so far
and the number of all cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCase:
    """The sizes of a pass to measure. Every job has the same number of samples, and all samples have the same
    length."""

    jobs: int = 1
    samples: int
    length: int
    rank: int = RANKS[0]
    supervised_fraction: float = 1.0
    """Fraction of a sample's tokens that are supervised. The model's head is computed only for these
    tokens."""
    training: bool = True

    @property
    def tokens(self) -> int:
        return self.jobs * self.samples * self.length


CASES = (
    ProfileCase(samples=1, length=64),
    ProfileCase(samples=4, length=64),
    ProfileCase(samples=1, length=256),
    ProfileCase(samples=4, length=64, supervised_fraction=0.1),
    ProfileCase(samples=16, length=32, supervised_fraction=0.5),
    ProfileCase(samples=1, length=512, supervised_fraction=0.1),
    ProfileCase(samples=8, length=128, supervised_fraction=0.25),
    ProfileCase(samples=8, length=128),
    ProfileCase(jobs=4, samples=1, length=64, supervised_fraction=0.5),
    ProfileCase(jobs=4, samples=4, length=32, supervised_fraction=0.1),
    ProfileCase(samples=4, length=64, rank=RANKS[1], supervised_fraction=0.5),
    ProfileCase(jobs=2, samples=4, length=64, rank=RANKS[1], supervised_fraction=0.1),
    ProfileCase(samples=1, length=64, training=False),
    ProfileCase(samples=8, length=64, supervised_fraction=0.25, training=False),
    ProfileCase(samples=1, length=512, supervised_fraction=0.25, training=False),
    ProfileCase(jobs=4, samples=1, length=64, supervised_fraction=0.1, training=False),
    ProfileCase(samples=4, length=64, rank=RANKS[1], training=False),
)
"""Sizes of the passes that are measured on a CPU. On a GPU they are multiplied by `GPU_SCALE`, because with
smaller passes only the time of kernel launches would be measured."""
GPU_SCALE = 4
CONCURRENT_CASE = CASES[1]
"""Sizes of the pass that is measured a second time while other work runs in another thread (`concurrent_work`
in `measure_profile`)."""


def measure_profile(
    config: PretrainedConfig,
    shape: ModelShape,
    model: str,
    device: torch.device,
    watch: Watch,
    concurrent_work: Callable[[], object] | None = None,
) -> Profile:
    """Return the measured profile of a device: the times and peak memory from which runs are planned. `shape`
    is the shape of the whole base, which is not loaded. `concurrent_work` is work that a training process
    does in another thread during its first passes."""
    began = time.monotonic()
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.bytes_per_value]
    scale = 1 if device.type == "cpu" else GPU_SCALE
    cases = [replace(case, samples=scale * case.samples) for case in CASES if case.length <= shape.context]
    passes: list[LayeredPass] = []
    steps: list[StateTime] = []
    first_seconds: list[float] = []
    delay = 0.0
    peaks = _Peaks(device)
    for number, depth in enumerate(DEPTHS):
        with _Bench(_shallow_base(config, depth, dtype, device), peaks) as bench:
            for done, case in enumerate(cases):
                watch(number * len(cases) + done, len(DEPTHS) * len(cases))
                bench.measure(case)
            if concurrent_work is not None and depth == DEPTHS[-1] and CONCURRENT_CASE in cases:
                delay = bench.measure_delay(CONCURRENT_CASE, concurrent_work)
        passes += [LayeredPass(depth, *one) for one in bench.passes]
        steps += bench.steps
        first_seconds += bench.first_seconds
    watch(len(DEPTHS) * len(cases), len(DEPTHS) * len(cases))
    return Profile(
        key=device_profile_key(shape, device),
        model=model,
        passes=tuple(passes),
        steps=tuple(steps),
        seconds=time.monotonic() - began,
        first_seconds=first_seconds[0] + delay if first_seconds and device.type == "cpu" else 0.0,
    )


def device_profile_key(shape: ModelShape, device: torch.device) -> ProfileKey:
    if device.type == "cuda":
        return profile_key(shape, torch.cuda.get_device_name(device), 0)
    return profile_key(shape, "cpu", cpu_threads())


def _shallow_base(
    config: PretrainedConfig, layer_count: int, dtype: torch.dtype, device: torch.device
) -> Base:
    """Return a base with random weights that has the widths of `config` and `layer_count` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layer_count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layer_count]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Base.from_model(model, BaseSpec(model="random weights"), device)


class _Peaks:
    """The peak memory use in bytes since the start of the profile, minus the memory in use before it. The
    peak of a process never falls, so a pass is measured only if it exceeds all earlier peaks. The measured
    peak then equals that of a process that runs no larger pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        release_cached_memory(device)
        self._counts = reset_peak(device)
        self._before = resident_bytes(device)
        self._highest = 0

    def excess_bytes(self, known_bytes: int) -> int:
        """Return the number of bytes by which a new peak of memory use exceeds `known_bytes`, or 0 if there
        has been no new peak since the last call."""
        highest = peak_bytes(self._device) - self._before if self._counts else 0
        risen, self._highest = highest > self._highest, max(highest, self._highest)
        return max(0, highest - known_bytes) if risen else 0


class _Bench:
    """A shallow base with its executor, on which the profile's cases are run, and the times and peaks
    measured so far."""

    def __init__(self, base: Base, peaks: _Peaks) -> None:
        self._base, self._peaks = base, peaks
        self._executor = resident_executor(base)
        self._repeats = REPEATS[base.device.type]
        self._warmup = 1 if self._executor.captures is None else 2
        self.passes: list[tuple[PassTime, int]] = []
        """Each measured pass: its time, and its peak memory use in bytes without the base and the adapters.
        The latter is 0 if the peak did not exceed all earlier ones."""
        self.steps: list[StateTime] = []
        self.first_seconds: list[float] = []
        """For each case, the seconds by which the first pass took longer than a later pass."""

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.restore_base()

    def measure(self, case: ProfileCase) -> None:
        """Run the passes of a case several times and record the median time, unless they do not fit into
        memory."""
        with self._attach_jobs(case) as names, suppress(OutOfMemory):
            times, steps = self._measure_times(case, names, self._warmup + self._repeats)
            memory = MemoryModel(self._base.shape, budget_bytes=0)
            parameters = sum(self._executor.attached[name].layout.size for name in names)
            known = self._base.shape.base_bytes + parameters * memory.bytes_per_parameter
            settled = [one for one in times[self._warmup :] if one.settled] or times[-1:]
            middle = replace(
                settled[0],
                forward=median(one.forward for one in settled),
                backward=median(one.backward for one in settled),
                settled=True,
            )
            self.passes.append((middle, self._peaks.excess_bytes(known)))
            self.steps += steps[self._warmup :]
            self.first_seconds.append(max(0.0, times[0].seconds - middle.seconds))

    def measure_delay(self, case: ProfileCase, work: Callable[[], object]) -> float:
        """Run passes of `case` until `work` has ended in another thread. Return the total seconds by which
        the work delayed these passes."""
        with self._attach_jobs(case) as names:
            rounds = self._warmup + self._repeats
            times, _ = self._measure_times(case, names, rounds)
            usual = median(one.seconds for one in times[self._warmup :])
            thread, longer = Thread(target=work), 0.0
            thread.start()
            while thread.is_alive():
                (one,), _ = self._measure_times(case, names, 1, rounds)
                longer, rounds = longer + max(0.0, one.seconds - usual), rounds + 1
            thread.join()
        return longer

    @contextmanager
    def _attach_jobs(self, case: ProfileCase) -> Iterator[list[str]]:
        """Return a context in which the jobs of a case are attached to the base. The context yields the list
        of the jobs' names."""
        names = [f"job{number}" for number in range(case.jobs)]
        base, spec = self._base, LoraSpec(rank=case.rank, alpha=float(case.rank))
        for name in names:
            adapter = JobAdapter(name, spec, seed=0)
            self._executor.attach(new_training(adapter, RECIPE, base.shape.sites, base.dtype, base.device))
        try:
            yield names
        finally:
            for name in names:
                self._executor.detach(name)

    def _measure_times(
        self, case: ProfileCase, names: Sequence[str], rounds: int, previous_steps: int = 0
    ) -> tuple[list[PassTime], list[StateTime]]:
        """Run `rounds` passes, each followed by an optimizer step of every job if the case is a training
        pass. Return the times of the passes and of the steps. `previous_steps` is the number of passes that
        these jobs have run before."""
        times, steps = [], []
        program, vocabulary = _program(case, names, rounds, previous_steps), self._base.shape.vocabulary
        for event in self._executor.run(program, lambda plan, _: _microbatch(plan, vocabulary)):
            if isinstance(event, Passed):
                times.append(event.time)
            elif isinstance(event, StateTime):
                steps.append(event)
        return times, steps


def _program(case: ProfileCase, names: Sequence[str], rounds: int, previous_steps: int) -> Program:
    actions: list[Forward | Backward | Evaluate | Step] = []
    batches, microbatches = [], []
    for number in range(rounds):
        round_ = [_global_batch(case, name, previous_steps + number + 1) for name in names]
        segments = tuple(SegmentPlan(batch.job, batch.step, batch.samples) for batch in round_)
        microbatches.append(MicrobatchPlan(segments, padded_rows=case.tokens))
        if case.training:
            batches += round_
            actions += [Forward(number), Backward(number), *(Step(batch.job, batch.step) for batch in round_)]
        else:
            actions.append(Evaluate(number))
    return Program(case.tokens, tuple(microbatches), tuple(batches), (tuple(actions),))


def _global_batch(case: ProfileCase, name: str, step: int) -> GlobalBatch:
    supervised = max(1, int(case.supervised_fraction * (case.length - 1)))
    samples = tuple(
        PlacedSample(number, case.length, number * case.length, supervised) for number in range(case.samples)
    )
    return GlobalBatch(name, step, samples, supervised * case.samples)


def _microbatch(plan: MicrobatchPlan, vocabulary: int) -> Microbatch:
    """Return a microbatch of random tokens; the last rows of each sample are supervised."""
    samples = [one for segment in plan.segments for one in segment.samples]
    tokens_T = torch.randint(vocabulary, (plan.tokens,))
    targets_T = torch.full((plan.tokens,), IGNORED)
    for one, stop in zip(samples, accumulate(one.length for one in samples), strict=True):
        targets_T[stop - one.supervised_tokens : stop] = torch.randint(vocabulary, (one.supervised_tokens,))
    stops = list(accumulate(segment.tokens for segment in plan.segments))
    return Microbatch(
        tokens_T=tokens_T,
        positions_T=torch.cat([torch.arange(one.length) for one in samples]),
        targets_T=targets_T,
        token_index_T=torch.cat([one.offset + torch.arange(one.length) for one in samples]),
        sample_lengths=tuple(one.length for one in samples),
        segments=tuple(
            Segment(one.job, one.step, stop - one.tokens, stop)
            for one, stop in zip(plan.segments, stops, strict=True)
        ),
    )
