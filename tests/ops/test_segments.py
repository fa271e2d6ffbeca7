"""Sums over runs: those of each run alone, with the same gradient, and a NaN stays in its own."""

from __future__ import annotations

import torch

from weftune.ops.segments import run_counts, run_sums

LENGTHS = [3, 0, 1, 5, 2]


def test_each_run_is_summed_as_if_alone_and_so_is_its_gradient() -> None:
    values_S = torch.randn(11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together, alone = values_S.clone().requires_grad_(), values_S.clone().requires_grad_()
    weight_J = torch.arange(1.0, 6.0, dtype=torch.float64)
    sums_J = run_sums(together, LENGTHS)
    wanted_J = torch.stack([part.sum() for part in alone.split(LENGTHS)])
    torch.testing.assert_close(sums_J, wanted_J)
    (sums_J / weight_J).sum().backward()
    (wanted_J / weight_J).sum().backward()
    assert torch.equal(together.grad, alone.grad)


def test_a_nan_stays_in_its_run() -> None:
    values_S = torch.ones(11)
    values_S[3] = torch.nan
    assert run_sums(values_S, LENGTHS).isnan().tolist() == [False, False, True, False, False]


def test_what_is_true_is_counted_run_by_run() -> None:
    found_S = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert run_counts(found_S, LENGTHS).tolist() == [2, 0, 1, 2, 2]
