"""Adapters at one site in plain PyTorch: what else was considered, without dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.site_case import SiteCase

Step = Callable[[int], object]


def plain_steps(case: SiteCase) -> dict[str, Step]:
    """Forward and backward by the variants that the torch at hand has."""
    if case.adapters.dropout > 0.0:
        return {}
    steps = {"concatenated": concatenated(case), "augmented": augmented(case)}
    if hasattr(torch.nn.functional, "grouped_mm"):
        steps["grouped_mm"] = grouped(case)
    return {name: step for name, step in steps.items() if _runs(name, step)}


def _runs(name: str, step: Step) -> bool:
    try:
        step(0)
    except RuntimeError as error:
        print(f"    ({name}: {str(error).splitlines()[0]})")
        return False
    return True


def _side_by_side(case: SiteCase) -> tuple[Tensor, Tensor, Tensor]:
    """The ranks of all adapters: A [R, K], B [R, N], and the factor of s, zero in other jobs' rows."""
    a_RK = torch.cat([entry.a_RK for entry in case.entries])
    b_RN = torch.cat([entry.b_RN for entry in case.entries])
    factor_TR = torch.zeros(case.adapters.rows, len(a_RK), device=a_RK.device, dtype=a_RK.dtype)
    low = 0
    for seat, entry in zip(case.seats, case.entries, strict=True):
        factor_TR[seat.start : seat.stop, low : low + entry.rank] = entry.scale
        low += entry.rank
    return a_RK, b_RN, factor_TR


def concatenated(case: SiteCase) -> Step:
    """The ranks of all adapters side by side."""
    a_RK, b_RN, factor_TR = _side_by_side(case)

    def step(turn: int) -> object:
        x, dy, weight_NK = case.x[turn], case.dy[turn], case.weight_NK
        s = (x @ a_RK.T).mul_(factor_TR)
        y = (x @ weight_NK.T).addmm_(s, b_RN)
        ds = (dy @ b_RN.T).mul_(factor_TR)
        dx = (dy @ weight_NK).addmm_(ds, a_RK)
        return y, dx, s.T @ dy, ds.T @ x

    return step


def augmented(case: SiteCase) -> Step:
    """x and W live in buffers that are wider by all ranks, so that one product takes both parts."""
    a_RK, b_RN, factor_TR = _side_by_side(case)
    features = case.weight_NK.shape[1]
    wide_weight = torch.cat([case.weight_NK, b_RN.T], dim=1)
    wide_x = [torch.cat([x, torch.zeros_like(factor_TR)], dim=1) for x in case.x]

    def step(turn: int) -> object:
        x, s, dy = wide_x[turn][:, :features], wide_x[turn][:, features:], case.dy[turn]
        torch.mul(x @ a_RK.T, factor_TR, out=s)
        y = wide_x[turn] @ wide_weight.T
        wide_dx = dy @ wide_weight
        ds = wide_dx[:, features:] * factor_TR
        dx = wide_dx[:, :features].addmm_(ds, a_RK)
        return y, dx, s.T @ dy, ds.T @ x

    return step


def grouped(case: SiteCase) -> Step:
    """The rank-sized products by segment, every rank up to the largest."""
    rank, scale = max(entry.rank for entry in case.entries), case.entries[0].scale
    a_GRK = torch.stack([_padded(entry.a_RK, rank) for entry in case.entries])
    b_GRN = torch.stack([_padded(entry.b_RN, rank) for entry in case.entries])
    ends = torch.tensor([seat.stop for seat in case.seats], dtype=torch.int32, device=a_GRK.device)
    product = torch.nn.functional.grouped_mm

    def step(turn: int) -> object:
        x, dy, weight_NK = case.x[turn], case.dy[turn], case.weight_NK
        s = product(x, a_GRK.transpose(1, 2), offs=ends).mul_(scale)
        y = product(s, b_GRN, offs=ends).addmm_(x, weight_NK.T)
        ds = product(dy, b_GRN.transpose(1, 2), offs=ends).mul_(scale)
        dx = product(ds, a_GRK, offs=ends).addmm_(dy, weight_NK)
        return y, dx, product(s.T, dy, offs=ends), product(ds.T, x, offs=ends)

    return step


def _padded(weight: Tensor, rank: int) -> Tensor:
    return torch.cat([weight, weight.new_zeros(rank - len(weight), weight.shape[1])])
