"""Keys of CUDA graphs, and the graphs' input tensors, whose addresses never change.

The rows of a job are gathered by index if the tiled kernels do not support its adapter. For every such job a
graph reserves a number of rows and, if the adapter adds prefix keys (trained attention keys before every
sample), a number of samples. These sizes belong to the graph's key; the positions of the rows are values of
input tensors.

Shapes: T rows, B boundaries of samples, R reserved rows, Z rows of samples that are copied together with
their prefix keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.attention import GatheredPrefixes, Pack
from weftune.core.batch import IGNORED, Microbatch, Segment, copy_to
from weftune.ops.lora.rows import Rows
from weftune.ops.site import GatheredRows
from weftune.plan.program.program import Recompute
from weftune.run.passes.rows import MIN_BUCKET, DeviceMicrobatch, Membership, bucket, sample_length_bucket


@dataclass(frozen=True, slots=True)
class GatheredJob:
    """The numbers of rows and samples that a CUDA graph reserves for one job whose rows are gathered by
    index, because the tiled kernels do not support its adapter."""

    job: str
    serial: int
    """Serial number of the job's attachment to the base. It distinguishes attachments, because the graph
    reads memory that was allocated when the job was attached."""
    rows: int
    prefix_keys: int = 0
    """Number of trained attention keys that the job's adapter (prefix tuning) puts before every sample. 0 for
    other adapters."""
    samples: int = 0
    """Number of samples for which prefix keys (trained attention keys) are reserved. 0 if the adapter has no
    prefix keys."""

    @property
    def rows_with_prefixes(self) -> int:
        """Number of reserved rows, including one row for every reserved prefix key."""
        return self.rows + self.prefix_keys * self.samples


def gathered_jobs(banks: Banks, microbatch: Microbatch) -> tuple[GatheredJob, ...]:
    """Return the jobs of the microbatch whose rows are gathered by index, because the tiled kernels do not
    support their adapters. Each has the sizes to reserve for it, and they are in the order in which the jobs
    were attached."""
    found = []
    for segment, attached in banks.gathered_segments(microbatch):
        rows = bucket(segment.stop - segment.start, MIN_BUCKET)
        samples = bucket(len(_sample_lengths(microbatch, segment)), 1) if attached.prefix_keys else 0
        found.append(GatheredJob(segment.job, attached.serial, rows, attached.prefix_keys, samples))
    return tuple(sorted(found, key=lambda one: one.serial))


def _sample_lengths(microbatch: Microbatch, segment: Segment) -> Sequence[int]:
    """Return the lengths in tokens of the samples in a segment (the rows of one job)."""
    begins = [0, *accumulate(microbatch.sample_lengths)]
    return microbatch.sample_lengths[bisect_left(begins, segment.start) : bisect_left(begins, segment.stop)]


class Gathering:
    """Index tensors with which a CUDA graph selects the rows of jobs whose adapters the tiled kernels do not
    support. All graphs with the same key share them."""

    def __init__(
        self, jobs: Sequence[GatheredJob], max_length: int, banks: Banks, device: torch.device
    ) -> None:
        """Allocate the index tensors for microbatches whose samples have at most `max_length` tokens."""
        self._banks = banks
        self.segments = tuple(Segment(one.job, 0, 0, 0) for one in jobs)
        """One segment (the rows of one job in a microbatch) for each gathered job. Only the job's name is set
        in it."""
        self.gathered = {
            one.job: GatheredRows(
                torch.zeros(one.rows, dtype=torch.int64, device=device),
                torch.zeros(one.rows, 1, dtype=torch.bool, device=device),
                torch.zeros(one.rows, dtype=torch.int64, device=device),
            )
            for one in jobs
            if not one.prefix_keys
        }
        self._prefixed = [one for one in jobs if one.prefix_keys]
        self._longest = max_length + max((one.prefix_keys for one in jobs), default=0)
        self.prefixes = self._empty_prefixes(banks, device) if self._prefixed else None

    def _empty_prefixes(self, banks: Banks, device: torch.device) -> GatheredPrefixes:
        total_rows = sum(one.rows_with_prefixes for one in self._prefixed)
        sample_rows = sum(one.rows for one in self._prefixed)
        boundaries_B = torch.zeros(1 + sum(map(self._max_samples, self._prefixed)), dtype=torch.int32)
        return GatheredPrefixes(
            read_keys=banks.read_prefix_keys,
            pack=Pack((total_rows,), boundaries_B.to(device), self._longest),
            source_Z=torch.zeros(total_rows, dtype=torch.int64, device=device),
            is_copy_Z=torch.zeros(total_rows, dtype=torch.bool, device=device),
            prefix_key_indices=tuple(
                torch.zeros(one.prefix_keys * one.samples, dtype=torch.int64, device=device)
                for one in self._prefixed
            ),
            rows_R=torch.zeros(sample_rows, dtype=torch.int64, device=device),
            copy_index_R=torch.zeros(sample_rows, dtype=torch.int64, device=device),
        )

    def _max_samples(self, job: GatheredJob) -> int:
        """Return the maximum number of a job's samples in a microbatch, including dummy samples that fill
        unused rows."""
        return job.samples + -(-job.rows_with_prefixes // self._longest)

    def fill(self, microbatch: Microbatch) -> None:
        """Write the row positions of this microbatch into the index tensors."""
        segments = {segment.job: segment for segment, _ in self._banks.gathered_segments(microbatch)}
        for job, found in self.gathered.items():
            start, count = segments[job].start, segments[job].stop - segments[job].start
            number_R = torch.arange(len(found.index_R))
            copy_to(found.first_position_R, number_R % count)
            copy_to(found.index_R, start + number_R % count)
            copy_to(found.is_counted_R1, (number_R < count)[:, None])
        if self.prefixes is not None:
            self._fill_prefixes(self.prefixes, microbatch, segments)

    def _fill_prefixes(
        self, prefixes: GatheredPrefixes, microbatch: Microbatch, segments: dict[str, Segment]
    ) -> None:
        source_Z = torch.zeros(len(prefixes.source_Z), dtype=torch.int64)
        is_copy_Z = torch.zeros(len(source_Z), dtype=torch.bool)
        behind, places, boundaries, begin = list[Tensor](), list[Tensor](), [0], 0
        for job, prefix_key_indices in zip(self._prefixed, prefixes.prefix_key_indices, strict=True):
            end, row = begin + job.rows_with_prefixes, segments[job.job].start
            count = segments[job.job].stop - row
            source_Z[begin:end] = row + torch.arange(job.rows_with_prefixes) % count
            keys, at, first = list[int](), begin, len(boundaries)
            for length in _sample_lengths(microbatch, segments[job.job]):
                keys += range(at, at + job.prefix_keys)
                rows = slice(at + job.prefix_keys, at + job.prefix_keys + length)
                source_Z[rows], is_copy_Z[rows] = torch.arange(row, row + length), True
                at, row = rows.stop, row + length
                boundaries.append(at)
            number_R = torch.arange(job.rows) % count
            behind.append(segments[job.job].start + number_R)
            places.append((begin + is_copy_Z[begin:end].nonzero()[:, 0])[number_R])
            # Keys of absent samples, in the rest of the job's room; no row attends to them.
            keys += range(at, at + len(prefix_key_indices) - len(keys))
            boundaries += [*range(at + self._longest, end, self._longest), end]
            boundaries += [end] * (first + self._max_samples(job) - len(boundaries))
            copy_to(prefix_key_indices, torch.tensor(keys))
            begin = end
        copy_to(prefixes.source_Z, source_Z)
        copy_to(prefixes.is_copy_Z, is_copy_Z)
        copy_to(prefixes.rows_R, torch.cat(behind))
        copy_to(prefixes.copy_index_R, torch.cat(places))
        copy_to(prefixes.pack.boundaries, torch.tensor(boundaries, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class GraphKey:
    rows: int
    max_length: int
    samples: int
    has_equal_lengths: bool
    limits: tuple[object, ...]
    recompute: Recompute
    gathered_jobs: tuple[GatheredJob, ...] = ()


def make_graph_key(
    device_microbatch: DeviceMicrobatch, banks: Banks, recompute: Recompute, context: int
) -> GraphKey:
    lengths = device_microbatch.microbatch.sample_lengths
    even = len(set(lengths)) == 1
    return GraphKey(
        rows=device_microbatch.microbatch.rows,
        max_length=lengths[0] if even else sample_length_bucket(max(lengths), context),
        samples=len(lengths) if even else bucket(len(lengths), 1),
        has_equal_lengths=even,
        limits=banks.limits(),
        recompute=recompute,
        gathered_jobs=gathered_jobs(banks, device_microbatch.microbatch),
    )


class GraphInputs:
    """The input tensors that all CUDA graphs with the same key share."""

    def __init__(self, banks: Banks, key: GraphKey, device: torch.device) -> None:
        self._banks = banks
        self._boundaries_B = torch.full((key.samples + 1,), key.rows, dtype=torch.int32, device=device)
        self._tokens_T = torch.zeros(key.rows, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._tokens_T)
        self._filled_from: DeviceMicrobatch | None = None
        self.rows = Rows.empty(key.rows, banks.slots, device)
        self.gathering = Gathering(key.gathered_jobs, key.max_length, banks, device)
        self.microbatch = Microbatch(
            tokens_T=self._tokens_T,
            positions_T=self._positions_T,
            targets_T=torch.full_like(self._tokens_T, IGNORED),
            token_index_T=self.rows.token_index_T,
            sample_lengths=(key.rows,),
            segments=self.gathering.segments,
        )
        prefixes = self.gathering.prefixes
        self.pack = Pack(
            (key.rows,), self._boundaries_B, key.max_length, key.has_equal_lengths, prefixes=prefixes
        )

    def fill(self, device_microbatch: DeviceMicrobatch) -> None:
        """Copy a microbatch into the input tensors, and compute which job each row belongs to."""
        lengths = torch.tensor((0, *device_microbatch.microbatch.sample_lengths), dtype=torch.int32).cumsum(0)
        boundaries_B = torch.full((len(self._boundaries_B),), len(self._tokens_T), dtype=torch.int32)
        boundaries_B[: len(lengths)] = lengths
        copy_to(self._boundaries_B, boundaries_B)
        self._tokens_T.copy_(device_microbatch.microbatch.tokens_T)
        self._positions_T.copy_(device_microbatch.microbatch.positions_T)
        self.rows.fill(self._banks.slot_rows(device_microbatch.microbatch), device_microbatch.token_index)
        self.gathering.fill(device_microbatch.microbatch)

    def copy(self, device_microbatch: DeviceMicrobatch, membership: Membership) -> None:
        """Copy a microbatch, with the assignment of its rows to jobs, into the input tensors, unless they
        still contain it from its pass over the previous stage."""
        if self._filled_from is device_microbatch:
            return
        assert membership.rows is not None
        boundaries_B = membership.pack.boundaries
        self._boundaries_B[: len(boundaries_B)].copy_(boundaries_B)
        self._boundaries_B[len(boundaries_B) :].fill_(len(self._tokens_T))
        self._tokens_T.copy_(device_microbatch.microbatch.tokens_T)
        self._positions_T.copy_(device_microbatch.microbatch.positions_T)
        self.rows.buffer.copy_(membership.rows.buffer)
        self._filled_from = device_microbatch
