"""The parameters and gradients of jobs on one shard of a base (a worker's part of every layer).

Every shard keeps the whole training state of each job: master weights, moments and gradient. Passes read a
copy of the shard's part of the weights and add to the gradient of that part. At a Reduce action, the parts of
all shards are summed into the whole gradient, which is then the same on all shards. If several shards hold a
value, each of them has a part of its gradient. So norms, clipping and updates are those of one device, and
checkpoints do not depend on the number of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.adapters.registry import adapter_layout
from weftune.adapters.shards import shard_positions
from weftune.adapters.vector import VectorLayout
from weftune.base.model import Base
from weftune.core.shards import ShardTeam
from weftune.run.training.state import Training


class ShardShortage(RuntimeError):
    """Raised if a shard (one of the workers among which every layer is divided) runs out of memory. All
    shards restart then, since the others would wait for sums that this worker cannot compute."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"a shard ran out of memory ({reason}); if that happens again after a restart, plan with less, "
            "such as --memory 8GiB"
        )


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a job's parameters that passes over this shard (this worker's part of every layer) read and
    train."""

    layout: VectorLayout
    positions: Tensor
    """Index of each value of this part in the job's whole flat vector of parameters."""
    is_counted: Tensor
    """Whether this shard's gradient of each value is added to the sum over shards. For values such as virtual
    tokens and trained embeddings, whose whole gradient every shard computes, only the first shard's gradient
    is added."""
    weights: Tensor
    gradient: Tensor


class Shards:
    def __init__(self, base: Base, team: ShardTeam) -> None:
        self._base, self._team = base, team
        self._parts: dict[str, LocalPart] = {}

    def attach(self, training: Training) -> LocalPart:
        base, state = self._base, training.state
        layout = adapter_layout(training.adapter.spec, base.shape.sites)
        positions = shard_positions(training.layout, layout, base.slices, base.whole_sites)
        positions = positions.to(state.master.device)
        counts = [one.site in base.slices or self._team.shard == 0 for one in layout.parameters]
        sizes = torch.tensor([one.size for one in layout.parameters], dtype=torch.int64)
        part = LocalPart(
            layout,
            positions,
            torch.tensor(counts, dtype=torch.bool).repeat_interleave(sizes).to(positions.device),
            state.weights[positions],
            state.gradient.new_zeros(layout.size),
        )
        self._parts[training.job] = part
        return part

    def detach(self, job: str) -> None:
        del self._parts[job]

    def drop_gradient(self, job: str) -> None:
        """Set this shard's part of a job's gradient to zero, because the job's unfinished global batch is
        dropped."""
        self._parts[job].gradient.zero_()

    def update_weights(self, job: str, weights: Tensor) -> None:
        """Make passes over this shard (a worker's part of every layer) read a job's new weights. `weights` is
        the job's whole flat vector."""
        part = self._parts[job]
        part.weights.copy_(weights[part.positions])

    def sum_gradient(self, training: Training) -> None:
        """Set a job's whole gradient to the sum of the parts that all shards have computed, and set this
        shard's part to zero."""
        part = self._parts[training.job]
        training.gradient.zero_()
        training.gradient[part.positions] = torch.where(part.is_counted, part.gradient, 0.0)
        part.gradient.zero_()
        self._team.sum_over_shards(training.gradient)

    def any_over_shards(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether the flag is True on any shard. All shards must call this
        together."""
        counts = torch.tensor(flags, dtype=torch.float32, device=self._base.device)
        self._team.sum_over_shards(counts)
        return [count > 0 for count in counts.tolist()]
