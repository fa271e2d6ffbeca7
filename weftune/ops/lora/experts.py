"""Fused mixture of experts with LoRA on GPUs: the frozen linears of all experts, all jobs' adapters, the
activation and the router's weights as one autograd node.

A choice is a pair of a token and one of its experts. Choices are sorted by expert and then by job, on the
device. So the rows of a job at an expert are contiguous (a run), and the LoRA kernels treat each run as the
rows of a separate slot (index in their tables). The router's weight is multiplied in before the last product:
so its gradient needs only the activation, and no expert's output is saved. The backward recomputes everything
except gate and up, which are saved.

Shapes: T tokens, k experts per token, S = T · k choices, E experts, J jobs, U runs, G tiles of runs or blocks
of experts, D hidden width, I inner width, F = 2I, K inputs, N outputs of a linear, R rank, rounded up to a
power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weftune.ops import triton as kernels
from weftune.ops.experts import ExpertSite, grouped_product, supports_grouped_mm
from weftune.ops.fallback import rehearse_kernels
from weftune.ops.lora.rows import BLOCK, Rows
from weftune.ops.lora.tiled_kernels import ColumnSpan, add_dx, allocate_da, da, down, ds_db, up
from weftune.ops.lora.tiling import (
    DIRECT_RANKS,
    ProductPlan,
    SiteCall,
    can_fuse,
    choose_product_blocks,
    choose_tiling,
    precision,
)

OP = "a mixture of experts"
TILE = 64
"""Number of rows per program, in kernels whose programs process rows of one job only."""
COLUMNS = 1024
"""Number of columns per program, in kernels whose programs process one row only."""


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """The choices of a microbatch (pairs of a token and one of its experts), sorted by expert and job, and
    their assignment to kernel programs."""

    order_S: Tensor
    """Maps each position in the order by expert to the index of a choice (a pair of a token and one of its k
    experts), which is k times the token plus the number of the expert among the token's."""
    sorted_index_Tk: Tensor
    """Maps each choice (a pair of a token and one of its experts) to its position in the order by expert."""
    stops_E: Tensor
    blocks_G5: Tensor
    """Blocks of at most BLOCK rows that belong to one expert, each as (start, stop, expert, first run, index
    after the last run). A run is the rows of one job at one expert."""
    used_blocks_1: Tensor
    """Number of blocks in `blocks_G5` that have rows, as a tensor with one element."""
    rows: Rows
    """Assignment of the sorted rows to programs of the LoRA kernels. All rows of one job at one expert are
    summed by one program."""

    def sorted_tokens(self, x_TD: Tensor) -> Tensor:
        """Return, for each choice (a pair of a token and one of its experts) in the order by expert, the row
        of x that belongs to its token, [S, D]."""
        return x_TD.index_select(0, self.order_S // self.sorted_index_Tk.shape[1])


def sort_choices(
    experts_Tk: Tensor, owner_T: Tensor, numbers_J: Tensor, experts: int, slots: int
) -> SortedChoices:
    """Sort the choices (pairs of a token and an expert) by expert and job, and assign them to programs,
    without synchronising host and device. `owner_T` is the index of each token's job, and `numbers_J` the
    index of each job's adapter in the kernels' tables, −1 for none."""
    count, device = len(numbers_J), experts_Tk.device
    key_S, order_S = (experts_Tk.int() * count + owner_T[:, None]).flatten().sort(stable=True)
    rows, runs = len(key_S), experts * count
    places_S = torch.empty_like(key_S)
    places_S[order_S] = torch.arange(rows, dtype=torch.int32, device=device)
    every = torch.arange(runs + 1, dtype=torch.int32, device=device)
    edges = torch.searchsorted(key_S, every, out_int32=True)
    used = _split_run_ends(edges[::count], BLOCK)
    # These are maximum sizes: unused pieces have slot −1, and unused tiles have no rows.
    pieces_U4 = key_S.new_full((min(rows, runs), 4), -1)
    tiles_G3 = key_S.new_zeros(rows // TILE + len(pieces_U4), 3)
    blocks_G5 = key_S.new_empty(rows // BLOCK + experts, 5)
    kernels.experts.assign_runs[(runs + experts,)](
        edges,
        _split_run_ends(edges, rows),
        _split_run_ends(edges, TILE),
        used,
        numbers_J,
        pieces_U4,
        tiles_G3,
        blocks_G5,
        count,
        experts,
        OWNERS=1 << (count - 1).bit_length(),
        TILE=TILE,
        BLOCK=BLOCK,
        STEP=16,
        num_warps=1,
    )
    none = key_S[:0]
    assigned = Rows(
        tile=TILE,
        piece=TILE,
        max_runs=len(tiles_G3),
        buffer=tiles_G3,
        tiles_G3=tiles_G3,
        pieces_Q4=pieces_U4,
        sums_M3=none,
        runs_U3=none,
        edges_V=none,
        # Without dropout only the number of slots and rows is used.
        key_S=key_S.new_empty(slots),
        token_index_T=key_S,
    )
    sorted_index_Tk, stops_E = places_S.view(experts_Tk.shape), edges[count::count].contiguous()
    return SortedChoices(order_S, sorted_index_Tk, stops_E, blocks_G5, used[-1:], assigned)


def _split_run_ends(edges: Tensor, max_rows: int) -> Tensor:
    """Split every run (rows of one job or expert) into parts of at most `max_rows` rows, and return the
    cumulative number of parts after each run. `edges` are the boundaries of the runs."""
    return ((edges.diff() + (max_rows - 1)) // max_rows).cumsum(dim=0, dtype=torch.int32)


def lora_experts(
    x_TD: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    anchor: Tensor,
    sites: Sequence[ExpertSite],
    owner_T: Tensor,
    numbers_J: Tensor,
    plan: ProductPlan | None = None,
) -> Tensor:
    """Return for each token the sum over its experts of down(weight · silu(gate) ⊙ up), with every job's
    adapters. `sites` are the fused gate and up linear, and the down linear. `owner_T` is the int32 index of
    each token's job, and `numbers_J` the index of each job's adapter in the tables of the sites, −1 for none.
    The backward adds dA and dB to the jobs' accumulators. `anchor` makes autograd call the backward even if x
    needs no gradient (`ops.accumulate`). Raises KernelsFailed if the kernels do not run on the device."""

    def output(x_TD: Tensor, weights_Tk: Tensor, numbers_J: Tensor) -> Tensor:
        slots = max((site.group.table.rank_PS.shape[1] for site in sites if site.group), default=0)
        choices = sort_choices(experts_Tk, owner_T, numbers_J, len(sites[0].weight_ENK), slots)
        linears = [ExpertLinears.from_site(site, choices, plan) for site in sites]
        return _Experts.apply(x_TD, weights_Tk, anchor, choices, *linears)

    def run_both_passes() -> None:
        """Run forward and backward with no job's adapter, and so without any effect, to find out whether the
        kernels run."""
        with torch.enable_grad():
            y_TD = output(x_TD.detach().requires_grad_(), weights_Tk.detach(), torch.full_like(numbers_J, -1))
        y_TD.backward(torch.zeros_like(y_TD))

    shapes = [(site.weight_ENK.shape, site.group and site.group.launch_key) for site in sites]
    # Launch parameters depend on the number of tokens by its magnitude and its alignment only.
    tokens, active = experts_Tk.shape
    rows = tokens.bit_length(), tokens % 16 == 0, active
    key = x_TD.device, x_TD.dtype, rows, len(numbers_J), plan, *shapes
    rehearse_kernels(OP, key, x_TD.device, run_both_passes)
    return output(x_TD, weights_Tk, numbers_J)


@dataclass(frozen=True, slots=True)
class ExpertLinears:
    """One linear of all experts of a layer, with the jobs' adapters, for the rows of one microbatch."""

    weight_ENK: Tensor
    choices: SortedChoices
    plan: ProductPlan
    call: SiteCall | None
    """Arguments of the LoRA kernels. None if no job has an adapter on this linear."""

    @classmethod
    def from_site(
        cls, site: ExpertSite, choices: SortedChoices, plan: ProductPlan | None = None
    ) -> ExpertLinears:
        weight_ENK, group, rows = site.weight_ENK, site.group, choices.rows
        plan = plan or best_plan(site)
        if group is None:
            return cls(weight_ENK, choices, plan, None)
        chosen = choose_tiling(rows, group, weight_ENK.shape[2], weight_ENK.dtype)
        # There is no dropout, so training and evaluation are the same.
        return cls(weight_ENK, choices, plan, SiteCall(group, rows, True, chosen, plan))

    def forward(self, x_SK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output y, and s = xAᵀ, which the backward needs. s is None if no job has an adapter on
        this linear."""
        s_SR = None if self.call is None else down(x_SK, self.call)
        if self.plan.is_fused:
            return self._product(x_SK, s_SR, backward=False), s_SR
        y_SN = grouped_product(x_SK, self.weight_ENK.transpose(1, 2), self.choices.stops_E)
        if self.call is not None and s_SR is not None:
            up(s_SR, y_SN, _all_columns(y_SN, self.call), None, None, y_SN, None, self.call)
        return y_SN, s_SR

    def ds(self, dy_SN: Tensor, s_SR: Tensor | None) -> Tensor | None:
        """Return ds, the gradient of s = xAᵀ, and add dB to the jobs' accumulators. None if no job has an
        adapter on this linear."""
        return None if self.call is None or s_SR is None else ds_db(dy_SN, s_SR, self.call)[0]

    def add_da(self, x_SK: Tensor, ds_SR: Tensor | None) -> None:
        if self.call is not None and ds_SR is not None:
            da(x_SK, ds_SR, allocate_da(x_SK, self.call), self.call)

    def dx(self, dy_SN: Tensor, ds_SR: Tensor | None) -> Tensor:
        if self.plan.is_fused:
            return self._product(dy_SN, ds_SR, backward=True)
        dx_SK = grouped_product(dy_SN, self.weight_ENK, self.choices.stops_E)
        if self.call is not None and ds_SR is not None:
            add_dx(ds_SR, dx_SK, _all_columns(dx_SK, self.call), dx_SK, self.call)
        return dx_SK

    def _product(self, left_SM: Tensor, s_SR: Tensor | None, backward: bool) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor

        (rows, inputs), outputs = left_SM.shape, self.weight_ENK.shape[2 if backward else 1]
        blocks = choose_product_blocks(rows, ((0, outputs),), left_SM.dtype, left_SM.device)
        right = [blocks.inner_size, blocks.columns] if backward else [blocks.columns, blocks.inner_size]
        target, call = left_SM.new_empty(rows, outputs), self.call
        kernels.experts.expert_product[(blocks.programs,)](
            TensorDescriptor.from_tensor(left_SM, [BLOCK, blocks.inner_size]),
            TensorDescriptor.from_tensor(self.weight_ENK.flatten(0, 1), right),
            target,
            s_SR,
            self.choices.rows.pieces_Q4,
            self.choices.blocks_G5,
            self.choices.used_blocks_1,
            call and call.group.table.address_PS4,
            call and call.group.table.rank_PS,
            outputs,
            inputs,
            BACKWARD=backward,
            S=call.slots if call else 1,
            R=call.ranks if call else 1,
            M=BLOCK,
            C=blocks.columns,
            D=blocks.inner_size,
            GROUP=blocks.group,
            ALIGNMENT=call.alignment(left_SM) if call else 1,
            PRECISION=precision(left_SM),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        return target


def _all_columns(y_SN: Tensor, call: SiteCall) -> ColumnSpan:
    """Return a `ColumnSpan` that covers all columns of y, as an argument of the LoRA kernels."""
    return ColumnSpan(0, -(-y_SN.shape[1] // call.tiling.up.columns), 0, y_SN.shape[1])


def best_plan(site: ExpertSite) -> ProductPlan:
    """Return the product plan for a linear of experts: `fused` if the device supports it, since that plan
    adds the adapters' output before rounding, else `wide`."""
    weight_NK, rank = site.weight_ENK.flatten(0, 1), site.group.rank if site.group else 1
    aligned = site.weight_ENK.shape[1] % 8 == 0
    fused = aligned and rank <= DIRECT_RANKS and can_fuse(weight_NK, weight_NK.device)
    return ProductPlan.fused if fused else ProductPlan.wide


def multiplies_at_once(site: ExpertSite) -> bool:
    """Return whether a single kernel multiplies by the weights of all experts."""
    return best_plan(site).is_fused or supports_grouped_mm(site.weight_ENK)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_Tk: Tensor,
        anchor: Tensor,
        choices: SortedChoices,
        gate_up: ExpertLinears,
        down: ExpertLinears,
    ) -> Tensor:
        with torch.cuda.device_of(x_TD):
            gate_up_SF, up_s_SR = gate_up.forward(choices.sorted_tokens(x_TD))
            weight_S = weights_Tk.flatten()[choices.order_S]
            y_SD, down_s_SR = down.forward(_apply_gate(gate_up_SF, weight_S))
            ctx.choices, ctx.gate_up, ctx.down = choices, gate_up, down
            ctx.save_for_backward(x_TD, weight_S, gate_up_SF, up_s_SR, down_s_SR)
            return _sum_choices(y_SD, choices.sorted_index_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_S, gate_up_SF, up_s_SR, down_s_SR = ctx.saved_tensors
        choices, gate_up, down = ctx.choices, ctx.gate_up, ctx.down
        with torch.cuda.device_of(x_TD):
            dy_SD = choices.sorted_tokens(dy_TD)
            ds_SR = down.ds(dy_SD, down_s_SR)
            dact_SI = down.dx(dy_SD, ds_SR)
            del dy_SD
            act_SI, dgate_up_SF, dweight_S = _gated_backward(dact_SI, gate_up_SF, weight_S)
            down.add_da(act_SI, ds_SR)
            del act_SI, dact_SI
            ds_SR = gate_up.ds(dgate_up_SF, up_s_SR)
            if ds_SR is not None:
                gate_up.add_da(choices.sorted_tokens(x_TD), ds_SR)
            if not ctx.needs_input_grad[0]:
                return (None,) * 6
            dx_SD = gate_up.dx(dgate_up_SF, ds_SR)
            dx_TD = _sum_choices(dx_SD, choices.sorted_index_Tk)
        return dx_TD, dweight_S[choices.sorted_index_Tk], None, None, None, None


def _apply_gate(gate_up_SF: Tensor, weight_S: Tensor) -> Tensor:
    """Return weight · silu(gate) · up for each row, where `gate_up_SF` has the columns of gate, then those of
    up."""
    rows, width = gate_up_SF.shape[0], gate_up_SF.shape[1] // 2
    act_SI = gate_up_SF.new_empty(rows, width)
    kernels.experts.gated_forward[(rows,)](
        gate_up_SF,
        weight_S,
        act_SI,
        WIDTH=width,
        BLOCK=COLUMNS,
        num_warps=4,
    )
    return act_SI


def _gated_backward(dact_SI: Tensor, gate_up_SF: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the recomputed activation, the gradient of gate and up, and the gradient of the router's
    weights."""
    rows, width = dact_SI.shape
    act_SI, dgate_up_SF = torch.empty_like(dact_SI), torch.empty_like(gate_up_SF)
    dweight_S = torch.empty_like(weight_S)
    kernels.experts.gated_backward[(rows,)](
        dact_SI,
        gate_up_SF,
        weight_S,
        act_SI,
        dgate_up_SF,
        dweight_S,
        WIDTH=width,
        BLOCK=COLUMNS,
        num_warps=4,
    )
    return act_SI, dgate_up_SF, dweight_S


def _sum_choices(y_SD: Tensor, sorted_index_Tk: Tensor) -> Tensor:
    """Return for each token the sum of the output rows of its choices (its k experts), [T, D]."""
    (tokens, active), width = sorted_index_Tk.shape, y_SD.shape[1]
    total_TD = y_SD.new_empty(tokens, width)
    kernels.experts.summed_choices[(tokens * -(-width // COLUMNS),)](
        y_SD, sorted_index_Tk, total_TD, WIDTH=width, ACTIVE=active, BLOCK=COLUMNS, num_warps=4
    )
    return total_TD
