from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import slow_but
from weftune.bench.baselines import (
    BaselineWork,
    measure_frozen_base,
    peft_model,
    peft_one_by_one,
    peft_padded,
)
from weftune.bench.liger import compile_layers, find_missing_package, packed_step
from weftune.bench.processes import ProcessTask, peft_in_processes, run_in_process
from weftune.bench.sizes import SIZES, random_ids
from weftune.bench.timing import Hardware, MeasuredStep, Repeats

CPU = Hardware(torch.device("cpu"), torch.float32)
TASK = ProcessTask(SIZES["toy"], BaselineWork(jobs=2, batch=2, length=8, rank=4), CPU, Repeats(1, 1, 1))


def test_the_frozen_base_and_peft_are_measured() -> None:
    for measured in (
        measure_frozen_base(TASK.size, TASK.work, CPU, TASK.pace),
        peft_one_by_one(TASK.size, TASK.work, CPU, TASK.pace, float32_adapters=True),
    ):
        assert measured.seconds is not None
        assert measured.seconds > 0


def test_pefts_adapters_are_float32_by_default_and_in_the_bases_dtype_if_asked() -> None:
    hardware = Hardware(CPU.device, torch.bfloat16)
    for wide, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = peft_model(TASK.size, 4, hardware, wide)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {dtype}
        assert sum(p.numel() for p in trained) == 4 * 2 * sum(k + n for k, n in TASK.size.sites)


def test_padded_batches_train_the_adapter() -> None:
    run = peft_padded(TASK.size, [[[3, 9], [4, 4]]], 4, CPU)(2)
    run()


@pytest.mark.slow
def test_two_jobs_in_processes_of_their_own_are_measured_together() -> None:
    measured = peft_in_processes(TASK, None)
    assert measured.note == ""
    assert measured.seconds is not None
    assert measured.seconds > 0


@pytest.mark.slow
def test_a_process_that_fails_is_a_row_with_its_reason() -> None:
    measured = run_in_process(_failing, TASK)
    assert measured == MeasuredStep(None, None, "ValueError: nothing works")


def _failing(task: ProcessTask) -> MeasuredStep:
    raise ValueError("nothing works\nat all")


def test_a_machine_without_liger_says_so() -> None:
    assert find_missing_package(CPU) in ("liger_kernel is not installed", "liger_kernel needs a GPU")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("batch", slow_but([1, 2], []))
def test_compiled_layers_compute_the_same_and_one_graph_serves_them_all(batch: int) -> None:
    torch.compiler.reset()
    task = replace(TASK, size=replace(TASK.size, layers=4), work=replace(TASK.work, batch=batch))
    model = peft_model(task.size, 4, CPU, float32_adapters=False)
    ids = random_ids(task.size, 1, 16, CPU)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        compile_layers(model, backend="eager")
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, plain)
    torch._dynamo.utils.counters.clear()
    packed_step(model, task)()
    # The first layer's input needs no gradient, those of the others do.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
