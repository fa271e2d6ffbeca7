"""The Program: an immutable plan of the ordered actions of every device in a window, which is a few global
batches of every job.

 Step n of a job, counted from 1, is its n-th global batch and the optimizer step that follows it. A segment
is the rows of a microbatch that belong to one job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Recompute:
    """The activations of a forward that are recomputed in the backward instead of being kept."""

    recomputes_outputs: bool = False
    """Whether the outputs of norms and activation functions are recomputed, which costs little."""
    recomputed_layers: int = 0
    """Number of layers that are recomputed completely, which costs another forward."""
    tile_rows: int = 0
    """Maximum rows of a microbatch that a layer computes at a time, except in attention. 0 means all rows."""
    keeps_attention: bool = False
    """Whether layers that are recomputed in tiles (some rows at a time) keep the output of their
    attention."""
    offloaded_layers: int = 0
    """Number of layers whose kept tensors are in host memory until the backward, among the layers that are
    recomputed in tiles (some rows at a time)."""


NOTHING = Recompute()


class JobStepKey(Protocol):
    """An object that belongs to one global batch of a job, which its attributes `job` and `step` identify."""

    @property
    def job(self) -> str: ...

    @property
    def step(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample of a global batch, or one chunk of a sample: its index, its length in tokens, and its offset,
    which is the number of tokens before it in the global batch."""

    sample: int
    length: int
    offset: int
    supervised_tokens: int = 0
    """Number of tokens of the sample or chunk that count in the loss."""
    group_number: int | None = None
    """Number of the group to which the sample belongs, such as a preference pair. Adjacent samples with the
    same number share a microbatch."""
    chunk_start: int | None = None
    """Number of tokens before this chunk in its sample. None for a whole sample."""

    @property
    def sample_offset(self) -> int:
        """Number of tokens before the whole sample in its global batch. This number identifies the sample."""
        return self.offset - (self.chunk_start or 0)

    @property
    def chunk_rows(self) -> slice | None:
        """Range of the sample's rows that this chunk consists of. None for a whole sample."""
        return None if self.chunk_start is None else slice(self.chunk_start, self.chunk_start + self.length)

    def follows(self, previous_chunk: PlacedSample | None) -> bool:
        """Return whether this chunk begins where an earlier chunk of the same sample ends, or is the first
        chunk if there is no earlier one."""
        return (
            self.chunk_start == 0
            if previous_chunk is None
            else self.offset == previous_chunk.offset + previous_chunk.length
        )

    @property
    def squares(self) -> int:
        """Squared length of the sample in tokens or, for a chunk, its part of the whole sample's squared
        length. The cost of attention is proportional to this number."""
        return self.length * (2 * (self.chunk_start or 0) + self.length)


def group_samples(samples: Sequence[PlacedSample], size: int) -> tuple[PlacedSample, ...]:
    """Return the samples with group numbers: each group has `size` consecutive samples. A size of 1 means
    that samples have no groups."""
    if size == 1:
        return tuple(samples)
    assert len(samples) % size == 0, f"a batch of {len(samples)} samples is no number of groups of {size}"
    return tuple(replace(placed, group_number=number // size) for number, placed in enumerate(samples))


def sample_groups(samples: Iterable[PlacedSample]) -> list[tuple[PlacedSample, ...]]:
    """Split the samples into tuples: the samples of a tuple must share a microbatch. Most tuples have one
    sample."""
    runs: list[list[PlacedSample]] = []
    for placed in samples:
        if runs and placed.group_number is not None and placed.group_number == runs[-1][-1].group_number:
            runs[-1].append(placed)
        else:
            runs.append([placed])
    return [tuple(run) for run in runs]


def cut_sample(sample: PlacedSample, rows: int, square_cost: float = 0.0) -> tuple[PlacedSample, ...]:
    """Cut a sample into chunks of `rows` tokens on average, or somewhat fewer, whose passes take as nearly
    equal times as possible. `square_cost` is the time per unit of the sample's squared length (attention)
    relative to the time per token: the larger it is, the fewer tokens the later chunks have, which attend to
    more keys."""
    count = -(-sample.length // rows)
    edges = [0]
    for number in range(1, count):
        edge = _find_edge(sample.length, number, count, square_cost)
        edges.append(min(max(edge, edges[-1] + 1), sample.length - (count - number)))
    edges.append(sample.length)
    # The planner does not know which tokens are supervised; it only needs sums.
    counted = [sample.supervised_tokens * edge // sample.length for edge in edges]
    return tuple(
        replace(
            sample,
            length=edges[number + 1] - edges[number],
            offset=sample.offset + edges[number],
            supervised_tokens=counted[number + 1] - counted[number],
            chunk_start=edges[number],
        )
        for number in range(count)
    )


def _find_edge(length: int, number: int, count: int, square_cost: float) -> int:
    """Return how many tokens at the start of a sample take `number` of `count` equal parts of the sample's
    time, where n tokens take n + `square_cost` · n²."""
    if square_cost == 0.0:
        return number * length // count
    seconds = (length + square_cost * length**2) * number / count
    return int((math.sqrt(1 + 4 * square_cost * seconds) - 1) / (2 * square_cost))


def join_chunks(samples: Iterable[PlacedSample]) -> Iterator[PlacedSample]:
    """Yield samples with their consecutive chunks joined, given samples and chunks in the order of their
    offsets. If a chunk is missing, the chunks before and after the gap are joined separately."""
    joined: PlacedSample | None = None
    for one in samples:
        if joined is not None and one.chunk_start == joined.length and one.sample_offset == joined.offset:
            supervised = joined.supervised_tokens + one.supervised_tokens
            joined = replace(joined, length=joined.length + one.length, supervised_tokens=supervised)
            continue
        if joined is not None:
            yield joined
        joined = replace(one, chunk_start=None) if one.chunk_start == 0 else one
    if joined is not None:
        yield joined


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one job for one optimizer step."""

    job: str
    step: int
    samples: tuple[PlacedSample, ...]
    supervised_tokens: int
    """Number of supervised tokens in the whole batch, by which the job's loss is divided."""
    prefix_rows: int = 0
    """Total number of rows (virtual tokens) that the job's adapter inserts before the samples."""
    mismatched: tuple[PlacedSample, ...] = ()
    """Mismatched prompt and answer pairs, whose log-probabilities are computed after the job's previous step
    for the KL term of the batch's loss (as in KTO)."""

    @property
    def may_be_cut(self) -> bool:
        """Whether samples may run in chunks. This requires a loss that is a sum over tokens, as in supervised
        fine-tuning; a loss of preference pairs or with a KL term needs whole samples."""
        return not self.mismatched and all(placed.group_number is None for placed in self.samples)

    @property
    def tokens(self) -> int:
        """Total rows of the batch's samples, including rows that the adapter inserts."""
        return sum(placed.length for placed in self.samples)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The samples of one job that share a microbatch."""

    job: str
    step: int
    samples: tuple[PlacedSample, ...]

    @property
    def tokens(self) -> int:
        return sum(placed.length for placed in self.samples)


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """The samples that one forward pass takes, grouped by job."""

    segments: tuple[SegmentPlan, ...]
    padded_rows: int = 0
    """Number of rows including padding, if microbatches are padded to a few sizes for CUDA graphs; otherwise
    0."""

    @property
    def chunk(self) -> PlacedSample | None:
        """The chunk of a sample that the microbatch consists of, or None if its samples are whole."""
        found = [one for segment in self.segments for one in segment.samples if one.chunk_start is not None]
        return found[0] if found else None

    @property
    def rows(self) -> int:
        return max(self.tokens, self.padded_rows)

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def squares(self) -> int:
        """Sum of the squared lengths of the samples (`PlacedSample.squares`), to which the cost of attention
        is proportional."""
        return sum(sample.squares for segment in self.segments for sample in segment.samples)

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(segment.job for segment in self.segments)

    def without(self, jobs: frozenset[str] | set[str]) -> MicrobatchPlan:
        kept = tuple(segment for segment in self.segments if segment.job not in jobs)
        return MicrobatchPlan(kept, self.padded_rows)


def batch_samples(microbatches: Iterable[MicrobatchPlan]) -> Counter[tuple[str, int]]:
    """Return the number of samples of each global batch, given as (job, step), in these microbatches."""
    samples: Counter[tuple[str, int]] = Counter()
    for microbatch in microbatches:
        for segment in microbatch.segments:
            samples[segment.job, segment.step] += len(segment.samples)
    return samples


@dataclass(frozen=True, slots=True)
class Forward:
    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A forward pass over held-out samples. Each segment's `step` is the optimizer step that precedes it."""

    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """A forward pass without gradients. Its result is, for each sample, the sum of the log-probabilities of
    the sample's supervised tokens. Each segment's `step` is the optimizer step that precedes it."""

    microbatch: int
    stage: int = 0


@dataclass(frozen=True, slots=True)
class ForwardHalf:
    """The forward of half a layer, which is its attention or its feed-forward, on shards of the layer.

    The output is summed over the shards while the device continues with the next action. The first half layer
    of a microbatch also computes the embeddings. The Forward that follows the last half layer computes the
    rest of the pass.
    """

    microbatch: int
    stage: int
    index: int
    """Index of the half layer in the stage. The attention of a layer has an even index and its feed-forward
    the next odd index."""


@dataclass(frozen=True, slots=True)
class BackwardHalf:
    """The backward of half a layer, which is its attention or its feed-forward, on shards of the layer.

    The gradient of its input is summed over the shards while the device continues with the next action. Half
    layers run in reverse order. The Backward that follows the last half layer computes the rest of the pass.
    """

    microbatch: int
    stage: int
    index: int
    """Index of the half layer in the stage. The attention of a layer has an even index and its feed-forward
    the next odd index."""


Reduced = Literal["norm", "gradient", "scores", "kl"]
SCORE_PAYLOADS: tuple[Reduced, ...] = ("scores", "kl")
"""Payloads of the Reduce actions (sums over replicas) that belong to the KL term of a loss."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduction of gradients or scores over several devices that train a job together. Its payload says what
    is reduced.

    The payloads `gradient` and `norm` are for the Step after the last Backward of a batch.

    `gradient`, only with replicas: the batch's local sums (gradient, losses, correct predictions) are sent to
    the devices that hold the same stage in other replicas, without waiting. A replica without samples of a
    batch has no such action.

    `norm`: the sums of the other replicas are added, in the same order on every device. In the first replica,
    losses, correct predictions and the squared norm of this stage's gradient are then added to those of the
    next stage and sent to the previous one. The first device decides for every Step.

    The payloads `scores` and `kl` are for the KL term of the losses that follow, only with replicas, on the
    devices of the last stage. `step` is the optimizer step that precedes them.

    `scores`: the sums of the mismatched samples that this replica has scored are sent to the other replicas,
    without waiting, even if it has scored none.

    `kl`: the sums of the other replicas are added, in the same order on every device.
    """

    job: str
    step: int
    payload: Reduced = "norm"


@dataclass(frozen=True, slots=True)
class Step:
    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    job: str
    step: int


Payload = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Send:
    """Transfer of an activation or gradient to the device `peer`, for the stage `stage` on that device."""

    microbatch: int
    stage: int
    payload: Payload
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    microbatch: int
    stage: int
    payload: Payload
    peer: int


@dataclass(frozen=True, slots=True)
class Load:
    """Copy of a stage's weights from the host to the device."""

    stage: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Release of a stage's device memory. Nothing is copied to the host, since the base is frozen."""

    stage: int


@dataclass(frozen=True, slots=True)
class Inherited:
    """Progress of a microbatch that the previous window (a few global batches of every job) has left
    unfinished. The input of the microbatch's next pass is already on the device that runs this pass."""

    number: int
    """Index of the microbatch in the Program of the previous window."""
    forwards: int
    """Number of stages that have run the forward of the microbatch, counted from the first stage."""
    backwards: int
    """Number of stages that have run the backward of the microbatch, counted from the last stage."""
    replica: int = 0
    """Replica that runs the microbatch."""

    def has_forward(self, stage: int) -> bool:
        return stage < self.forwards

    def has_backward(self, stage: int, stages: int) -> bool:
        return stage >= stages - self.backwards

    def is_in_flight(self, stage: int, stages: int) -> bool:
        """Return whether a stage has run the forward of the microbatch but not yet its backward."""
        return self.has_forward(stage) and not self.has_backward(stage, stages)

    def arrival(self, stages: int) -> tuple[int, Payload] | None:
        """Return the stage that runs the microbatch's next pass, and whether the input that waits there is an
        activation or a gradient. Return None if the input does not come from another stage."""
        if 0 < self.forwards < stages:
            return self.forwards, "activation"
        if 0 < self.backwards < stages:
            return stages - 1 - self.backwards, "gradient"
        return None


ForwardOnly = Evaluate | Score
"""A forward pass that keeps nothing for a backward."""
ForwardPass = Forward | ForwardOnly
Compute = ForwardPass | Backward
HalfPass = ForwardHalf | BackwardHalf
"""The attention or the feed-forward of one layer (half a layer) in a pass. Two microbatches alternate after
every half layer, so that the all-reduces over shards of one overlap with the computation of the other."""
Transport = Send | Recv
Streaming = Load | Evict
OfJob = Reduce | Step | Save
Action = Compute | HalfPass | Transport | Streaming | OfJob


@dataclass(frozen=True)
class Program:
    """The actions of every device in one window (a few global batches of every job)."""

    capacity: int
    microbatches: tuple[MicrobatchPlan, ...]
    batches: tuple[GlobalBatch, ...]
    devices: tuple[tuple[Action, ...], ...]
    """Actions of each device in order; with replicas, devices are ordered replica by replica."""
    stages: tuple[int, ...] = (0,)
    """Index of each stage's device, in the first replica."""
    recompute: Recompute = NOTHING
    replicas: int = 1
    """Number of copies of all stages, each on its own devices; every microbatch runs in one of them."""
    inherited: tuple[Inherited, ...] = ()
    """Progress of the first microbatches, which belong to global batches that the previous window left
    unfinished."""
    hands_over: bool = False
    """Whether the program may leave global batches unfinished for the next program. Otherwise no microbatch
    is in flight at its end."""
    half_layer_count: int = 0
    """Number of half layers (attentions and feed-forwards) of each pass that overlaps with the pass of
    another microbatch. 0 if no pass does."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """Actions of the device, in a program for a single device."""
        assert len(self.devices) == 1, f"a program for {len(self.devices)} devices has no single order"
        return self.devices[0]

    @property
    def is_pipelined(self) -> bool:
        """Whether the program runs on several devices that each hold a part of every adapter, so that
        optimizer steps need a Reduce."""
        return len(self.devices) > 1

    @property
    def devices_per_replica(self) -> int:
        """Number of devices of one replica."""
        return len(self.devices) // self.replicas

    def replica(self, device: int) -> int:
        return device // self.devices_per_replica

    def stage_devices(self, replica: int) -> tuple[int, ...]:
        """Return the device of each stage in a replica."""
        return tuple(replica * self.devices_per_replica + device for device in self.stages)

    def stages_at_start(self, device: int) -> set[int]:
        """Return the indices of the stages whose weights are on the device at the start of the program."""
        loads_first: dict[int, bool] = {}
        for action in self.devices[device]:
            if isinstance(action, Streaming):
                loads_first.setdefault(action.stage, isinstance(action, Load))
        homes = enumerate(self.stage_devices(self.replica(device)))
        return {stage for stage, home in homes if home == device and not loads_first.get(stage, False)}

    def same_stage_devices(self, device: int) -> range:
        """Return the devices that hold the same stages as `device`, one per replica, in the order of
        replicas."""
        return range(device % self.devices_per_replica, len(self.devices), self.devices_per_replica)

    @property
    def jobs(self) -> frozenset[str]:
        return frozenset(job for microbatch in self.microbatches for job in microbatch.jobs)

    def batch(self, job: str, step: int) -> GlobalBatch:
        return self._batches[job, step]

    @cached_property
    def _batches(self) -> dict[tuple[str, int], GlobalBatch]:
        """Maps (job, step) to the global batch, for quick lookup with thousands of jobs."""
        return {(batch.job, batch.step): batch for batch in self.batches}

    def whole_sample(self, microbatch: MicrobatchPlan) -> PlacedSample | None:
        """Return the whole sample of which the microbatch is a chunk, or None if its samples are whole."""
        if (chunk := microbatch.chunk) is None:
            return None
        batch = self.batch(microbatch.segments[0].job, microbatch.segments[0].step)
        (sample,) = (placed for placed in batch.samples if placed.offset == chunk.sample_offset)
        return sample

    def supervised_token_count(self, segment: JobStepKey) -> int:
        """Return the number of supervised tokens of a segment's whole global batch, by which the segment's
        loss is divided."""
        return self.batch(segment.job, segment.step).supervised_tokens

    def supervised_tokens_by_sample(self, segment: JobStepKey) -> tuple[int, ...]:
        """Return the number of supervised tokens of each sample of a segment's whole global batch."""
        return tuple(placed.supervised_tokens for placed in self.batch(segment.job, segment.step).samples)

    @cached_property
    def overlapped_microbatches(self) -> frozenset[int]:
        """Indices of the microbatches whose passes overlap with those of another microbatch."""
        actions = (action for actions in self.devices for action in actions)
        return frozenset(action.microbatch for action in actions if isinstance(action, HalfPass))

    @cached_property
    def has_chunks(self) -> bool:
        """Whether any sample is cut into chunks."""
        return any(microbatch.chunk is not None for microbatch in self.microbatches)

    def forward_passes(self) -> Iterator[tuple[ForwardPass, MicrobatchPlan]]:
        """Yield every forward pass (Forward, Evaluate or Score) with its microbatch, once for all stages."""
        for replica in range(self.replicas):
            yield from self.replica_passes(replica)

    def replica_passes(self, replica: int) -> Iterator[tuple[ForwardPass, MicrobatchPlan]]:
        """Yield every forward pass (Forward, Evaluate or Score) of one replica with its microbatch.
        Microbatches inherited from the previous window are included if they have begun."""
        for number, one in enumerate(self.inherited):
            if one.forwards and one.replica == replica:
                yield Forward(number), self.microbatches[number]
        for action in self.devices[self.stage_devices(replica)[0]]:
            if isinstance(action, ForwardPass) and action.stage == 0:
                yield action, self.microbatches[action.microbatch]

    def pass_kinds(self) -> dict[int, type[ForwardPass]]:
        """Map each microbatch to the class of its forward pass: Forward, Evaluate or Score."""
        return {action.microbatch: type(action) for action, _ in self.forward_passes()}

    @cached_property
    def _kinds(self) -> dict[int, type[ForwardPass]]:
        return self.pass_kinds()

    def kind(self, microbatch: int) -> type[ForwardPass]:
        """Return the class of a microbatch's forward pass: Forward, Evaluate or Score. The result is Forward
        if the pass is left to a later window."""
        return self._kinds.get(microbatch, Forward)

    def shared_count(self) -> int:
        """Return the number of microbatches, without those inherited from the previous window, that contain
        two jobs or more."""
        return sum(len(set(microbatch.jobs)) > 1 for microbatch in self.microbatches[len(self.inherited) :])

    def without(self, *jobs: str) -> Program:
        """Return the program without the rows and actions that belong to these jobs."""
        dead = frozenset(jobs)
        microbatches = tuple(microbatch.without(dead) for microbatch in self.microbatches)

        def is_kept(action: Action) -> bool:
            if isinstance(action, OfJob):
                return action.job not in dead
            return isinstance(action, Streaming) or bool(microbatches[action.microbatch].segments)

        return replace(
            self,
            microbatches=microbatches,
            batches=tuple(batch for batch in self.batches if batch.job not in dead),
            devices=tuple(tuple(action for action in actions if is_kept(action)) for actions in self.devices),
        )

    def followed_by(self, next_program: Program) -> Program:
        """Return the program that runs this program and then `next_program` on the same devices. The
        microbatches that `next_program` inherits must be microbatches of this program."""
        kept, first = len(next_program.inherited), len(self.microbatches) - len(next_program.inherited)

        def renumber(action: Action) -> Action:
            if isinstance(action, Compute | HalfPass | Transport):
                number = action.microbatch
                own = first + number if number >= kept else next_program.inherited[number].number
                return replace(action, microbatch=own)
            return action

        known = {(batch.job, batch.step) for batch in self.batches} if kept else set()
        return replace(
            self,
            microbatches=(*self.microbatches, *next_program.microbatches[kept:]),
            batches=(
                *self.batches,
                *(one for one in next_program.batches if (one.job, one.step) not in known),
            ),
            devices=tuple(
                (*own, *map(renumber, following))
                for own, following in zip(self.devices, next_program.devices, strict=True)
            ),
            hands_over=next_program.hands_over,
            half_layer_count=max(self.half_layer_count, next_program.half_layer_count),
        )

    def without_saves(self, jobs: frozenset[str]) -> Program:
        """Return the program without the Saves of these jobs."""

        def is_kept(action: Action) -> bool:
            return not (isinstance(action, Save) and action.job in jobs)

        return replace(self, devices=tuple(tuple(filter(is_kept, actions)) for actions in self.devices))


class IllegalProgram(AssertionError):
    """Raised for an invalid Program. The cause is always a bug in Weftune, never an error of the user."""
