"""One launch for many jobs against torch's own AdamW, job by job."""

import math

import pytest
import torch

from tests.ops.launches import noted
from weftune.ops.adamw import AdamState, RateRun, Update, gradient_norms, square_sums, update

SIZES = [5, 4096, 10_001, 70_000]


def states(device, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in SIZES:
        master, gradient = (torch.randn(size, generator=generator).to(device, dtype) for _ in "mg")
        made.append(
            AdamState(master, torch.zeros_like(master), torch.zeros_like(master), gradient, master.clone())
        )
    return made


def rules(step):
    """(learning rate, weight decay, factor, betas, eps) of each job: all different."""
    return [
        (1e-3 / step, 0.0, 1.0, (0.9, 0.999), 1e-8),
        (1e-2, 0.1, 1.0, (0.8, 0.95), 1e-8),
        (3e-4, 0.01, 0.37, (0.9, 0.999), 1e-3),
        (1e-1, 0.0, 0.5, (0.0, 0.9999), 1e-6),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_job_gets_the_step_that_torch_gives_it(device, dtype):
    """In float32 by the kernel."""
    as_torch_does(device, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_every_job_gets_the_step_that_torch_gives_it():
    """Betas and eps are each job's own there too."""
    as_torch_does(torch.device("cuda"), torch.float32)


def as_torch_does(device, dtype):
    made = states(device, dtype)
    theirs = [state.master.clone().requires_grad_() for state in made]
    optimizers = [torch.optim.AdamW([one], lr=1.0) for one in theirs]
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        updates = []
        for state, one, optimizer, (rate, decay, factor, betas, eps) in zip(
            made, theirs, optimizers, rules(step), strict=True
        ):
            gradient = torch.randn(state.master.shape, generator=generator).to(device, dtype)
            state.gradient.copy_(gradient)
            one.grad = gradient * factor
            optimizer.param_groups[0].update(lr=rate, weight_decay=decay, betas=betas, eps=eps)
            optimizer.step()
            updates.append(Update(state, step, rate, decay, factor, betas, eps))
        assert update(updates).tolist() == [True] * len(made)
    for state, one in zip(made, theirs, strict=True):
        bound = 1e-6 if dtype is torch.float32 else 1e-12
        torch.testing.assert_close(state.master, one.detach(), rtol=bound, atol=bound)
        assert torch.equal(state.weights, state.master)
        assert not state.gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norms_are_those_of_each_gradient(device, dtype):
    made = states(device, dtype)
    want = [state.gradient.double().norm().item() for state in made]
    assert gradient_norms(made).tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_told_of_its_own_job_only(device, dtype, bad):
    made = states(device, dtype)
    made[2].master[9_999] = bad
    assert update([Update(state, 1, 1e-3, 0.0, 1.0) for state in made]).tolist() == [True, True, False, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_weights_are_the_master_rounded(device):
    (state, *_) = states(device, torch.float32)
    half = AdamState(state.master, state.exp_avg, state.exp_avg_sq, state.gradient, state.master.bfloat16())
    update([Update(half, 1, 1e-1, 0.0, 1.0)])
    assert torch.equal(half.weights, half.master.bfloat16())


def test_a_factor_on_the_device_stands_for_the_updates_own_and_below_zero_makes_no_step(device):
    made, alone = states(device, torch.float32), states(device, torch.float32)
    before = [state.master.clone() for state in made]
    factors = torch.tensor([1.0, -1.0, 0.25, 0.0], device=device)
    told = update([Update(state, 1, 1e-2, 0.1, 99.0) for state in made], factors)
    assert told.shape == (4,)
    update([Update(state, 1, 1e-2, 0.1, max(0.0, float(f))) for state, f in zip(alone, factors, strict=True)])
    for number, (state, one) in enumerate(zip(made, alone, strict=True)):
        wanted = before[number] if number == 1 else one.master
        assert torch.equal(state.master, wanted)
        assert not state.gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_job_by_itself_with_nothing_chosen_makes_the_step_of_torchs_adamw(device, dtype):
    (state, *_) = states(device, dtype)
    theirs = state.master.clone().requires_grad_()
    theirs.grad = state.gradient.clone()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0)
    assert gradient_norms([state]).tolist() == pytest.approx([float(theirs.grad.norm())], rel=1e-6)
    for step in (1, 2):
        theirs.grad *= step**3
        state.gradient.copy_(theirs.grad)
        optimizer.step()
        assert update([Update(state, step, 1e-2, 0.0, 1.0)]).tolist() == [True]
    torch.testing.assert_close(state.master, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_a_part_of_a_state_is_that_part_of_every_vector(device):
    (_, state, *_) = states(device, torch.float32)
    part = state.slice_state(16, 48)
    for name in ("master", "exp_avg", "exp_avg_sq", "gradient", "weights"):
        whole = getattr(state, name)
        assert getattr(part, name).data_ptr() == whole[16:].data_ptr()
        assert len(getattr(part, name)) == 32


RUNS = (RateRun(0, 5000, 1.0), RateRun(5000, 5003, 16.0), RateRun(5003, 10_001, 0.25))
"""Of the third job; the last begins where no kernel may."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_learning_rates_inside_a_job_are_two_groups_of_torchs_adamw(device, dtype):
    made = states(device, dtype)
    theirs = [made[2].master[run.start : run.stop].clone().requires_grad_() for run in RUNS]
    groups = [{"params": [one], "lr": 1e-2 * run.rate} for one, run in zip(theirs, RUNS, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1)
    others = [state.master.clone() for state in made]
    for step in (1, 2):
        for state in made:
            state.gradient.normal_(generator=torch.Generator(device).manual_seed(step))
        for one, run in zip(theirs, RUNS, strict=True):
            one.grad = made[2].gradient[run.start : run.stop] * 0.5
        optimizer.step()
        updates = [Update(state, step, 0.0, 0.0, 1.0) for state in made]
        updates[2] = Update(made[2], step, 1e-2, 0.1, 0.5, rates=RUNS)
        assert update(updates).tolist() == [True] * 4
    bound = 1e-6 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(made[2].master, torch.cat(theirs).detach(), rtol=bound, atol=bound)
    assert torch.equal(made[2].weights, made[2].master)
    assert not made[2].gradient.any()
    assert all(torch.equal(made[job].master, others[job]) for job in (0, 1, 3))


def test_a_run_that_makes_no_step_and_one_that_is_not_finite_are_told_of_their_job(device):
    made = states(device, torch.float32)
    before = made[2].master.clone()
    rule = Update(made[2], 1, 1e-2, 0.0, 99.0, rates=RUNS)
    factors = torch.tensor([1.0, -1.0], device=device)
    assert update([Update(made[0], 1, 1e-2, 0.0, 99.0), rule], factors).tolist() == [True, True]
    assert torch.equal(made[2].master, before)
    made[2].master[5001] = math.nan
    assert update([Update(made[0], 1, 1e-2, 0.0, 1.0), rule], factors.abs()).tolist() == [True, False]


def test_pieces_of_a_job_with_two_rates_make_the_step_of_the_whole():
    whole, parted = (states("cpu", torch.float64)[2] for _ in range(2))
    update([Update(whole, 1, 1e-2, 0.1, 1.0, rates=RUNS)])
    step = Update(parted, 1, 1e-2, 0.1, 1.0, rates=RUNS)
    for start, stop in ((0, 5002), (5002, 5003), (5003, 9000), (9000, 10_001)):
        update([step.for_state(parted.slice_state(start, stop), start)])
    torch.testing.assert_close(parted.master, whole.master, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.0])
def test_a_step_is_that_of_the_gradient_times_its_factor(factor):
    """Worked out by hand; in float64, which is torch's on every device."""
    (state, *_) = states("cpu", torch.float64)
    before, gradient = state.master.clone(), factor * state.gradient
    assert update([Update(state, 1, 0.1, 0.5, factor, (0.9, 0.99), 1e-3)]).tolist() == [True]
    torch.testing.assert_close(state.exp_avg, 0.1 * gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.exp_avg_sq, 0.01 * gradient**2, rtol=1e-12, atol=1e-12)
    wanted = before * 0.95 - 0.1 * gradient / (gradient.abs() + 1e-3)
    torch.testing.assert_close(state.master, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(state.weights, state.master)


LAUNCHES = [([5], 1, False), ([4096], 1, True), ([4097, 16], 2, False), ([32, 12_304, 16], 4, True)]
"""Sizes of jobs, blocks of the longest, and whether all are whole sixteens."""


@pytest.mark.parametrize(("sizes", "blocks", "even"), LAUNCHES)
def test_a_launch_has_programs_for_every_block_of_the_longest_job(sizes, blocks, even, device, monkeypatch):
    from weftune.ops.triton import adamw as kernels

    launches = noted(monkeypatch, kernels, "squares", "update")
    made = [AdamState(*(torch.zeros(size, device=device) for _ in range(5))) for size in sizes]
    assert gradient_norms(made).shape == (len(sizes),)
    assert update([Update(state, 1, 1e-3, 0.0, 1.0) for state in made]).shape == (len(sizes),)
    assert [one.kernel for one in launches] == ["squares", "update"]
    for one in launches:
        assert one.grid == (blocks, len(sizes))
        assert one.of("SIZES_ALIGNED", "BLOCK", "num_warps") == (even, 4096, 8)
    squares, steps = launches
    assert squares.given[0].tolist() == [[one.gradient.data_ptr(), len(one.master)] for one in made]
    names = ("master", "exp_avg", "exp_avg_sq", "gradient", "weights")
    addresses = [[getattr(one, name).data_ptr() for name in names] for one in made]
    assert steps.given[0].tolist() == [[*where, size] for where, size in zip(addresses, sizes, strict=True)]


def test_the_numbers_of_a_step_are_those_of_adamw(device, monkeypatch):
    from weftune.ops.triton import adamw as kernels

    launches = noted(monkeypatch, kernels, "update")
    (state, *_) = states(device, torch.float32)
    update([Update(state, 3, 0.01, 0.2, 0.5, (0.8, 0.9), 1e-6)])
    update([Update(state, 1, 0.01, 0.0, 0.5)], torch.tensor([0.25], device=device))
    chosen, usual = (one.given[1].tolist()[0] for one in launches)
    rate, root = 0.01 / (1 - 0.8**3), math.sqrt(1 - 0.9**3)
    assert chosen == pytest.approx([0.5, 1 - 0.01 * 0.2, rate, root, 0.2, 0.9, 0.1, 1e-6], rel=1e-6)
    assert usual == pytest.approx([0.25, 1.0, 0.1, math.sqrt(0.001), 0.1, 0.999, 0.001, 1e-8], rel=1e-6)


def test_a_vector_that_does_not_start_a_tensor_of_its_own_is_a_bug(device):
    gradient = torch.zeros(64, device=device)
    assert square_sums([gradient[4:], gradient[32:]]).tolist() == [0.0, 0.0]
    for start in (1, 2, 3, 5):
        with pytest.raises(AssertionError, match="starts a tensor of its own"):
            square_sums([gradient[start:]])
