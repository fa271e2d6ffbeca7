"""The keys of captured passes, and their inputs at addresses that never change.

Shapes: T rows, B boundaries of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weftune.adapters.banks import Banks
from weftune.base.attention import Pack
from weftune.core.batch import IGNORED, Microbatch, copy_to
from weftune.ops.lora.rows import Rows
from weftune.plan.program.program import Recompute
from weftune.run.passes.gathered import GatheredJob, Gathering, gathered_jobs
from weftune.run.passes.rows import LaidMicrobatch, Membership, bucket, longest_bucket


@dataclass(frozen=True, slots=True)
class GraphKey:
    rows: int
    longest: int
    samples: int
    even: bool
    limits: tuple[object, ...]
    recompute: Recompute
    gathered: tuple[GatheredJob, ...] = ()


def key_of(laid: LaidMicrobatch, banks: Banks, recompute: Recompute, context: int) -> GraphKey:
    lengths = laid.microbatch.sample_lengths
    even = len(set(lengths)) == 1
    return GraphKey(
        rows=laid.microbatch.rows,
        longest=lengths[0] if even else longest_bucket(max(lengths), context),
        samples=len(lengths) if even else bucket(len(lengths), 1),
        even=even,
        limits=banks.limits(),
        recompute=recompute,
        gathered=gathered_jobs(banks, laid.microbatch),
    )


class GraphInputs:
    """The input tensors of all graphs of one key."""

    def __init__(self, banks: Banks, key: GraphKey, device: torch.device) -> None:
        self._banks = banks
        self._boundaries_B = torch.full((key.samples + 1,), key.rows, dtype=torch.int32, device=device)
        self._tokens_T = torch.zeros(key.rows, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._tokens_T)
        self._held: LaidMicrobatch | None = None
        self.rows = Rows.empty(key.rows, banks.slots, device)
        self.gathering = Gathering(key.gathered, key.longest, banks, device)
        self.microbatch = Microbatch(
            tokens_T=self._tokens_T,
            positions_T=self._positions_T,
            targets_T=torch.full_like(self._tokens_T, IGNORED),
            token_index_T=self.rows.token_index_T,
            sample_lengths=(key.rows,),
            segments=self.gathering.segments,
        )
        self.pack = Pack((key.rows,), self._boundaries_B, key.longest, key.even, self.gathering.prefixes)

    def fill(self, laid: LaidMicrobatch) -> None:
        """Fill in a microbatch, and compute the job of each row."""
        lengths = torch.tensor((0, *laid.microbatch.sample_lengths), dtype=torch.int32).cumsum(0)
        boundaries_B = torch.full((len(self._boundaries_B),), len(self._tokens_T), dtype=torch.int32)
        boundaries_B[: len(lengths)] = lengths
        copy_to(self._boundaries_B, boundaries_B)
        self._tokens_T.copy_(laid.microbatch.tokens_T)
        self._positions_T.copy_(laid.microbatch.positions_T)
        self.rows.fill(self._banks.seats(laid.microbatch), laid.token_index)
        self.gathering.fill(laid.microbatch)

    def copy(self, laid: LaidMicrobatch, membership: Membership) -> None:
        """Copy a microbatch whose rows are on the device already. This is called at every stage, and the
        microbatch is often still here from the stage before."""
        if self._held is laid:
            return
        assert membership.rows is not None
        boundaries_B = membership.pack.boundaries
        self._boundaries_B[: len(boundaries_B)].copy_(boundaries_B)
        self._boundaries_B[len(boundaries_B) :].fill_(len(self._tokens_T))
        self._tokens_T.copy_(laid.microbatch.tokens_T)
        self._positions_T.copy_(laid.microbatch.positions_T)
        self.rows.buffer.copy_(membership.rows.buffer)
        self._held = laid
