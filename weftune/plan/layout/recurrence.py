"""How long a round takes where streamed stages take turns in a few slots of a device.

On one device, loads go over one link, one after another, in the order of the visits. A visit's load begins
when the slot's last visit has ended and the link is free; its passes begin when the visit before has ended
and its load is done. A round ends with the first stages in the slots and the link idle, as it began: rounds
add up.

Adapters that travel are stepped before their stage's forward: what a Step needs is asked for when the forward
of the stage before begins, that of the first stage when the round does. It comes over the link in the same
order, behind the stage's load if there is one, and what is new of it goes back once it has come. The
weights are then made on the device; a load in the backward brings a copy of them, which must have gone back.
Gradients leave after the backward, and no Step begins before the last of them has left.

Inputs that wait on the host leave once the visit that made them has ended, and are off the device before
their stage's forward ends. They are asked for when the backward of the stage behind begins, and share the
link with the loads in the order of the visits; what the link does not move of them while it has nothing to
load comes behind the stage. All that leaves takes the other way of the link, in the order of the visits, the
input of a stage before what goes back of its Step.

Several workers make their visits in order, each with a link of its own to the host; a microbatch goes on when
the stage before has computed it and it has been sent to the next worker. A Load begins when the visit before
it in its slot has ended and the link is free. The next round begins with the Steps of this one. Microbatches
are alike, so a stage's starts are convex in their number, and the first and the last say it all. Adapters and
inputs stay on their worker's device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weftune.plan.program.layout import Layout, OnWorker
from weftune.plan.program.program import Load
from weftune.plan.window.rounds import Visit, moves


@dataclass(frozen=True, slots=True)
class StageRound:
    """What one stage takes of a round."""

    forward: float
    """Seconds of all microbatches."""
    backward: float
    """The same, with what is recomputed of the forward."""
    load_bytes: int = 0
    """What comes whenever it is loaded."""
    gone_bytes: int = 0
    """What leaves after its backward: its slot is taken until then."""
    copy_bytes: int = 0
    """Weights of adapters, which come beside it when it is loaded for its backward."""
    step_bytes: int = 0
    """What comes for its Step, before its forward."""
    back_bytes: int = 0
    """What goes back of that."""
    input_bytes: int = 0
    """What it is given, if that waits on the host between its forward and its backward."""


def slotted_seconds(
    stages: Sequence[StageRound], resident: Sequence[bool], slots: int, bandwidth: float
) -> float:
    """From the first Step of a round to its last backward, and to the end of what leaves after it."""
    streamed = [number for number, stays in enumerate(resident) if not stays]
    slot_of = {stage: place % slots for place, stage in enumerate(streamed)}
    held = {slot_of[stage]: stage for stage in streamed[:slots]}
    freed = dict.fromkeys(held, 0.0)
    home = [0.0] * len(stages)
    last = len(stages) - 1
    now = link = leaving = began = asked = 0.0

    def come(stage: int, slot: int, copies: int = 0, inputs: float = 0.0) -> None:
        """Have the link bring the stage with so many bytes of copies; and its inputs, which take so many
        seconds."""
        nonlocal link
        begins = max(link, freed[slot], home[stage])
        behind = max(0.0, inputs - max(0.0, begins - max(link, began))) if inputs else 0.0
        link = begins + (stages[stage].load_bytes + copies) / bandwidth + behind
        held[slot] = stage

    for stage, one in enumerate(stages):
        slot, off = slot_of.get(stage), 0.0
        if one.input_bytes and stage != last:
            off = leaving = max(leaving, now) + one.input_bytes / bandwidth
        if slot is not None and held[slot] != stage:
            come(stage, slot)
        link += one.step_bytes / bandwidth
        # Loads fill the link until it is asked for.
        stepped = max(link, asked + one.step_bytes / bandwidth)
        asked = now = max(now, stepped)
        if one.back_bytes:
            home[stage] = leaving = max(leaving, stepped) + one.back_bytes / bandwidth
        if stage != last:
            now = max(now + one.forward, off)
            if slot is not None:
                freed[slot] = now
    for stage in range(last, -1, -1):
        one, slot = stages[stage], slot_of.get(stage)
        inputs = one.input_bytes / bandwidth
        if slot is not None and held[slot] != stage:
            come(stage, slot, one.copy_bytes, inputs)
        else:
            link += inputs
        began = now = max(now, link, began + inputs)
        now += one.backward + (one.forward if stage == last else 0.0)
        leaving = max(leaving, now) + one.gone_bytes / bandwidth
        if slot is not None:
            freed[slot] = leaving if one.gone_bytes else now
    return max(now, leaving)


def compute_seconds(stages: Sequence[StageRound]) -> float:
    """The same, were everything there."""
    return sum(stage.forward + stage.backward for stage in stages)


# -- several workers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hops:
    """What a microbatch and a stage take on their ways."""

    hop: float = 0.0
    """Seconds to the next worker."""
    bandwidth: float = float("inf")
    """Bytes per second from the host, of each worker's link."""


def round_seconds(stages: Sequence[StageRound], cut: Layout, microbatches: int, hops: Hops) -> float:
    """Of one round among many."""
    first, second = round_ends(stages, cut, microbatches, hops, 2)
    return second - first


def round_ends(
    stages: Sequence[StageRound], cut: Layout, microbatches: int, hops: Hops, rounds: int
) -> list[float]:
    """When each of so many rounds ends, the first beginning at 0."""
    run = _Recurrence(stages, cut, microbatches, hops, rounds)
    ends = []
    for _ in range(rounds):
        last = len(stages) - 1
        for stage in range(last):
            run.visit(stage, stages[stage].forward / microbatches)
        run.visit(last, (stages[last].forward + stages[last].backward) / microbatches)
        for stage in reversed(range(last)):
            run.visit(stage, stages[stage].backward / microbatches)
        ends.append(run.rest())
    return ends


class _Recurrence:
    def __init__(
        self, stages: Sequence[StageRound], cut: Layout, microbatches: int, hops: Hops, rounds: int
    ) -> None:
        self.stages, self.cut, self.hops = stages, cut, hops
        self.more = microbatches - 1
        self.first = self.last = 0.0
        """When the first and the last microbatch are ready for their next visit."""
        self.free = [0.0] * cut.workers
        self.link = [0.0] * cut.workers
        self.there = [0.0] * len(stages)
        self.loads = [_loads(cut.on(worker), rounds) for worker in range(cut.workers)]

    def visit(self, stage: int, seconds: float) -> None:
        """A stage's passes of so many seconds, one for each microbatch."""
        worker = stage % self.cut.workers
        start = max(self.free[worker], self.there[stage], self.first)
        final = max(self.last, start + self.more * seconds)
        self.first, self.last = (begin + seconds + self.hops.hop for begin in (start, final))
        self.free[worker] = final + seconds
        if (coming := next(self.loads[worker])) is not None:
            begins = max(self.link[worker], self.free[worker])
            self.link[worker] = begins + self.stages[coming].load_bytes / self.hops.bandwidth
            self.there[coming] = self.link[worker]

    def rest(self) -> float:
        """All Steps are made; from here on the next round's microbatches are ready."""
        self.first = self.last = self.free[0]
        return self.free[0]


def _loads(cut: OnWorker, rounds: int) -> Iterator[int | None]:
    """The stage that is loaded behind each visit of a worker, if there is one."""
    last = len(cut.stages) - 1
    forward = [stage for stage in cut.own if stage < last]
    visits = [Visit(stage, ()) for stage in [*forward, *reversed(cut.own)] * rounds]
    for moved in moves(visits, cut):
        yield next((action.stage for action in moved if isinstance(action, Load)), None)
