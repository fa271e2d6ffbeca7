"""Products of experts: grouped as they are token by token; every job's gradients are its own."""

import pytest
import torch
from torch.nn.functional import silu

from tests.ops.earned import assert_earned, outcomes
from weftune.ops.experts import ExpertPart, ExpertSite, Routes, experts_output, experts_output_reference

TOKENS, EXPERTS, ACTIVE, HIDDEN, INNER = 23, 7, 3, 16, 24
JOBS = [(0, 9, 5, 0.5), (9, 14, 2, 2.0), (14, 20, 8, 1.0)]
"""Start, stop, rank and scale; the last tokens are nobody's, and most experts are unknown to the second."""


def drawn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    values = torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    )
    return (values * shape[-1] ** -0.5).to(device, dtype)


def routing(device="cpu"):
    """Nobody chooses the last expert."""
    weights_Tk, chosen_Tk = drawn(TOKENS, EXPERTS - 1).softmax(dim=-1).topk(ACTIVE, dim=-1)
    return chosen_Tk.to(device), weights_Tk.to(device)


def inputs(dtype=torch.float64, device="cpu"):
    """x and every job's A and B at both linears."""
    made = [drawn(TOKENS, HIDDEN, dtype=dtype, device=device)]
    for seed, (_, _, rank, _) in enumerate(JOBS):
        for width in (HIDDEN, 2 * INNER, INNER, HIDDEN):
            made.append(drawn(EXPERTS, rank, width, seed=seed, dtype=dtype, device=device))
    return made


def computed_by(function):
    def compute(x_TD, *factors):
        like = {"dtype": x_TD.dtype, "device": x_TD.device}
        weights = drawn(EXPERTS, 2 * INNER, HIDDEN, **like), drawn(EXPERTS, HIDDEN, INNER, **like)
        parts = ([], [])
        for index, (start, stop, _, scale) in enumerate(JOBS):
            a_up, b_up, a_down, b_down = factors[4 * index : 4 * index + 4]
            parts[0].append(ExpertPart(start, stop, a_up, b_up, scale))
            parts[1].append(ExpertPart(start, stop, a_down, b_down, scale))
        linears = [ExpertSite(weight, parts=part) for weight, part in zip(weights, parts, strict=True)]
        chosen_Tk, weights_Tk = routing(x_TD.device)
        return function(x_TD, chosen_Tk, weights_Tk.to(x_TD.dtype), *linears, silu)

    return compute


GROUPED, REFERENCE = computed_by(experts_output), computed_by(experts_output_reference)


def test_grouped_products_are_those_of_every_token_in_float64():
    dy = [drawn(TOKENS, HIDDEN, seed=9)]
    for got, want in zip(outcomes(GROUPED, inputs(), dy), outcomes(REFERENCE, inputs(), dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_an_expert_without_tokens_gets_no_gradient_and_the_others_do():
    gradients = outcomes(GROUPED, inputs(), [drawn(TOKENS, HIDDEN, seed=9)])[2:]
    for gradient in gradients:
        assert not gradient[EXPERTS - 1].any()
        assert gradient.any()


@pytest.mark.parametrize("poisoned", range(3))
def test_a_nan_of_one_job_stays_with_it(poisoned):
    dy = [drawn(TOKENS, HIDDEN, seed=9)]
    clean, spoilt = inputs(), inputs()
    for factor in spoilt[1 + 4 * poisoned : 5 + 4 * poisoned]:
        factor.fill_(torch.nan)
    start, stop, _, _ = JOBS[poisoned]
    spoilt[0][start:stop] = torch.nan
    want, got = outcomes(GROUPED, clean, dy), outcomes(GROUPED, spoilt, dy)
    others = [token for token in range(TOKENS) if not start <= token < stop]
    for index in (0, 1):
        assert bool(got[index][start:stop].isnan().all())
        torch.testing.assert_close(got[index][others], want[index][others], rtol=0.0, atol=1e-12)
    for job in range(3):
        for index in range(2 + 4 * job, 6 + 4 * job):
            assert bool(got[index].isnan().any()) == (job == poisoned)
            if job != poisoned:
                torch.testing.assert_close(got[index], want[index], rtol=0.0, atol=1e-12)


def test_rows_of_one_expert_lie_together_and_in_the_order_of_tokens():
    chosen_Tk = torch.tensor([[2, 0], [0, 1], [2, 1]])
    routes = Routes.from_choices(chosen_Tk, 4)
    assert routes.experts_S.tolist() == [0, 0, 1, 1, 2, 2]
    assert routes.stops_E.tolist() == [2, 4, 6, 6]
    tokens_31 = torch.arange(3.0)[:, None]
    assert routes.sorted_tokens(tokens_31)[:, 0].tolist() == [0, 1, 1, 2, 0, 2]
    assert routes.gather_outputs(routes.sorted_tokens(tokens_31), torch.ones(3, 2))[:, 0].tolist() == [
        0,
        2,
        4,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_as_exact_as_those_of_every_token(dtype):
    assert_earned(GROUPED, REFERENCE, REFERENCE, inputs(dtype), [drawn(TOKENS, HIDDEN, seed=9, dtype=dtype)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_as_exact_on_a_gpu(dtype):
    """In bfloat16 the frozen products by a kernel for all groups at once."""
    dy = drawn(TOKENS, HIDDEN, seed=9, dtype=dtype, device="cuda")
    assert_earned(GROUPED, REFERENCE, REFERENCE, inputs(dtype, "cuda"), [dy])


@pytest.mark.gpu
def test_an_expert_without_tokens_gets_no_gradient_on_a_gpu():
    """Kernels may leave anything there."""
    torch.full((1 << 24,), torch.nan, device="cuda")
    dy = [drawn(TOKENS, HIDDEN, seed=9, dtype=torch.bfloat16, device="cuda")]
    for gradient in outcomes(GROUPED, inputs(torch.bfloat16, "cuda"), dy)[2:]:
        assert not gradient[EXPERTS - 1].any()
        assert bool(gradient.isfinite().all())
