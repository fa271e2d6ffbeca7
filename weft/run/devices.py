"""The devices of this machine, as the planner wants to know them."""

from __future__ import annotations

import torch

from weft.plan.stage_count import Devices
from weft.run.measure import GPU_SHARE, budget_bytes, taken_bytes


def devices_here(device: torch.device, budget: int | None) -> Devices:
    """Those of the kind of `device`; `budget` is what the user allows a run on each of them."""
    if device.type != "cuda":
        return Devices("machine", 1, budget or budget_bytes(device), taken_bytes(device))
    # Not what is free: to ask for that leaves a context on every GPU, in a process that needs none.
    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return Devices("GPU", len(sizes), budget or int(min(sizes) * GPU_SHARE), fused=True)
