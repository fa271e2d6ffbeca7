"""What a user does today with a base that does not fit: PEFT under FSDP2, parameters on the host."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from weftune.bench.baselines import BaselineWork, job_step, peft_model
from weftune.bench.sizes import Size, random_ids
from weftune.bench.timing import Hardware, MeasuredStep, Repeats, measure, repeat_step, reset_memory


def peft_offloaded(
    size: Size, work: BaselineWork, hardware: Hardware, pace: Repeats, capped: AbstractContextManager[None]
) -> MeasuredStep:
    """One job's step, times the jobs: every layer comes from the host, and is made again in the backward.

    The cap holds from the first step on: weights are drawn on the device, since a host would take minutes,
    and leave it layer by layer.
    """
    if hardware.device.type != "cuda":
        return MeasuredStep(None, None, "needs a GPU")
    with_group()
    model = peft_model(size, work.rank, hardware, float32_adapters=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    sharded(model)
    reset_memory(hardware.device)
    step = job_step(model, random_ids(size, work.batch, work.length, hardware))
    with capped:
        one = measure(repeat_step(step), hardware, pace)
    assert one.seconds is not None
    return MeasuredStep(one.seconds * work.jobs, one.peak_bytes)


def sharded(model: Any) -> None:
    """A unit for each decoder layer, as its documentation advises."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=True)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)


def with_group() -> None:
    """A world of one."""
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
