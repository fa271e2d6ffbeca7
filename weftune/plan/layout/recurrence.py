"""Time of a round in which streamed stages share a few slots of device memory in turn.

A round is one global batch of every job. A slot is device memory for one stage (consecutive layers). A visit
is the forward or the backward of one stage for all microbatches. On one device, loads share one link and run
one after another, in the order of the visits. A visit's load begins when the last visit in its slot has ended
and the link is free. Its passes begin when the previous visit has ended and its load is done. At the end of a
round, as at its start, the first stages are in the slots and the link is idle, so the times of rounds add up.

Streamed adapters are updated by their optimizer step (Step) before the forward of their stage. The optimizer
state for a Step is requested when the forward of the previous stage begins, and for the first stage when the
round begins. It uses the link after the load of its stage, if there is one. The updated state is copied back
to the host when the Step is done. A load for the backward includes the updated adapter weights, so it waits
until they have been copied back. Gradients are copied to the host after the backward, and the Steps of the
next round begin when all gradients have been copied.

Offloaded inputs of stages are copied to the host when the visit that computed them has ended, and the forward
of their own stage does not end before they are copied. They are requested again when the backward of the
following stage begins, and share the link with the loads in the order of the visits. The part of the inputs
that cannot be copied while the link is idle arrives after the load of the stage. All copies to the host use
the other direction of the link, in the order of the visits; the input of a stage is copied before the updated
state of its Step.

Several workers run their visits in order, each with its own link to the host. A microbatch continues when the
previous stage has computed it and it has been sent to the next worker. A load begins when the previous visit
in its slot has ended and the link is free. The next round begins with the Steps of this round. Microbatches
are alike, so it suffices to compute the start times of the first and of the last one. Adapters and inputs
stay on their worker's device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weftune.plan.program.layout import Layout, WorkerLayout
from weftune.plan.program.program import Load
from weftune.plan.window.rounds import slot_moves


@dataclass(frozen=True, slots=True)
class StageRound:
    """Seconds of computation and bytes of transfers of one stage in a round (one global batch of every
    job)."""

    forward_seconds: float
    """Seconds of the forward of all microbatches."""
    backward_seconds: float
    """Seconds of the backward of all microbatches, including the recomputation of the forward."""
    load_bytes: int = 0
    """Bytes transferred to the device whenever the stage is loaded."""
    gradient_bytes: int = 0
    """Bytes of gradients copied to the host after the backward. The stage occupies its slot (its place in
    device memory) until the copy ends."""
    adapter_bytes: int = 0
    """Bytes of adapter weights transferred with the stage when it is loaded for its backward."""
    step_bytes: int = 0
    """Bytes of optimizer state transferred to the device for the optimizer step before the forward."""
    state_bytes: int = 0
    """Bytes of optimizer state and weights copied back to the host after the optimizer step."""
    input_bytes: int = 0
    """Bytes of the stage's input, if it is kept in host memory between forward and backward; otherwise 0."""


def slotted_seconds(
    stages: Sequence[StageRound], resident_stages: Sequence[bool], slots: int, bandwidth: float
) -> float:
    """Return the seconds of a round (one global batch of every job) on one device, from its first optimizer
    step to the last transfer after its last backward. `slots` is the number of places in device memory for
    streamed stages, and `bandwidth` the bytes per second of the link in each direction."""
    streamed = [number for number, stays in enumerate(resident_stages) if not stays]
    slot_of = {stage: place % slots for place, stage in enumerate(streamed)}
    stage_in_slot = {slot_of[stage]: stage for stage in streamed[:slots]}
    freed = dict.fromkeys(stage_in_slot, 0.0)
    home = [0.0] * len(stages)
    last = len(stages) - 1
    now = link = leaving = began = asked = 0.0

    def load_stage(stage: int, slot: int, adapter_bytes: int = 0, input_seconds: float = 0.0) -> None:
        """Simulate the load of a stage over the link, together with `adapter_bytes` bytes of adapter weights
        and with its inputs, whose transfer takes `input_seconds` seconds."""
        nonlocal link
        begins = max(link, freed[slot], home[stage])
        behind = max(0.0, input_seconds - max(0.0, begins - max(link, began))) if input_seconds else 0.0
        link = begins + (stages[stage].load_bytes + adapter_bytes) / bandwidth + behind
        stage_in_slot[slot] = stage

    for stage, one in enumerate(stages):
        slot, off = slot_of.get(stage), 0.0
        if one.input_bytes and stage != last:
            off = leaving = max(leaving, now) + one.input_bytes / bandwidth
        if slot is not None and stage_in_slot[slot] != stage:
            load_stage(stage, slot)
        link += one.step_bytes / bandwidth
        # Loads use the link until the state for the Step is requested.
        stepped = max(link, asked + one.step_bytes / bandwidth)
        asked = now = max(now, stepped)
        if one.state_bytes:
            home[stage] = leaving = max(leaving, stepped) + one.state_bytes / bandwidth
        if stage != last:
            now = max(now + one.forward_seconds, off)
            if slot is not None:
                freed[slot] = now
    for stage in range(last, -1, -1):
        one, slot = stages[stage], slot_of.get(stage)
        inputs = one.input_bytes / bandwidth
        if slot is not None and stage_in_slot[slot] != stage:
            load_stage(stage, slot, one.adapter_bytes, inputs)
        else:
            link += inputs
        began = now = max(now, link, began + inputs)
        now += one.backward_seconds + (one.forward_seconds if stage == last else 0.0)
        leaving = max(leaving, now) + one.gradient_bytes / bandwidth
        if slot is not None:
            freed[slot] = leaving if one.gradient_bytes else now
    return max(now, leaving)


def compute_seconds(stages: Sequence[StageRound]) -> float:
    """Return the seconds of a round (one global batch of every job) of streamed stages, as if transfers took
    no time."""
    return sum(stage.forward_seconds + stage.backward_seconds for stage in stages)


# -- several workers -------------------------------------------------------------------------------------


def round_seconds(
    stages: Sequence[StageRound],
    layout: Layout,
    microbatches: int,
    hop_seconds: float = 0.0,
    bandwidth: float = math.inf,
) -> float:
    """Return the seconds per round (one global batch of every job) of streamed stages over several workers,
    in steady state. For the arguments, see `round_ends`."""
    first, second = round_ends(stages, layout, microbatches, 2, hop_seconds, bandwidth)
    return second - first


def round_ends(
    stages: Sequence[StageRound],
    layout: Layout,
    microbatches: int,
    rounds: int,
    hop_seconds: float = 0.0,
    bandwidth: float = math.inf,
) -> list[float]:
    """Return the times, in seconds, at which each of `rounds` rounds (one global batch of every job) ends if
    the first begins at 0. Sending a microbatch to the next worker takes `hop_seconds`. `bandwidth` is the
    bytes per second of each worker's link from the host."""
    run = _Recurrence(stages, layout, microbatches, rounds, hop_seconds, bandwidth)
    ends = []
    for _ in range(rounds):
        last = len(stages) - 1
        for stage in range(last):
            run.visit(stage, stages[stage].forward_seconds / microbatches)
        run.visit(last, (stages[last].forward_seconds + stages[last].backward_seconds) / microbatches)
        for stage in reversed(range(last)):
            run.visit(stage, stages[stage].backward_seconds / microbatches)
        ends.append(run.end_round())
    return ends


class _Recurrence:
    def __init__(
        self,
        stages: Sequence[StageRound],
        layout: Layout,
        microbatches: int,
        rounds: int,
        hop_seconds: float,
        bandwidth: float,
    ) -> None:
        self.stages, self.cut, self.hop, self.bandwidth = stages, layout, hop_seconds, bandwidth
        self.more = microbatches - 1
        self.first = self.last = 0.0
        """Times in seconds at which the first and the last microbatch of the simulated round (one global
        batch of every job) are ready for the next stage."""
        self.free = [0.0] * layout.workers
        self.link = [0.0] * layout.workers
        self.there = [0.0] * len(stages)
        self.loads = [
            _loads_after_visits(layout.for_worker(worker), rounds) for worker in range(layout.workers)
        ]

    def visit(self, stage: int, seconds: float) -> None:
        """Simulate the passes of all microbatches through a stage, each of which takes `seconds` seconds."""
        worker = stage % self.cut.workers
        start = max(self.free[worker], self.there[stage], self.first)
        final = max(self.last, start + self.more * seconds)
        self.first, self.last = (begin + seconds + self.hop for begin in (start, final))
        self.free[worker] = final + seconds
        if (coming := next(self.loads[worker])) is not None:
            begins = max(self.link[worker], self.free[worker])
            self.link[worker] = begins + self.stages[coming].load_bytes / self.bandwidth
            self.there[coming] = self.link[worker]

    def end_round(self) -> float:
        """End the simulated round (one global batch of every job). Return the time in seconds at which it
        ends and the microbatches of the next round are ready."""
        self.first = self.last = self.free[0]
        return self.free[0]


def _loads_after_visits(layout: WorkerLayout, rounds: int) -> Iterator[int | None]:
    """Yield, for each visit of a worker (forward or backward of a stage for all microbatches), the stage that
    is loaded after it, or None."""
    last = len(layout.stages) - 1
    forward = [stage for stage in layout.own_stages if stage < last]
    for moved in slot_moves([*forward, *reversed(layout.own_stages)] * rounds, layout):
        yield next((action.stage for action in moved if isinstance(action, Load)), None)
