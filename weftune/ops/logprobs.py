"""Log-probabilities of the target tokens, computed in chunks so that the logits of all rows are never in
memory at once, and sums over the rows of each job.

Rows are independent and the head is frozen, so the gradient of each row's log-probability with respect to its
hidden state is computed in the forward pass, chunk by chunk; the backward only scales it row by row. If a job
trains some rows of the head, the gradients of these rows' logits are saved too, and the backward computes the
gradient of the trained rows from them.

If the head is divided among shards (workers), each shard computes the logits of its own tokens. The shards
exchange a few statistics of each row, from which all compute the same log-probabilities, and they add up
their parts of the gradient.

Shapes: S supervised rows, J jobs (the rows of a job are contiguous), D hidden width, V vocabulary (on a shard
its own tokens), K shards, n tokens whose head rows a job trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weftune.core.batch import to_device
from weftune.core.shapes import logit_rows
from weftune.core.shards import VocabularyShard
from weftune.core.weights import Head, HeadRows, float_linear
from weftune.ops import triton as kernels
from weftune.ops.fallback import run_with_fallback
from weftune.ops.triton import kernels_available


def target_logprobs(
    h_SD: Tensor, targets_S: Tensor, head: Head, own_rows: HeadRows | None = None
) -> tuple[Tensor, Tensor]:
    """Return each row's log-probability of its target [S], and whether the target is the row's argmax [S].
    `own_rows` are the rows of the head that the job trains, or None. Among equal logits the argmax is the
    lowest index, as in `torch.argmax`: a row whose logits are all equal predicts token 0."""
    if head.shard is not None:
        rows_nD, ids_n = (None, None) if own_rows is None else (own_rows.rows_nD, own_rows.ids_n)
        return _ShardedTargetLogprobs.apply(h_SD, rows_nD, ids_n, targets_S, head, head.shard)
    if own_rows is not None:
        return _OwnTargetLogprobs.apply(h_SD, own_rows.rows_nD, own_rows.ids_n, targets_S, head)
    return _TargetLogprobs.apply(h_SD, targets_S, head)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_SD: Tensor, targets_S: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        needs_gradient = ctx.needs_input_grad[0]
        rows = logit_rows(h_SD.device.type, head.weight_VD.shape[0])
        by_chunk = _run_kernel_or_torch if kernels_available(h_SD) else _run_torch
        logprobs, correct = [], []
        gradient_SD = torch.empty_like(h_SD) if needs_gradient else h_SD
        chunks = zip(h_SD.split(rows), targets_S.split(rows), gradient_SD.split(rows), strict=True)
        for h, targets, into in chunks:
            logprob, right, gradient = by_chunk(h, targets, head, needs_gradient)
            logprobs.append(logprob)
            correct.append(right)
            if needs_gradient:
                into.copy_(gradient)
        if needs_gradient:
            ctx.save_for_backward(gradient_SD)
            ctx.rows = rows
        correct_S = torch.cat(correct)
        ctx.mark_non_differentiable(correct_S)
        return torch.cat(logprobs), correct_S

    @staticmethod
    def backward(ctx: Any, d_S: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient_SD,) = ctx.saved_tensors
        dh_SD = torch.empty_like(gradient_SD)
        # In chunks, since products are in float32.
        for into, gradient, d in zip(*(x.split(ctx.rows) for x in (dh_SD, gradient_SD, d_S)), strict=True):
            into.copy_(gradient * d[:, None])
        return dh_SD, None, None


class _OwnTargetLogprobs(torch.autograd.Function):
    """Log-probabilities of the targets for a job that trains some rows of the head, in plain torch."""

    @staticmethod
    def forward(
        ctx: Any, h_SD: Tensor, rows_nD: Tensor, ids_n: Tensor, targets_S: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        own, size = HeadRows(ids_n, rows_nD), logit_rows(h_SD.device.type, head.weight_VD.shape[0])
        logprobs, correct, dh, dlogits = [], [], [], []
        for h, targets in zip(h_SD.split(size), targets_S.split(size), strict=True):
            logits = head.logits(h, own)
            normalised = torch.log_softmax(logits, dim=-1)
            logprobs.append(normalised.gather(1, targets[:, None]).squeeze(1))
            correct.append(logits.argmax(dim=-1) == targets)
            gradient = _product_gradient(normalised, logits, targets, head)
            dlogits.append(gradient[:, ids_n])
            gradient[:, ids_n] = 0.0
            through_own = dlogits[-1].to(h.dtype) @ rows_nD
            dh.append((gradient.to(h.dtype) @ head.weight_VD + through_own).to(h.dtype))
        ctx.save_for_backward(h_SD, torch.cat(dh), torch.cat(dlogits))
        correct_S = torch.cat(correct)
        ctx.mark_non_differentiable(correct_S)
        return torch.cat(logprobs), correct_S

    @staticmethod
    def backward(ctx: Any, d_S: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        h_SD, dh_SD, dlogits_Sn = ctx.saved_tensors
        drows_nD = (dlogits_Sn * d_S[:, None]).T @ h_SD.to(dlogits_Sn.dtype)
        return (dh_SD * d_S[:, None]).to(h_SD.dtype), drows_nD.to(h_SD.dtype), None, None, None


class _ShardedTargetLogprobs(torch.autograd.Function):
    """Log-probabilities of the targets if the rows of the head are divided among shards (workers), in plain
    torch. All sums over shards are computed in the forward, because every shard runs the forward, even for a
    job that has ended on another shard."""

    @staticmethod
    def forward(
        ctx: Any,
        h_SD: Tensor,
        rows_nD: Tensor | None,
        ids_n: Tensor | None,
        targets_S: Tensor,
        head: Head,
        shard: VocabularyShard,
    ) -> tuple[Tensor, Tensor]:
        size = logit_rows(h_SD.device.type, shard.max_rows)
        own = None if rows_nD is None or ids_n is None else _OwnRowsOnShard(rows_nD, ids_n, shard)
        found = [
            _shard_logprobs(h, targets, head, shard, own, ctx.needs_input_grad[0])
            for h, targets in zip(h_SD.split(size), targets_S.split(size), strict=True)
        ]
        logprobs_S, correct_S, dh_SD, dlogits_Sn = (torch.cat(parts) for parts in zip(*found, strict=True))
        if ctx.needs_input_grad[0]:
            shard.team.sum_over_shards(dh_SD)
            if own is not None:
                shard.team.sum_over_shards(dlogits_Sn)
            ctx.save_for_backward(h_SD, dh_SD, dlogits_Sn)
        ctx.mark_non_differentiable(correct_S)
        return logprobs_S, correct_S

    @staticmethod
    def backward(ctx: Any, d_S: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        h_SD, dh_SD, dlogits_Sn = ctx.saved_tensors
        drows_nD = None
        if ctx.needs_input_grad[1]:
            drows_nD = ((dlogits_Sn * d_S[:, None]).T @ h_SD.to(dlogits_Sn.dtype)).to(h_SD.dtype)
        return (dh_SD * d_S[:, None]).to(h_SD.dtype), drows_nD, None, None, None, None


class _OwnRowsOnShard:
    """The rows of the output head that a job trains, if the head is divided among shards (workers). The
    trained rows of this shard's tokens replace the frozen rows."""

    def __init__(self, rows_nD: Tensor, ids_n: Tensor, shard: VocabularyShard) -> None:
        index_n, self.is_local_n = shard.local_rows(ids_n)
        self.replaced = HeadRows(index_n[self.is_local_n], rows_nD[self.is_local_n])

    def take_gradient(self, gradient_SV: Tensor) -> Tensor:
        """Return the gradient at the logits of all trained head rows, [S, n], which is 0 for trained rows of
        other shards. In `gradient_SV`, set the columns of this shard's trained rows to 0."""
        dlogits_Sn = gradient_SV.new_zeros(len(gradient_SV), len(self.is_local_n))
        dlogits_Sn[:, self.is_local_n] = gradient_SV[:, self.replaced.ids_n]
        gradient_SV[:, self.replaced.ids_n] = 0.0
        return dlogits_Sn


def _shard_logprobs(
    h: Tensor,
    targets_S: Tensor,
    head: Head,
    shard: VocabularyShard,
    own_rows: _OwnRowsOnShard | None,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (1) the log-probabilities, (2) whether the targets are the argmax, (3) this shard's part of the
    gradient at `h`, and (4) its part of the gradient at the logits of the head rows that the job trains, [S,
    0] if there are none."""
    logits_SV = head.logits(h, None if own_rows is None else own_rows.replaced)
    row_S, is_local_S = shard.local_rows(targets_S)
    target_S = torch.where(is_local_S, logits_SV.gather(1, row_S[:, None])[:, 0], 0.0)
    best_S = logits_SV.argmax(dim=-1)
    max_S = logits_SV.gather(1, best_S[:, None])[:, 0]
    sum_S = (logits_SV - max_S[:, None]).exp_().sum(dim=-1)
    # A float32 represents every token's number exactly.
    statistics_4S = torch.stack([target_S, max_S, sum_S, (best_S + shard.start).to(logits_SV.dtype)])
    target_KS, max_KS, sum_KS, best_KS = shard.team.gather(statistics_4S).unbind(dim=1)
    # The first of several equal maxima: shards are in the order of their tokens.
    holder_1S = max_KS.argmax(dim=0, keepdim=True)
    top_S = max_KS.gather(0, holder_1S)[0]
    normaliser_S = (sum_KS * (max_KS - top_S).exp()).sum(dim=0).log()
    logprobs_S = target_KS.sum(dim=0) - top_S - normaliser_S
    correct_S = best_KS.gather(0, holder_1S)[0] == targets_S
    dlogits_Sn = logits_SV.new_empty(len(h), 0)
    if not needs_gradient:
        return logprobs_S, correct_S, h, dlogits_Sn
    normalised_SV = logits_SV - top_S[:, None] - normaliser_S[:, None]
    counts_S = is_local_S.to(logits_SV.dtype)
    gradient_SV = _product_gradient(normalised_SV, logits_SV, row_S, head, counts_S)
    through_own: Tensor | float = 0.0
    if own_rows is not None:
        dlogits_Sn = own_rows.take_gradient(gradient_SV)
        through_own = dlogits_Sn[:, own_rows.is_local_n].to(h.dtype) @ own_rows.replaced.rows_nD
    dh = gradient_SV.to(h.dtype) @ head.weight_VD + through_own
    return logprobs_S, correct_S, dh.to(h.dtype), dlogits_Sn


def _run_kernel_or_torch(
    h: Tensor, targets: Tensor, head: Head, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return run_with_fallback(
        "log-probability", h.device, _run_kernel, _run_torch, h, targets, head, needs_gradient
    )


def _run_torch(h: Tensor, targets: Tensor, head: Head, needs_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits = head.logits(h)
    normalised = torch.log_softmax(logits, dim=-1)
    logprobs = normalised.gather(1, targets[:, None]).squeeze(1)
    correct = logits.argmax(dim=-1) == targets
    if not needs_gradient:
        return logprobs, correct, h
    gradient = _product_gradient(normalised, logits, targets, head)
    return logprobs, correct, (gradient.to(head.weight_VD.dtype) @ head.weight_VD).to(h.dtype)


def _product_gradient(
    normalised: Tensor, logits: Tensor, targets: Tensor, head: Head, counts: Tensor | float = 1.0
) -> Tensor:
    """Return the gradient of log p(target) with respect to the product hWᵀ of hidden states and head, through
    the soft-cap and the multiplier of the logits. `normalised` is overwritten. `counts` is 1 or, if the head
    is divided among shards, for each row 1 if its target is on this shard and 0 otherwise."""
    gradient = normalised.exp_().neg_()
    gradient[torch.arange(len(targets), device=targets.device), targets] += counts
    if head.softcap is not None:
        gradient *= 1.0 - (logits / head.softcap) ** 2
    if head.multiplier != 1.0:
        gradient *= head.multiplier
    return gradient


def _run_kernel(
    h: Tensor, targets: Tensor, head: Head, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    z = float_linear(h, head.weight_VD, head.bias_V)
    # Of logits in half precision, the gradient is in half precision, too, for the product with the weight.
    gradient = z if h.dtype == z.dtype or not needs_gradient else torch.empty_like(z, dtype=h.dtype)
    logprobs = torch.empty(len(h), dtype=torch.float32, device=h.device)
    correct = torch.empty(len(h), dtype=torch.bool, device=h.device)
    if not len(h):
        return logprobs, correct, h
    with torch.cuda.device_of(h):
        kernels.logprobs.target_logprobs[(len(h),)](
            z,
            gradient,
            targets,
            logprobs,
            correct,
            z.shape[1],
            head.multiplier,
            head.softcap or 1.0,
            HAS_SOFTCAP=head.softcap is not None,
            GRADIENT=needs_gradient,
            BLOCK=4096,
            num_warps=8,
        )
    return logprobs, correct, gradient @ head.weight_VD if needs_gradient else h


def range_sums(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sums of J consecutive ranges of values with the given lengths, [J]. The result is
    differentiable."""
    lengths_J = to_device(torch.tensor(lengths), values_S.device)
    # Unsafe, since otherwise the lengths are checked on the device and the host waits for it.
    return torch.segment_reduce(values_S, "sum", lengths=lengths_J, unsafe=True)


def range_counts(flags_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the exact number of True values in each of J consecutive ranges with the given lengths, [J]."""
    stops_J = to_device(torch.tensor(lengths).cumsum(0), flags_S.device)
    counted = torch.nn.functional.pad(flags_S.cumsum(0), (1, 0))
    ends_J = counted.index_select(0, stops_J)
    return torch.diff(ends_J, prepend=ends_J.new_zeros(1))
