"""Baselines that need separate processes: many PEFT jobs at once on one device, or a job that modifies its
process. A child process reports when it began and ended its steps, on the clock that all processes of a
machine share."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weftune.bench.baselines import BaselineWork, job_step, peft_model
from weftune.bench.sizes import Size, random_ids
from weftune.bench.timing import Hardware, MeasuredStep, Repeats, peak_bytes, reset_memory, synchronise

WAIT_SECONDS = 150.0
"""Maximum seconds that the processes of a measurement wait for one another. After that, the measurement is
abandoned."""
CONTEXT_BYTES = 700 << 20
SLACK = 1.12
"""Safety factor by which the memory of a process's tensors is multiplied. The memory of its CUDA context,
`CONTEXT_BYTES`, is added."""
OUT_OF_MEMORY, PEER_TIMEOUT = "out of memory", "another process did not come"


@dataclass(frozen=True, slots=True)
class ProcessTask:
    size: Size
    work: BaselineWork
    hardware: Hardware
    pace: Repeats


@dataclass(frozen=True, slots=True)
class Answer:
    start: float = 0.0
    stop: float = 0.0
    peak_bytes: int = 0
    measured: MeasuredStep = field(default_factory=lambda: MeasuredStep(None, None))
    problem: str = ""


def peft_in_processes(task: ProcessTask, job_peak_bytes: int | None) -> MeasuredStep:
    """Measure all jobs at once, each in a separate PEFT process with its own copy of the weights.

    If memory is short, as many jobs as fit run at a time. `job_peak_bytes` is the peak memory, in bytes, of a
    single job.
    """
    jobs = task.work.jobs
    for count in range(min(jobs, _fitting_count(task.hardware, job_peak_bytes)), 0, -1):
        answers = _run_children(_ConcurrentJob(task), count)
        problems = [answer.problem for answer in answers if answer.problem]
        if not problems:
            break
        if OUT_OF_MEMORY not in problems:
            told = next((problem for problem in problems if problem != PEER_TIMEOUT), PEER_TIMEOUT)
            return MeasuredStep(None, None, told)
    else:
        return MeasuredStep(None, None, "not even one process fits")
    steps = task.pace.blocks * task.pace.steps
    together = max(a.stop for a in answers) - min(a.start for a in answers)
    note = "" if count == jobs else f"{count} processes fit, so {jobs} jobs take {jobs / count:.1f} turns"
    return MeasuredStep(together / steps * jobs / count, sum(a.peak_bytes for a in answers) or None, note)


def _fitting_count(hardware: Hardware, job_peak_bytes: int | None) -> int:
    if hardware.device.type != "cuda" or job_peak_bytes is None:
        return 1 << 30
    reset_memory(hardware.device)
    free, _ = torch.cuda.mem_get_info(hardware.device)
    return max(1, int(free // (job_peak_bytes * SLACK + CONTEXT_BYTES)))


def run_in_process(run: Callable[[ProcessTask], MeasuredStep], task: ProcessTask) -> MeasuredStep:
    """Call `run`, a function at the top level of a module, in a separate process and return its result."""
    reset_memory(task.hardware.device)
    (answer,) = _run_children(_SingleRun(run, task), 1)
    return MeasuredStep(None, None, answer.problem) if answer.problem else answer.measured


def _run_children(function: Callable[[Any], Answer], count: int) -> list[Answer]:
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(count), spawn.Queue()
    children = [
        spawn.Process(target=_run_child, args=(function, barrier, answers), daemon=True) for _ in range(count)
    ]
    for child in children:
        child.start()
    heard = _collect_answers(answers, count)
    for child in children:
        child.join(10)
        if child.is_alive():
            child.kill()
            child.join()
    return heard


def _collect_answers(answers: Any, count: int) -> list[Answer]:
    deadline = time.monotonic() + 2 * WAIT_SECONDS
    collected: list[Answer] = []
    while len(collected) < count:
        try:
            collected.append(answers.get(timeout=max(0.1, deadline - time.monotonic())))
        except queue.Empty:
            return [*collected, Answer(problem="a process gave no answer")]
    return collected


def _run_child(function: Callable[[Any], Answer], barrier: Any, answers: Any) -> None:
    try:
        answers.put(function(barrier))
    except threading.BrokenBarrierError:
        answers.put(Answer(problem=PEER_TIMEOUT))
    except Exception as error:
        barrier.abort()
        if not _is_out_of_memory(error):
            traceback.print_exc()
        answers.put(Answer(problem=OUT_OF_MEMORY if _is_out_of_memory(error) else first_line(error)))


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the error is a lack of memory, which torch, cuBLAS and the driver report with different
    messages."""
    words = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "ALLOC_FAILED" in words


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:100]


@dataclass(frozen=True, slots=True)
class _SingleRun:
    run: Callable[[ProcessTask], MeasuredStep]
    task: ProcessTask

    def __call__(self, barrier: Any) -> Answer:
        return Answer(measured=self.run(self.task))


@dataclass(frozen=True, slots=True)
class _ConcurrentJob:
    """One of several jobs that run in separate processes and begin at the same time."""

    task: ProcessTask

    def __call__(self, barrier: Any) -> Answer:
        work, hardware, pace = self.task.work, self.task.hardware, self.task.pace
        if hardware.device.type == "cpu":
            torch.set_num_threads(1)
        model = peft_model(self.task.size, work.rank, hardware, float32_adapters=False)
        step = job_step(model, random_ids(self.task.size, work.batch, work.length, hardware))
        for _ in range(pace.warmup):
            step()
        synchronise(hardware.device)
        barrier.wait(WAIT_SECONDS)
        began = time.monotonic()
        for _ in range(pace.blocks * pace.steps):
            step()
        synchronise(hardware.device)
        return Answer(began, time.monotonic(), peak_bytes(hardware.device) or 0)
