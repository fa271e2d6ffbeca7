"""How long a round takes where streamed stages take turns in a few slots of one device.

Loads go over one link, one after another, in the order of the visits. A visit's load begins when the slot's
last visit has ended and the link is free; its passes begin when the visit before has ended and its load is
done. A round ends with the first stages in the slots and the link idle, as it began: rounds add up.

Where the host makes Steps, it does so at the beginning of a round, one stage's part after another: a stage's
forward also waits for its part, and for the new weights to come. They are too few to keep Loads waiting.

Inputs that wait on the host leave, the other way of the link, once the visit that made them has ended, and
are off the device before their stage's forward ends. They are asked for when the backward of the stage behind
begins, and share the link with the loads in the order of the visits; what the link does not move of them
while it has nothing to load comes behind the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageRound:
    """What one stage takes of a round."""

    forward: float
    """Seconds of all microbatches."""
    backward: float
    """The same, with what is made again of the forward."""
    load_bytes: int = 0
    """What comes when it is loaded."""
    gone_bytes: int = 0
    """What leaves after its backward: its slot is taken until then."""
    stepped: float = 0.0
    """Seconds that the host takes for its part of the Steps before the round."""
    new_bytes: int = 0
    """What comes of that."""
    input_bytes: int = 0
    """What it is given, if that waits on the host between its forward and its backward."""


def slotted_seconds(
    stages: Sequence[StageRound],
    resident: Sequence[bool],
    slots: int,
    bandwidth: float,
    norms: float = 0.0,
) -> float:
    """From the first forward of a round to its last backward, and to the end of what leaves after it.

    Where the host makes Steps it first takes the `norms` of all gradients, so many seconds.
    """
    streamed = [number for number, stays in enumerate(resident) if not stays]
    slot_of = {stage: place % slots for place, stage in enumerate(streamed)}
    held = {slot_of[stage]: stage for stage in streamed[:slots]}
    freed = dict.fromkeys(held, 0.0)
    last = len(stages) - 1
    now = link = leaving = began = 0.0
    made = norms

    def arrive(stage: int, inputs: float = 0.0) -> None:
        """Go on to when the stage is there, and its inputs, which take so many seconds to come."""
        nonlocal now, link
        slot, behind = slot_of.get(stage), inputs
        if slot is not None and held[slot] != stage:
            begins = max(link, freed[slot])
            if inputs:
                behind = max(0.0, inputs - max(0.0, begins - max(link, began)))
            link = begins + stages[stage].load_bytes / bandwidth
            held[slot] = stage
        elif not inputs:
            return
        link += behind
        now = max(now, link, began + inputs)

    def step(stage: int) -> None:
        """Go on to when its new weights are there, too."""
        nonlocal now, made
        made += stages[stage].stepped
        now = max(now, made + stages[stage].new_bytes / bandwidth)

    for stage in range(last):
        if gone := stages[stage].input_bytes:
            leaving = max(leaving, now) + gone / bandwidth
        arrive(stage)
        step(stage)
        now += stages[stage].forward
        if gone:
            now = max(now, leaving)
        if stage in slot_of:
            freed[slot_of[stage]] = now
    step(last)
    for stage in range(last, -1, -1):
        arrive(stage, stages[stage].input_bytes / bandwidth)
        began = now
        now += stages[stage].backward + (stages[stage].forward if stage == last else 0.0)
        leaving = max(leaving, now) + stages[stage].gone_bytes / bandwidth
        if stage in slot_of:
            freed[slot_of[stage]] = leaving if stages[stage].gone_bytes else now
    return max(now, leaving)


def compute_seconds(stages: Sequence[StageRound]) -> float:
    """The same, were everything there."""
    return sum(stage.forward + stage.backward for stage in stages)
