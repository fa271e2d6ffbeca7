"""PEFT in its fastest form: Liger's kernels, torch.compile, and batches without padding.

Shapes: T tokens of all samples of a job, concatenated in one row.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weftune.bench.baselines import BaselineWork, make_adamw, peft_model
from weftune.bench.processes import ProcessTask, first_line, run_in_process
from weftune.bench.sizes import random_ids
from weftune.bench.timing import Hardware, MeasuredStep, measure, repeat_step, reset_memory


def peft_with_liger(task: ProcessTask) -> MeasuredStep:
    """Measure one job's optimizer step in PEFT with Liger's kernels, and multiply its seconds by the number
    of jobs.

    The function is called in a separate process, since Liger modifies the classes of transformers.
    """
    if lacking := find_missing_package(task.hardware):
        return MeasuredStep(None, None, lacking)
    return run_in_process(_measure_liger, task)


def find_missing_package(hardware: Hardware) -> str:
    """Return a sentence that says why Liger cannot run on this machine. Empty if it can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    if hardware.device.type != "cuda":
        return "liger_kernel needs a GPU"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "no C compiler, which torch.compile and Triton need"
    return ""


def _measure_liger(task: ProcessTask) -> MeasuredStep:
    import liger_kernel.transformers

    getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{task.size.family}")()
    try:
        return measure_padding_free(task, compiled=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        note = f"without torch.compile, which failed: {first_line(error)}"
    torch.compiler.reset()
    reset_memory(task.hardware.device)
    return replace(measure_padding_free(task, compiled=False), note=note)


def measure_padding_free(task: ProcessTask, compiled: bool) -> MeasuredStep:
    model = peft_model(task.size, task.work.rank, task.hardware, float32_adapters=False)
    if compiled:
        compile_layers(model)
    one = measure(repeat_step(packed_step(model, task)), task.hardware, task.pace)
    assert one.seconds is not None
    return MeasuredStep(one.seconds * task.work.jobs, one.peak_bytes)


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile the model layer by layer.

    If the whole model is one graph, transformers cannot see that a row holds one sample, and SDPA gets a mask
    instead of its fast causal path. All layers also share one compiled layer.
    """
    torch._dynamo.config.recompile_limit = 128
    for layer in model.get_base_model().model.layers:
        layer.compile(backend=backend)


def packed_step(model: Any, task: ProcessTask) -> Callable[[], None]:
    """Return a function that makes an optimizer step on the job's samples, concatenated in one row. Positions
    that restart at 0 separate the samples.

    flash_attention_2 in transformers supports such a row directly, but needs a package that is seldom
    installed; PyTorch's SDPA, which is used instead, gets a block mask if there are several samples.
    """
    work: BaselineWork = task.work
    ids_1T = random_ids(task.size, 1, work.batch * work.length, task.hardware)
    positions_1T = None
    if work.batch > 1:
        positions_1T = torch.arange(work.length, device=task.hardware.device).repeat(work.batch)[None]
    optimizer = make_adamw(model)

    def step() -> None:
        model(input_ids=ids_1T, position_ids=positions_1T, labels=ids_1T, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
