"""AdamW for many jobs at once, each with its own learning rate, decay, betas, eps, step and clipping.

All parameters of a job are one flat vector. On a GPU one launch updates every job: moments, master weights
and the copy of the weights that the model uses; it also zeroes the gradient.

Shapes: J jobs, B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from weftune.core.batch import to_device
from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.triton import kernels_available

BETAS, EPS = (0.9, 0.999), 1e-8
"""Defaults of `torch.optim.AdamW`."""
BLOCK = 4096
EVEN_SIZE = 64
"""Number of values of which a vector's length must be a multiple to fill whole vector registers on every CPU.
Torch may round the values after the last multiple differently, depending on a vector's address, so these
values are computed in a padded copy."""
OP = "AdamW"


@dataclass(frozen=True, slots=True)
class AdamState:
    """Flat vectors of one job: AdamW's master weights and moments, the gradient, and `weights`, the copy that
    passes read. `weights` has the base model's dtype, all others are float32 (or float64)."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor
    weights: Tensor

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return self.master, self.exp_avg, self.exp_avg_sq, self.gradient, self.weights

    def clone(self) -> AdamState:
        return AdamState(*(vector.clone() for vector in self.vectors))

    def copy_(self, other: AdamState) -> None:
        for mine, theirs in zip(self.vectors, other.vectors, strict=True):
            mine.copy_(theirs)

    def slice_state(self, start: int, stop: int) -> AdamState:
        """Return a view of the state that covers the parameters with indices from `start` to `stop` − 1."""
        return AdamState(*(vector[start:stop] for vector in self.vectors))


@dataclass(frozen=True, slots=True)
class RateRun:
    """A range of a job's parameters, from `start` to `stop` − 1, with the factor `rate` by which the job's
    learning rate is multiplied there."""

    start: int
    stop: int
    rate: float


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of a job: its state, learning rate and other settings."""

    state: AdamState
    step: int
    """Number of the optimizer step, counted from 1."""
    learning_rate: float
    weight_decay: float
    factor: float
    """Factor by which the gradient is multiplied before the update: below 1 if the gradient is clipped, else
    1."""
    betas: tuple[float, float] = BETAS
    eps: float = EPS
    rates: tuple[RateRun, ...] = ()
    """Multipliers of the learning rate, in ranges that cover all parameters in order. Empty if all parameters
    have the job's learning rate."""

    def for_state(self, state: AdamState, start: int) -> Update:
        """Return this optimizer step restricted to a part of the job's parameters. `state` is the state of
        the part, and `start` the index of its first parameter."""
        stop = start + state.master.numel()
        cut = (RateRun(max(start, run.start), min(stop, run.stop), run.rate) for run in self.rates)
        runs = (RateRun(run.start - start, run.stop - start, run.rate) for run in cut if run.start < run.stop)
        return replace(self, state=state, rates=tuple(runs))

    def split_by_rate(self) -> list[Update]:
        """Split the optimizer step into one update for each range of parameters with the same learning
        rate."""
        if not self.rates:
            return [self]
        assert self.rates[-1].stop == self.state.master.numel(), "the rates are those of another vector"
        return [
            replace(
                self,
                state=self.state.slice_state(run.start, run.stop),
                learning_rate=self.learning_rate * run.rate,
                rates=(),
            )
            for run in self.rates
        ]


def gradient_norms(states: Sequence[AdamState]) -> Tensor:
    """Return the L2 norm of each job's whole gradient, float64 [J]."""
    if not kernels_available(states[0].gradient):
        return torch.stack([state.gradient.norm().double() for state in states])
    return square_sums([state.gradient for state in states]).sqrt()


def square_sums(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each vector in float64 [J]. Sums of several parts of a long vector can be
    added to get the sum of the whole."""
    return run_with_fallback(OP, vectors[0].device, _launch_squares, _plain_squares, vectors)


def _plain_squares(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([vector.double().square().sum() for vector in vectors])


def _launch_squares(vectors: Sequence[Tensor]) -> Tensor:
    device, blocks = vectors[0].device, max(-(-vector.numel() // BLOCK) for vector in vectors)
    squares_JB = torch.zeros(len(vectors), blocks, dtype=torch.float64, device=device)
    with torch.cuda.device_of(squares_JB):
        kernels.adamw.squares[(blocks, len(vectors))](
            _address_table([(vector,) for vector in vectors]),
            squares_JB,
            SIZES_ALIGNED=all(vector.numel() % 16 == 0 for vector in vectors),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return squares_JB.sum(dim=1)


def update(updates: Sequence[Update], factor_J: Tensor | None = None) -> Tensor:
    """Apply one optimizer step per job. Return whether each job's weights are finite afterwards, bool [J]. On
    a GPU, `factor_J` may replace `Update.factor` by values on the device. For a job with a negative factor no
    step is made, and its gradient is zeroed."""
    if any(one.rates for one in updates):
        return _update_by_rate(updates, factor_J)
    if not kernels_available(updates[0].state.gradient):
        assert factor_J is None
        return _update_by_torch(updates, None)
    device = updates[0].state.gradient.device
    return run_with_fallback(OP, device, _launch_update, _update_by_torch, updates, factor_J)


def _launch_update(updates: Sequence[Update], factor_J: Tensor | None) -> Tensor:
    import triton.language as tl

    states = [one.state for one in updates]
    sizes, device = [state.master.numel() for state in states], states[0].gradient.device
    blocks = max(-(-size // BLOCK) for size in sizes)
    finite_JB = torch.ones(len(states), blocks, dtype=torch.bool, device=device)
    factors_J8 = to_device(
        torch.tensor([_update_scalars(one) for one in updates], dtype=torch.float32), device
    )
    if factor_J is not None:
        factors_J8[:, 0] = factor_J
    dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    with torch.cuda.device_of(finite_JB):
        kernels.adamw.update[(blocks, len(states))](
            _address_table([state.vectors for state in states]),
            factors_J8,
            finite_JB,
            WEIGHT=dtypes[states[0].weights.dtype],
            SIZES_ALIGNED=all(size % 16 == 0 for size in sizes),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return finite_JB.all(dim=1)


def _update_by_rate(updates: Sequence[Update], factor_J: Tensor | None) -> Tensor:
    """Apply optimizer steps of jobs with several learning rates: each range of parameters with one learning
    rate is updated like a separate job."""
    runs = [one.split_by_rate() for one in updates]
    counts = torch.tensor([len(each) for each in runs])
    flat = [run for each in runs for run in each]
    if factor_J is not None:
        factor_J = factor_J.repeat_interleave(to_device(counts, factor_J.device), output_size=len(flat))
    if not kernels_available(flat[0].state.gradient):
        finite = update(flat, factor_J)
    else:
        # Kernels need vectors aligned to 16 bytes; ranges that begin at odd offsets are copied.
        aligned = [
            run
            if all(vector.data_ptr() % 16 == 0 for vector in run.state.vectors)
            else replace(run, state=run.state.clone())
            for run in flat
        ]
        finite = update(aligned, factor_J)
        for run, copy in zip(flat, aligned, strict=True):
            if copy is not run:
                run.state.copy_(copy.state)
    return torch.stack([part.all() for part in finite.split(counts.tolist())])


def _update_by_torch(updates: Sequence[Update], factor_J: Tensor | None) -> Tensor:
    factors = [one.factor for one in updates] if factor_J is None else factor_J.tolist()
    return torch.stack(
        [_plain_update(replace(one, factor=own)) for one, own in zip(updates, factors, strict=True)]
    )


def _plain_update(update: Update) -> Tensor:
    state = update.state
    if update.factor < 0.0:
        state.gradient.zero_()
        return torch.ones((), dtype=torch.bool, device=state.gradient.device)
    if update.factor != 1.0:
        state.gradient.mul_(update.factor)
    moved = (state.master, state.gradient, state.exp_avg, state.exp_avg_sq)
    count = state.master.numel()
    even = count - count % EVEN_SIZE if state.master.device.type == "cpu" else count
    if even:
        _torch_adamw(update, [vector[:even] for vector in moved])
    if even < count:
        padded = [vector.new_zeros(EVEN_SIZE) for vector in moved]
        for own, vector in zip(padded, moved, strict=True):
            own[: count - even] = vector[even:]
        _torch_adamw(update, padded)
        for own, vector in zip(padded, moved, strict=True):
            vector[even:] = own[: count - even]
    state.weights.copy_(state.master)
    state.gradient.zero_()
    return state.master.isfinite().all()


def _torch_adamw(update: Update, vectors: Sequence[Tensor]) -> None:
    """Apply an optimizer step with torch's AdamW. `vectors` are master weights, gradient, first and second
    moments."""
    master, gradient, exp_avg, exp_avg_sq = vectors
    adamw(
        [master],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(update.step - 1))],
        foreach=False,
        # One pass over the vectors instead of a dozen: seven times as fast.
        fused=master.device.type == "cpu",
        amsgrad=False,
        beta1=update.betas[0],
        beta2=update.betas[1],
        lr=update.learning_rate,
        weight_decay=update.weight_decay,
        eps=update.eps,
        maximize=False,
    )


def _update_scalars(update: Update) -> tuple[float, ...]:
    """Return the scalars of a job's optimizer step in the order of the kernel's table. 1 − β is computed here
    in float64, because in float32 the result for β = 0.999 would be off by 5e-5."""
    beta1, beta2 = update.betas
    return (
        update.factor,
        1.0 - update.learning_rate * update.weight_decay,
        update.learning_rate / (1.0 - beta1**update.step),
        math.sqrt(1.0 - beta2**update.step),
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        update.eps,
    )


def _address_table(vectors: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the table that the kernels read: one row per job with the addresses of its flat vectors and the
    vectors' length."""
    assert all(vector.data_ptr() % 16 == 0 for own in vectors for vector in own), (
        "a flat vector starts a tensor of its own"
    )
    rows = [[*(vector.data_ptr() for vector in own), own[0].numel()] for own in vectors]
    return to_device(torch.tensor(rows, dtype=torch.int64), vectors[0][0].device)
