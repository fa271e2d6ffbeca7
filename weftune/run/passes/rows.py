"""Microbatches on the device: they are padded to a fixed number of rows, and the job of each row is known.

Shapes: T rows, S supervised rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from weftune.adapters.banks import Banks
from weftune.base.attention import Pack, pack, with_prefixes
from weftune.base.chunks import ChunkKeys, SampleKeys
from weftune.base.model import Base
from weftune.core.batch import IGNORED, Microbatch, Segment, to_device
from weftune.core.deterministic import are_kernels_deterministic
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows
from weftune.plan.program.program import MicrobatchPlan
from weftune.run.measure.timers import DeviceSpan
from weftune.run.passes.adapted import AdaptedBase

if TYPE_CHECKING:
    from weftune.run.passes.scorer import Scores

MIN_BUCKET = 64
"""Smallest bucket (rounded-up value) for the lengths of samples, in tokens, and for numbers of rows."""


@dataclass(frozen=True, slots=True)
class DeviceMicrobatch:
    """A microbatch whose tensors are on the device, padded, with the indices of its supervised rows."""

    microbatch: Microbatch
    token_index: NDArray[np.int64]
    """For each row, the counter from which dropout's random numbers for this row are computed. The array is
    in host memory."""
    rows_S: Tensor
    sections: list[int]
    supervised_rows: NDArray[np.int64]
    """Indices of the supervised rows, in host memory."""

    def count_supervised(self, start: int, stop: int) -> int:
        """Return the number of supervised rows among the rows from `start` to `stop` − 1."""
        first, end = np.searchsorted(self.supervised_rows, (start, stop))
        return int(end - first)


def to_device_microbatch(
    microbatch: Microbatch, rows: int, device: torch.device, context: int = 0
) -> DeviceMicrobatch:
    """Pad a microbatch to `rows` rows and copy it to the device, without waiting for the device. If the
    microbatch is a single sample, that sample may be padded to at most `context` rows (see
    `pad_microbatch`)."""
    rows_S = (microbatch.targets_T != IGNORED).nonzero().squeeze(1)
    begins = torch.tensor([segment.start for segment in microbatch.segments[1:]], dtype=rows_S.dtype)
    sections = torch.searchsorted(rows_S, begins).tolist()
    full = pad_microbatch(microbatch, rows, context)
    return DeviceMicrobatch(
        full.to(device), full.token_index_T.numpy(), to_device(rows_S, device), sections, rows_S.numpy()
    )


def pad_microbatch(microbatch: Microbatch, rows: int, context: int = 0) -> Microbatch:
    """Return the microbatch padded to `rows` rows with additional samples, none of them longer than its
    longest sample. If the microbatch is a single sample, that sample is itself padded, up to `context` rows:
    its results do not change, since no row attends to a later row, and the attention of a single sample has
    faster kernels."""
    missing, lengths = rows - microbatch.rows, microbatch.sample_lengths
    if missing <= 0:
        return microbatch
    longest = max(lengths)
    if len(lengths) == 1 and rows <= context:
        lengths = (rows,)
    else:
        lengths += (longest,) * (missing // longest) + ((missing % longest,) if missing % longest else ())
    return replace(
        microbatch,
        tokens_T=pad(microbatch.tokens_T, (0, missing)),
        positions_T=pad(microbatch.positions_T, (0, missing)),
        targets_T=pad(microbatch.targets_T, (0, missing), value=IGNORED),
        token_index_T=pad(microbatch.token_index_T, (0, missing)),
        sample_lengths=lengths,
    )


@dataclass(frozen=True, slots=True)
class Membership:
    """The assignment of a microbatch's rows to jobs, together with the boundaries of its samples."""

    rows: Rows | None
    pack: Pack


def build_membership(
    base: Base, banks: Banks, device_microbatch: DeviceMicrobatch, route: Route, in_tiles: bool = False
) -> Membership:
    """Return what is the same for every stage: the job of each row of a microbatch, and the boundaries of the
    samples. If `in_tiles`, rows are assigned to jobs later, one tile of rows at a time."""
    rows = None
    if route is Route.tiled and not in_tiles:
        rows = Rows.empty(device_microbatch.microbatch.rows, banks.slots, base.device)
        rows.fill(banks.slot_rows(device_microbatch.microbatch), device_microbatch.token_index)
    packed = pack(device_microbatch.microbatch.sample_lengths, base.device)
    if are_kernels_deterministic():
        packed = bucket_pack(packed, base.shape.context)
    if jobs := banks.keys_before(device_microbatch.microbatch):
        packed = with_prefixes(
            packed, *_prefix_ranges(device_microbatch.microbatch, jobs), banks.read_prefix_keys
        )
    return Membership(rows, packed)


def _prefix_ranges(
    microbatch: Microbatch, jobs: Sequence[tuple[Segment, int]]
) -> tuple[list[int], list[slice]]:
    """Return the number of prefix keys (trained attention keys before a sample) of each sample, and for each
    of the given jobs the range of its samples."""
    begins = [0, *accumulate(microbatch.sample_lengths)][:-1]
    counts, samples = [0] * len(begins), []
    for segment, keys in jobs:
        own = slice(bisect_left(begins, segment.start), bisect_left(begins, segment.stop))
        counts[own] = [keys] * (own.stop - own.start)
        samples.append(own)
    return counts, samples


def bucket_pack(samples: Pack, context: int) -> Pack:
    """Return the pack (the boundaries of samples) in the form that captured passes use, so that captured and
    uncaptured passes give the same result. The number of samples is rounded up to its bucket with empty
    samples, and the longest length to its bucket, unless all samples are equally long.

    This matters because a deterministic backward of attention sums in an order that depends on the number of
    samples.
    """
    if samples.has_equal_lengths:
        return samples
    empty = bucket(len(samples.lengths), 1) - len(samples.lengths)
    boundaries_B = pad(samples.boundaries, (0, empty), value=sum(samples.lengths))
    longest = sample_length_bucket(samples.max_length, context)
    return replace(samples, boundaries=boundaries_B, max_length=longest, is_separated=False)


def bucket(value: int, min_value: int) -> int:
    """Return `value` rounded up to a power of two, but at least `min_value`."""
    return max(min_value, 1 << (value - 1).bit_length())


def sample_length_bucket(max_length: int, context: int) -> int:
    """Return the longest sample's length in tokens, rounded up to a power of two, but at most the base's
    context."""
    return min(context, bucket(max_length, MIN_BUCKET))


@dataclass(frozen=True, slots=True)
class StageVisit:
    """A pass of one microbatch over one stage, identified by the index of the microbatch and the index of the
    stage."""

    microbatch: int
    stage: int


Held = TypeVar("Held")


def renumber_visits(visits: Mapping[StageVisit, Held], numbers: Mapping[int, int]) -> dict[StageVisit, Held]:
    """Return a copy of `visits` with new microbatch indices in its keys, which are passes of microbatches
    over stages. `numbers` maps each old index to the new one."""
    return {StageVisit(numbers[at.microbatch], at.stage): one for at, one in visits.items()}


@dataclass(slots=True)
class TimedPass:
    """The device time of a microbatch's passes over the stages of this worker, without the time between
    stages. The record holds no tensors, since it is kept longer than the pass."""

    plan: MicrobatchPlan
    training: bool
    is_typical: bool = True
    """Whether the time of the pass is typical. False if kernels were compiled or a graph was captured during
    the pass."""
    forward: list[DeviceSpan] = field(default_factory=list)
    backward: list[DeviceSpan] = field(default_factory=list)


@dataclass(slots=True)
class InFlight:
    """The state of a microbatch that has entered the first of this worker's stages and has not left the
    worker yet."""

    device_microbatch: DeviceMicrobatch
    pass_times: TimedPass
    sample_keys: SampleKeys | None = None
    """Attention keys and values of a long sample, if the microbatch is a chunk of that sample. None
    otherwise."""
    scores: Scores | None = None
    """Losses of the microbatch, once it has passed the model's last stage on this worker. None before, and on
    other workers."""
    _membership: Membership | None = None

    def membership(self, adapted: AdaptedBase, in_tiles: bool = False) -> Membership:
        """Return the assignment of the microbatch's rows to jobs and the sample boundaries, computed in the
        first call and then kept."""
        if self._membership is None:
            found = build_membership(
                adapted.base, adapted.banks, self.device_microbatch, adapted.route, in_tiles
            )
            self._membership = (
                found if self.sample_keys is None else self._add_earlier_keys(found, adapted.banks)
            )
        return self._membership

    def _add_earlier_keys(self, membership: Membership, banks: Banks) -> Membership:
        """Return the membership (jobs and sample boundaries of the rows) for a chunk of a long sample,
        extended so that its rows also attend to the keys of the sample's earlier chunks."""
        chunk = self.pass_times.plan.chunk
        assert chunk is not None
        assert chunk.chunk_start is not None
        assert self.sample_keys is not None
        prefix_keys = [keys for _, keys in banks.keys_before(self.device_microbatch.microbatch)]
        read_prefix = banks.read_prefix_keys if prefix_keys else None
        cache = ChunkKeys(self.sample_keys, chunk.chunk_start, sum(prefix_keys), read_prefix)
        return replace(membership, pack=replace(membership.pack, prefixes=None, cache=cache))
