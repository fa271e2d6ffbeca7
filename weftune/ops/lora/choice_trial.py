"""A trial that times the product plans of the tiled kernels, forward and backward, on synthetic linears.

Tensors of the base model and of jobs are neither read nor written, nor is torch's random state.

Shapes: T rows, K inputs, N outputs of all linears, R rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from weftune.core.deterministic import are_kernels_deterministic
from weftune.core.weights import CodedMatrix
from weftune.ops.dropout import step_key
from weftune.ops.fallback import is_kernel_failure
from weftune.ops.lora.choice import Choices, PlanTrial, choice_file
from weftune.ops.lora.products import Right
from weftune.ops.lora.rows import Rows, SlotRows
from weftune.ops.lora.table import Group, LowRank, SlotTable
from weftune.ops.lora.tiled import backward, forward
from weftune.ops.lora.tiling import ProductPlan, SiteCall, choose_tiling

JOBS = 8
DROPOUT = 0.1
"""Dropout probability of the jobs in timing measurements. The cost of the masks does not depend on its
value."""
BUDGET = 60_000.0
"""Maximum total time in microseconds of all rounds (runs of every plan) of a trial, unless `MIN_ROUNDS`
rounds take longer."""
MIN_ROUNDS, MAX_ROUNDS = 3, 9
"""Minimum and maximum number of rounds of a trial. A round times every plan once."""
HEAD_START = 4_000_000
"""Number of device cycles (a few milliseconds) for which the device sleeps while the host launches the runs
of all plans, so that launch latency is not measured."""


def device_choices(device: torch.device) -> Choices:
    """Return the object that chooses the product plan of each linear on this device. If kernels must be
    deterministic, it always chooses the first allowed plan."""
    return Choices(
        partial(time_plans, device=device),
        choice_file(device),
        compile=partial(compile_plan, device=device),
        is_pinned=are_kernels_deterministic(),
    )


@torch.no_grad()
def compile_plan(trial: PlanTrial, plan: ProductPlan, device: torch.device) -> None:
    with torch.cuda.device(device):
        synthetic_site(trial, device).step(plan)
        torch.cuda.current_stream().synchronize()


@torch.no_grad()
def time_plans(trial: PlanTrial, device: torch.device) -> dict[ProductPlan, float]:
    """Return, for each product plan that the device can run, the median time in microseconds of one forward
    and backward."""
    with torch.cuda.device(device):
        site = synthetic_site(trial, device)
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        scratch = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)
        runnable = [plan for plan in trial.plans if _can_run_plan(site, plan)]
        if not runnable:
            return {}
        # The first round stabilises clocks and caches, and determines how many rounds fit the budget.
        first = _time_round(site, runnable, scratch)
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(BUDGET / sum(first.values()))))
        taken = [_time_round(site, runnable, scratch) for _ in range(rounds)]
    return {plan: statistics.median(times[plan] for times in taken) for plan in runnable}


@dataclass(frozen=True, slots=True)
class TrialSite:
    """Synthetic linears with a shared input and up to eight jobs, with which a trial times product plans."""

    x_TK: Tensor
    dy_TN: Tensor
    weight_NK: Right
    residual_TN: Tensor | None
    group: Group
    rows: Rows
    adapters: list[list[LowRank]]
    """Adapters of each job at each linear. They are kept here because the kernels' table has only their
    addresses."""

    def step(self, plan: ProductPlan) -> None:
        tiling = choose_tiling(self.rows, self.group, self.x_TK.shape[1], self.x_TK.dtype)
        call = SiteCall(self.group, self.rows, True, tiling, plan)
        _, s_TPR, _ = forward(self.x_TK, self.weight_NK, None, self.residual_TN, call)
        backward(self.dy_TN, self.x_TK, self.weight_NK, s_TPR, call, needs_dx=True)


def _can_run_plan(site: TrialSite, plan: ProductPlan) -> bool:
    """Return whether the device can run the product plan, after compiling and running it once. A plan cannot
    run if its kernels need too much shared memory."""
    try:
        site.step(plan)
    except Exception as error:
        if not is_kernel_failure(error):
            raise
        return False
    return True


def _time_round(site: TrialSite, plans: Sequence[ProductPlan], scratch: Tensor) -> dict[ProductPlan, float]:
    """Run one forward and backward with each plan, and return their times in microseconds.

    The L2 cache is overwritten before each run, because in a model the other layers overwrite it, too.
    """
    marks = {plan: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for plan in plans}
    # The device sleeps while the host launches the round, so that launch latency is not part of the times:
    # in training the kernels are launched by a captured graph.
    torch.cuda._sleep(HEAD_START)
    for plan, (began, ended) in marks.items():
        scratch.zero_()
        began.record()
        site.step(plan)
        ended.record()
    torch.cuda.current_stream().synchronize()
    return {plan: 1000.0 * began.elapsed_time(ended) for plan, (began, ended) in marks.items()}


def synthetic_site(trial: PlanTrial, device: torch.device) -> TrialSite:
    generator = torch.Generator(device).manual_seed(0)

    def random_matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=trial.dtype)

    outputs, rank = sum(trial.widths), trial.bands * trial.ranks
    names = [f"site{site}" for site in range(len(trial.widths))]
    table = SlotTable.empty(names, trial.slots, device, trial.is_aligned, trial.bands)
    group = Group(tuple(pairwise(accumulate(trial.widths, initial=0))), table, rank, trial.has_dropout)
    rows = Rows.empty(trial.rows, trial.slots, device)
    jobs = min(JOBS, trial.slots, trial.rows)
    edges = [job * trial.rows // jobs for job in range(jobs + 1)]
    seats = [SlotRows(low, high, slot, step_key(slot, 1)) for slot, (low, high) in enumerate(pairwise(edges))]
    rows.fill(seats, np.arange(trial.rows, dtype=np.int32))

    def random_adapter(width: int) -> LowRank:
        a_RK, b_RN = random_matrix(rank, trial.features), random_matrix(rank, width)
        da_RK, db_RN = (torch.zeros_like(weight, dtype=torch.float32) for weight in (a_RK, b_RN))
        return LowRank(a_RK, b_RN, da_RK, db_RN, scale=1.0, dropout=DROPOUT if trial.has_dropout else 0.0)

    adapters = [[random_adapter(width) for width in trial.widths] for _ in seats]
    for slot, own in enumerate(adapters):
        group.write(slot, own)
    weight_NK = (
        random_matrix(trial.features, outputs).T
        if trial.is_transposed
        else random_matrix(outputs, trial.features)
    )
    return TrialSite(
        x_TK=random_matrix(trial.rows, trial.features),
        dy_TN=random_matrix(trial.rows, outputs),
        weight_NK=CodedMatrix.quantise(weight_NK) if trial.has_codes else weight_NK,
        residual_TN=random_matrix(trial.rows, outputs) if trial.has_residual else None,
        group=group,
        rows=rows,
        adapters=adapters,
    )
