"""The attention of packed samples, in which every row attends only to itself and to earlier rows of its own
sample.

Transformers calls `attend` in place of its own attention, with the samples' boundaries as one keyword. Prefix
keys are trained keys and values that an adapter (prefix tuning) puts before every sample of its job.
Shapes: T rows of the pack, L rows of one sample, Z rows of samples that are gathered, H query heads, G key
and value heads, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from weftune.core.batch import to_device
from weftune.errors import BaseModelError

NAME = "weftune"

MIN_SEPARATED_ROWS = 4096
"""Minimum mean number of rows (tokens) per sample for which the attention of every sample is a separate
kernel launch."""
IGNORED_OPTIONS = frozenset({"position_ids", "cache_position", "position_embeddings"})
"""Keyword arguments of attention that `attend` ignores, because they took effect before it is called."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Samples that are concatenated along the rows (tokens): sample i has the rows from boundaries[i] to
    boundaries[i + 1]."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    max_length: int
    has_equal_lengths: bool = False
    """Whether all samples are equally long, so that they form an ordinary batch, for which faster kernels
    exist."""
    is_separated: bool = False
    """Whether attention is computed with one kernel launch per sample, which is faster than one launch for
    all samples if samples are long."""
    prefixes: Prefixes | GatheredPrefixes | None = None
    """Prefix keys and values that adapters put before the samples. None if no adapter of the pack has any."""
    cache: KeyValueCache | None = None
    """Keys and values of earlier rows of the samples, kept by earlier passes, to which the rows of the pack
    also attend. None if the pack contains all rows of every sample."""


class KeyValueCache(Protocol):
    """Keys, values and recurrent states that earlier forward passes computed for the samples of a pack."""

    @property
    def states(self) -> Sequence[dict[int, tuple[Tensor, Tensor]]]:
        """For each sample, a dict from layer number to the layer's recurrent state. The dict is empty before
        the sample's first pass."""

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rule: Rule, layer: int) -> Tensor:
        """Add the keys and values of the pack's rows (tokens) to the cache. Return the attention of these
        rows to all cached rows of their samples, [T, H, D]."""


ReadKeys = Callable[[int], Sequence[tuple[Tensor, Tensor]]]
"""Function that maps a layer number to the prefix keys and values, [P, G · D], of each job that has any. P is
the number of prefix keys of the job."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefix keys and values of the samples of a pack. All samples of one job have equally many."""

    runs: tuple[SampleRun, ...]
    """Groups of consecutive samples that together cover the pack, in order. A group has the samples of one
    job with prefix keys, or samples without any."""
    read_keys: ReadKeys


@dataclass(frozen=True, slots=True)
class GatheredPrefixes:
    """Prefix keys and values for a pass that is captured as a CUDA graph, in which index tensors select the
    samples. The samples with prefix keys are copied to Z separate rows, together with their prefix keys. Rows
    among the Z that nothing is copied to are zero."""

    read_keys: ReadKeys
    pack: Pack
    """Boundaries, within the Z gathered rows, of the samples with prefix keys, each together with its prefix
    keys."""
    source_Z: Tensor
    """For each of the Z gathered rows, the index of the pack's row that is copied there. Arbitrary for rows
    that are not a copy."""
    is_copy_Z: Tensor
    """Whether each of the Z gathered rows is a copy of a row of the pack. The other rows are prefix keys or
    zeros."""
    prefix_key_indices: tuple[Tensor, ...]
    """For each job, the indices of its prefix keys among the Z gathered rows, sample after sample."""
    rows_R: Tensor
    """Indices of those rows of the pack whose samples have prefix keys. Some indices are repeated to fill the
    tensor."""
    copy_index_R: Tensor
    """For each row in `rows_R`, the index of its copy among the Z gathered rows."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """Consecutive samples of a pack: all samples of one job with prefix keys, or samples without any."""

    rows: int
    """Number of rows (tokens) of these samples together, not counting prefix keys."""
    pack: Pack
    """Boundaries of these samples in a tensor that has each sample's prefix keys before its rows."""
    rows_T: Tensor | None = None
    """Indices, in the rows of `pack`, of the samples' own rows. None if the samples have no prefix keys."""
    keys_T: Tensor | None = None
    """Indices, in the rows of `pack`, of the prefix keys. None if the samples have no prefix keys."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A layer's parameters of attention: scale of the scores, sliding window and soft-cap."""

    scale: float | None
    window: int | None
    """Size of the sliding window: the number of rows to which a row attends, itself included. None means all
    earlier rows of the sample."""
    softcap: float | None


def pack(lengths: Sequence[int], device: torch.device) -> Pack:
    boundaries = to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    even = len(set(lengths)) == 1
    apart = not even and sum(lengths) >= MIN_SEPARATED_ROWS * len(lengths)
    return Pack(tuple(lengths), boundaries, max(lengths), even, apart)


def with_prefixes(packed: Pack, counts: Sequence[int], jobs: Sequence[slice], read_keys: ReadKeys) -> Pack:
    """Return the pack with counts[i] prefix keys (trained keys of an adapter) before sample i. `jobs`
    contains, for each job with prefix keys, the range of its samples."""
    device, runs, sample = packed.boundaries.device, list[SampleRun](), 0
    for job in (*jobs, slice(len(packed.lengths), None)):
        if plain := packed.lengths[sample : job.start]:
            runs.append(SampleRun(sum(plain), pack(plain, device)))
        if own := packed.lengths[job]:
            runs.append(_run_with_prefixes(own, counts[job.start], device))
            sample = job.stop
    return replace(packed, prefixes=Prefixes(tuple(runs), read_keys))


def _run_with_prefixes(lengths: Sequence[int], count: int, device: torch.device) -> SampleRun:
    """Return a `SampleRun` of consecutive samples with these lengths, each of which has `count` prefix
    keys."""
    whole = [length + count for length in lengths]
    begins = [stop - length for stop, length in zip(accumulate(whole), whole, strict=True)]
    keys = [torch.arange(begin, begin + count) for begin in begins]
    rows = [torch.arange(at + count, at + length) for at, length in zip(begins, whole, strict=True)]
    rows_T, keys_T = to_device(torch.cat(rows), device), to_device(torch.cat(keys), device)
    return SampleRun(sum(lengths), pack(whole, device), rows_T, keys_T)


def register_attention() -> None:
    """Register `attend` in transformers under the name `weftune`. Repeated calls are harmless.

    No mask function is registered, since `attend` itself separates the samples. With a mask function,
    transformers would check on the device in every pass where positions restart, and wait for the result.
    """
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    weftune_pack: Pack | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of packed samples, [1, T, H, D], and None in place of the attention weights. The
    signature is the one that transformers requires."""
    if weftune_pack is None:
        raise BaseModelError(
            f"{type(module).__name__} does not hand the samples' boundaries to its attention."
        )
    if attention_mask is not None:
        raise BaseModelError(f"{type(module).__name__} brings an attention mask of its own.")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise BaseModelError(f"{type(module).__name__} lets rows see the rows after them; it is not causal.")
    refuse_other_options(type(module).__name__, others)
    assert dropout == 0.0, "the base runs in eval mode"
    assert q_1HTD.shape[2] == sum(weftune_pack.lengths), "samples and rows disagree"

    rule = Rule(scaling, sliding_window, softcap)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTD))
    layer = getattr(module, "layer_idx", None)
    return attend_with_prefixes(q_THD, k_TGD, v_TGD, weftune_pack, rule, layer)[None], None


def attend_with_prefixes(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, rule: Rule, layer: int | None
) -> Tensor:
    """Return the attention of packed samples, [T, H, D], to their own keys, cached keys and prefix keys."""
    prefixes = pack.prefixes
    if prefixes is None and pack.cache is None:
        return attend_packed(q_THD, k_TGD, v_TGD, pack, rule)
    assert layer is not None, "cached keys and keys before samples need the number of the layer"
    if pack.cache is not None:
        return pack.cache.attend(q_THD, k_TGD, v_TGD, rule, layer)
    assert prefixes is not None
    if isinstance(prefixes, GatheredPrefixes):
        return _attend_gathered(q_THD, k_TGD, v_TGD, replace(pack, prefixes=None), prefixes, rule, layer)
    before, seen = iter(prefixes.read_keys(layer)), list[Tensor]()
    # `split`, not slices: its backward writes each gradient once.
    parts = (x.split([run.rows for run in prefixes.runs]) for x in (q_THD, k_TGD, v_TGD))
    for run, q, k, v in zip(prefixes.runs, *parts, strict=True):
        if run.rows_T is None or run.keys_T is None:
            seen.append(attend_packed(q, k, v, run.pack, rule))
            continue
        # Prefix keys get queries of zeros, so that every sample has as many queries as keys, as all kernels
        # require; the results of these queries are dropped.
        q, k, v = (_scatter_rows(x, run.pack, run.rows_T) for x in (q, k, v))
        k, v = (_insert_prefix_rows(x, own, run.keys_T) for x, own in zip((k, v), next(before), strict=True))
        seen.append(attend_packed(q, k, v, run.pack, rule)[run.rows_T])
    return torch.cat(seen)


def _scatter_rows(x_TGD: Tensor, pack: Pack, rows_T: Tensor) -> Tensor:
    """Return a tensor with as many rows as `pack`, in which row `rows_T[i]` is row i of `x_TGD` and all other
    rows are zero."""
    return x_TGD.new_zeros(sum(pack.lengths), *x_TGD.shape[1:]).index_copy(0, rows_T, x_TGD)


def _attend_gathered(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pack: Pack,
    prefixes: GatheredPrefixes,
    rule: Rule,
    layer: int,
) -> Tensor:
    """Return the attention, [T, H, D], of a pack in which some samples have prefix keys. First all rows are
    computed without prefix keys; then the results of samples with prefix keys are replaced by results that
    include these keys."""
    q_THD, k_TGD, v_TGD, q_ZHD, k_ZGD, v_ZGD = _CopyRows.apply(prefixes, q_THD, k_TGD, v_TGD)
    unprefixed_THD = attend_packed(q_THD, k_TGD, v_TGD, pack, rule)
    for (keys_PN, values_PN), at in zip(prefixes.read_keys(layer), prefixes.prefix_key_indices, strict=True):
        k_ZGD, v_ZGD = _insert_prefix_rows(k_ZGD, keys_PN, at), _insert_prefix_rows(v_ZGD, values_PN, at)
    attended_ZHD = attend_packed(q_ZHD, k_ZGD, v_ZGD, prefixes.pack, rule)
    seen_THD: Tensor = _ReplaceRows.apply(prefixes, unprefixed_THD, attended_ZHD)
    return seen_THD


class _CopyRows(torch.autograd.Function):
    """An autograd function that returns its input tensors unchanged, together with copies of the rows of
    samples that have prefix keys.

    The attention of the original rows is later discarded (by `_ReplaceRows`), so their gradients are zero.
    The backward therefore overwrites these zeros with the gradients of the copies, instead of adding two
    tensors of the size of the pack.
    """

    @staticmethod
    def forward(ctx: Any, prefixes: GatheredPrefixes, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.prefixes = prefixes
        return *given, *(_gather_rows(x_TGD, prefixes) for x_TGD in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        prefixes: GatheredPrefixes = ctx.prefixes
        own, laid = gradients[: len(gradients) // 2], gradients[len(gradients) // 2 :]
        for dx_TGD, dx_ZGD in zip(own, laid, strict=True):
            # The attention has just computed this gradient, and nothing else reads it.
            dx_TGD.index_copy_(0, prefixes.rows_R, dx_ZGD.index_select(0, prefixes.copy_index_R))
        return None, *own


class _ReplaceRows(torch.autograd.Function):
    """An autograd function that replaces attention without prefix keys by attention with prefix keys, in the
    rows of samples that have them."""

    @staticmethod
    def forward(ctx: Any, prefixes: GatheredPrefixes, unprefixed_THD: Tensor, attended_ZHD: Tensor) -> Tensor:
        ctx.prefixes = prefixes
        return unprefixed_THD.index_copy(
            0, prefixes.rows_R, attended_ZHD.index_select(0, prefixes.copy_index_R)
        )

    @staticmethod
    def backward(ctx: Any, d_THD: Tensor) -> tuple[None, Tensor, Tensor]:
        prefixes: GatheredPrefixes = ctx.prefixes
        d_ZHD = _gather_rows(d_THD, prefixes)
        # The linear after the attention has just computed this gradient, and nothing else reads it.
        return None, d_THD.index_fill_(0, prefixes.rows_R, 0.0), d_ZHD


def _gather_rows(x_TGD: Tensor, prefixes: GatheredPrefixes) -> Tensor:
    taken_ZGD = x_TGD.index_select(0, prefixes.source_Z)
    return torch.where(prefixes.is_copy_Z[:, None, None], taken_ZGD, 0.0)


def _insert_prefix_rows(x_ZGD: Tensor, prefix_PN: Tensor, indices: Tensor) -> Tensor:
    before_PGD = prefix_PN.view(-1, *x_ZGD.shape[1:]).to(x_ZGD.dtype)
    return x_ZGD.index_copy(0, indices, before_PGD.repeat(len(indices) // len(before_PGD), 1, 1))


def attend_packed(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, rule: Rule) -> Tensor:
    """Return the attention of packed samples without prefix keys, [T, H, D]."""
    if kernel_fits(q_THD, v_TGD, rule):
        unlimited = rule.window is None or rule.window >= pack.max_length
        if pack.has_equal_lengths and unlimited:
            return attend_as_batch(q_THD, k_TGD, v_TGD, pack, rule)
        if not (pack.is_separated and unlimited):
            return attend_with_kernel(q_THD, k_TGD, v_TGD, pack, rule)
    q_1HTD, k_1GTD, v_1GTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
    return attend_by_sample(q_1HTD, k_1GTD, v_1GTD, pack, rule)[0]


def refuse_other_options(module: str, options: dict[str, Any]) -> None:
    """Raise BaseModelError if attention is called with an unknown option, such as attention sinks or position
    biases, which would change the result."""
    given = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := [name for name in options if name in given - IGNORED_OPTIONS]:
        raise BaseModelError(
            f"{module} asks its attention for {', '.join(unknown)}, which Weftune does not know."
        )


def attend_by_sample(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, pack: Pack, rule: Rule) -> Tensor:
    """Return the attention of packed samples, [1, T, H, D], computed by one kernel launch per sample.
    `torch.split` separates the samples, since its backward writes each gradient only once."""
    samples = zip(*(x.split(pack.lengths, dim=2) for x in (q_1HTD, k_1GTD, v_1GTD)), strict=True)
    sample_attention = attend_within if rule.softcap is None else attend_within_capped
    seen = [sample_attention(q, k, v, rule).transpose(1, 2) for q, k, v in samples]
    # A copy would be kept beside the output that the attention keeps.
    return seen[0] if len(seen) == 1 else torch.cat(seen, dim=1)


def attend_within(q_1HLD: Tensor, k_1GLD: Tensor, v_1GLD: Tensor, rule: Rule) -> Tensor:
    """Return the attention of one sample, [1, H, rows, D]. If there are fewer queries than keys, the queries
    belong to the last rows of the sample."""
    rows, length = q_1HLD.shape[2], k_1GLD.shape[2]
    windowed = rule.window is not None and rule.window < length
    is_masked = windowed or 1 < rows < length
    return scaled_dot_product_attention(
        q_1HLD,
        k_1GLD,
        v_1GLD,
        attn_mask=visible_key_mask(rows, length, rule.window, q_1HLD.device) if is_masked else None,
        is_causal=rows == length and not is_masked,
        scale=rule.scale,
        enable_gqa=q_1HLD.shape[1] != k_1GLD.shape[1],
    )


def attend_to_earlier(q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, rule: Rule) -> Tensor:
    """Return the attention, [T, H, D], of the last T rows of one sample to all of its L keys."""
    if kernel_fits(q_THD, v_LGD, rule):
        row_pack, key_pack = (pack([len(x)], x.device) for x in (q_THD, k_LGD))
        return attend_with_kernel(q_THD, k_LGD, v_LGD, row_pack, rule, key_pack)
    q_1HTD, k_1GLD, v_1GLD = (x.transpose(0, 1)[None] for x in (q_THD, k_LGD, v_LGD))
    if rule.softcap is not None:
        return attend_within_capped(q_1HTD, k_1GLD, v_1GLD, rule)[0].transpose(0, 1)
    rows, length = len(q_THD), len(k_LGD)
    window = None if rule.window is None or rule.window >= length else rule.window
    is_whole = rows == length and window is None
    out_1HTD = scaled_dot_product_attention(
        q_1HTD,
        k_1GLD,
        v_1GLD,
        attn_mask=None if is_whole else _shared_mask(rows, length, window, q_THD.dtype, q_THD.device),
        is_causal=is_whole,
        scale=rule.scale,
        enable_gqa=q_THD.shape[1] != k_LGD.shape[1],
    )
    return out_1HTD[0].transpose(0, 1)


def _shared_mask(
    rows: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a mask, [T, L], that is added to the attention scores of the last T rows of a sample.

    PyTorch keeps the mask for the backward, so all chunks and layers should share its memory. The mask of a
    row and a key depends only on their distances to the last row and the last key. The result is therefore
    the lower right corner of a larger mask, which is cached.
    """
    all_rows, all_keys = (1 << (count - 1).bit_length() for count in (rows, length))
    return _largest_mask(all_rows, all_keys, window, dtype, device)[-rows:, -length:]


@lru_cache(maxsize=2)
def _largest_mask(
    rows: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    hidden_TL = ~visible_key_mask(rows, length, window, device)
    return torch.zeros(rows, length, dtype=dtype, device=device).masked_fill_(hidden_TL, -torch.inf)


def attend_within_capped(q_1HLD: Tensor, k_1GLD: Tensor, v_1GLD: Tensor, rule: Rule) -> Tensor:
    """Return the attention of one sample, [1, H, rows, D], with soft-capped scores: each score becomes cap ·
    tanh(score / cap)."""
    assert rule.softcap is not None
    groups, width = k_1GLD.shape[1], q_1HLD.shape[-1]
    scale = width**-0.5 if rule.scale is None else rule.scale
    q_1GRLD = q_1HLD.unflatten(1, (groups, -1))
    scores_1GRLL = q_1GRLD @ k_1GLD.unsqueeze(2).mT * scale
    scores_1GRLL = rule.softcap * torch.tanh(scores_1GRLL / rule.softcap)
    hidden_LL = ~visible_key_mask(q_1HLD.shape[2], k_1GLD.shape[2], rule.window, q_1HLD.device)
    precise = torch.promote_types(scores_1GRLL.dtype, torch.float32)
    weights_1GRLL = scores_1GRLL.masked_fill(hidden_LL, -torch.inf).softmax(dim=-1, dtype=precise)
    return (weights_1GRLL.to(v_1GLD.dtype) @ v_1GLD.unsqueeze(2)).flatten(1, 2)


def visible_key_mask(rows: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return a boolean mask, [rows, L], that says which of a sample's L keys each of its last `rows` rows
    attends to. `window` is the maximum number of keys per row: the most recent ones, including the row's
    own."""
    row_L = torch.arange(length, device=device)
    distance_LL = row_L[length - rows :, None] - row_L
    return (distance_LL >= 0) & (distance_LL < (length if window is None else window))


def kernel_fits(q_THD: Tensor, v_TGD: Tensor, rule: Rule) -> bool:
    """Return whether torch's variable-length attention kernel supports these tensors and parameters. It
    requires half precision, a recent GPU, and no soft-cap."""
    width = q_THD.shape[-1]
    same = width == v_TGD.shape[-1]
    return rule.softcap is None and same and is_kernel_supported(q_THD.device, q_THD.dtype, width)


def is_kernel_supported(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether torch's variable-length attention kernel, which CUDA graphs can capture, supports heads
    of this width and dtype on this device."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and width <= 256 and width % 8 == 0 and has_kernel(device.index)


@cache
def has_kernel(device_index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (8, 0)


def attend_as_batch(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, rule: Rule) -> Tensor:
    """Return the attention, [T, H, D], of samples of equal length, computed as a batch of S samples of L
    rows."""
    q_SHLD, k_SGLD, v_SGLD = (
        x.unflatten(0, (-1, pack.max_length)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD)
    )
    out_SHLD = attend_within(q_SHLD, k_SGLD, v_SGLD, rule)
    return out_SHLD.transpose(1, 2).flatten(0, 1)


def attend_with_kernel(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pack: Pack, rule: Rule, key_pack: Pack | None = None
) -> Tensor:
    """Return the attention of packed samples, [T, H, D], computed by one kernel. If the samples have more
    keys than rows in the pack, `key_pack` contains the boundaries of the keys, and the rows in the pack are
    the last rows of their samples."""
    from torch.nn.attention.varlen import varlen_attn

    keys = key_pack or pack
    # The kernel's left window does not count the row itself. (-1, 0) is torch's notation for plain causal.
    left = -1 if rule.window is None or rule.window >= keys.max_length else rule.window - 1
    # torch 2.11 detects grouped heads itself; later versions need the argument.
    kernel = partial(varlen_attn, enable_gqa=True) if has_grouped_heads_option() else varlen_attn
    out_THD = kernel(
        q_THD,
        k_TGD,
        v_TGD,
        pack.boundaries,
        keys.boundaries,
        pack.max_length,
        keys.max_length,
        scale=rule.scale,
        window_size=(left, 0),
    )
    assert isinstance(out_THD, Tensor)
    return out_THD


@cache
def has_grouped_heads_option() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
