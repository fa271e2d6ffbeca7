"""The devices of this machine, as records for the planner."""

from __future__ import annotations

import torch

from weftune.errors import UserError
from weftune.plan.layout.choose import Machine
from weftune.run.measure.memory import GPU_SHARE, budget_bytes, taken_bytes


def devices_here(device: torch.device, budget: int | None) -> Machine:
    """Return the devices of the same kind as `device`; `budget` is the bytes that the user allows on each of
    them."""
    if device.type != "cuda":
        return Machine(on_gpu=False, budget=budget or budget_bytes(device), taken=taken_bytes(device))
    # Not the free memory: querying it creates a context on every GPU, in a process that needs none.
    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return Machine(on_gpu=True, devices=len(sizes), budget=budget or int(min(sizes) * GPU_SHARE))


def devices_asked(count: int | None, kind: str | None) -> tuple[str, ...]:
    """Return the devices that `--gpus COUNT` requests. None means all. With `--device cpu`, that many
    processes on the CPU."""
    text = "all" if count is None else str(count)
    if kind == "cpu":
        if count is None:
            raise UserError(
                "--gpus all counts GPUs; with --device cpu write how many processes, such as --gpus 2"
            )
        return ("cpu",) * count
    if kind not in (None, "cuda"):
        raise UserError(
            f"--gpus {text}: --device {kind} names one device; write cuda or cpu, or leave --gpus out"
        )
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here == 0:
        raise UserError(
            f"--gpus {text}: no GPU is found here, see weftune doctor; leave it out, or start processes on "
            f"the CPU with --device cpu --gpus {count or 2}"
        )
    if count is not None and count > here:
        raise UserError(f"--gpus {count}: this machine has {here}; write all, or at most {here}")
    return tuple(f"cuda:{number}" for number in range(count or here))
