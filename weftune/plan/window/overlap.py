"""Overlap of the all-reduces of one microbatch with the computation of another, in a stage that is divided
into shards (Algorithm 1 of MuxTune).

The output of every half layer, which is an attention or a feed-forward, is summed over the shards. Two
neighbouring microbatches alternate after every half layer, so that the all-reduce of one runs while the other
is computed. The jobs of each microbatch do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weftune.plan.program.program import (
    Action,
    Backward,
    BackwardHalf,
    Forward,
    ForwardHalf,
    OfJob,
    Program,
)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two neighbouring microbatches in a device's list of actions, whose passes are to overlap."""

    first_microbatch: int
    second_microbatch: int
    actions_between: tuple[Action, ...]
    """Actions between the passes of the two microbatches, which may also run after the passes of both."""
    stop: int
    """Index of the first action after the passes of both microbatches."""


def overlap_microbatches(program: Program, layers: int) -> Program:
    """Return the program of a single stage of `layers` layers, changed so that pairs of neighbouring
    microbatches overlap. Two neighbours do not overlap if one needs an optimizer step that follows the other,
    or if one is a chunk of a sample."""
    half_layer_count = 2 * layers
    actions, overlapped, index = program.actions, [], 0
    while index < len(actions):
        pair = _find_pair(program, actions, index)
        if pair is None:
            overlapped.append(actions[index])
            index += 1
        else:
            overlapped += [*_alternate_halves(pair, half_layer_count), *pair.actions_between]
            index = pair.stop
    found = replace(program, devices=(tuple(overlapped),), half_layer_count=half_layer_count)
    return found if found.overlapped_microbatches else program


def _find_pair(program: Program, actions: Sequence[Action], index: int) -> _Pair | None:
    """Return the pair of microbatches whose first Forward is at this index of the actions, or None."""
    if (first := _whole_pass(program, actions, index)) is None:
        return None
    between: list[OfJob] = []
    for action in actions[index + 2 :]:
        if not isinstance(action, OfJob):
            break
        between.append(action)
    at = index + 2 + len(between)
    second = _whole_pass(program, actions, at)
    if second is None or {one.job for one in between} & set(program.microbatches[second].jobs):
        return None
    return _Pair(first, second, tuple(between), at + 2)


def _whole_pass(program: Program, actions: Sequence[Action], index: int) -> int | None:
    """Return the microbatch whose Forward is at this index, if its Backward follows immediately and it is not
    a chunk of a sample. Otherwise return None."""
    match actions[index : index + 2]:
        case (Forward(number), Backward(back)) if number == back and not program.microbatches[number].chunk:
            return number
    return None


def _alternate_halves(pair: _Pair, half_layer_count: int) -> list[Action]:
    both, order = (pair.first_microbatch, pair.second_microbatch), range(half_layer_count)
    return [
        *(ForwardHalf(number, 0, half) for half in order for number in both),
        *(Forward(number) for number in both),
        *(BackwardHalf(number, 0, half) for half in reversed(order) for number in both),
        *(Backward(number) for number in both),
    ]
