"""Every device of a pipeline takes what is ready, by a rule: the order that results, foreseen from prices."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from weft.plan.price import Prices
from weft.plan.program import Action, Backward, Forward, MicrobatchPlan


@dataclass(frozen=True, slots=True)
class Rules:
    """What each stage may have in flight, and which way it prefers when it has a choice."""

    flights: tuple[int, ...]
    """Microbatches, for each stage."""
    forward_first: tuple[bool, ...]
    room: tuple[int, ...] = ()
    """Bytes that microbatches in flight may keep on each stage; none where memory does not matter."""


@dataclass(slots=True)
class _Stage:
    ready_forward: deque[int] = field(default_factory=deque)
    ready_backward: deque[int] = field(default_factory=deque)
    left: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Samples of each batch whose backward is still to come here."""
    open: set[tuple[str, int]] = field(default_factory=set)
    """The batches of which any is."""
    in_flight: int = 0
    kept: int = 0
    busy: bool = False
    actions: list[Action] = field(default_factory=list)


def rows_left(microbatches: Iterable[MicrobatchPlan]) -> Counter[tuple[str, int]]:
    """Samples of each batch that are still to be trained."""
    left: Counter[tuple[str, int]] = Counter()
    for microbatch in microbatches:
        for segment in microbatch.segments:
            left[segment.job, segment.step] += len(segment.samples)
    return left


class Dispatch:
    """`launches` are the microbatches in the order in which they would like to enter the first stage."""

    def __init__(
        self, microbatches: Sequence[MicrobatchPlan], launches: Sequence[int], prices: Prices, rules: Rules
    ) -> None:
        self.microbatches, self.prices, self.rules = microbatches, prices, rules
        left = rows_left(microbatches)
        self.stages = [_Stage(left=left.copy(), open=set(left)) for _ in rules.flights]
        self.jobs = [frozenset(one.jobs) for one in microbatches]
        self.before = [
            frozenset((segment.job, segment.step - 1) for segment in one.segments) for one in microbatches
        ]
        """For each microbatch the batches whose Steps it waits for."""
        self.stages[0].ready_forward.extend(launches)
        self.delayed: set[int] = set()
        """Stages on which a launch had to wait for memory."""
        self._ends: list[tuple[float, int, int, Action]] = []
        self._number = count()

    def run(self) -> list[list[Action]]:
        """The passes of every device, in the order in which it began them."""
        now = 0.0
        self._start_all(now)
        while self._ends:
            now = self._ends[0][0]
            while self._ends and self._ends[0][0] == now:
                _, _, stage, action = heapq.heappop(self._ends)
                self._end(stage, action)
            self._start_all(now)
        stuck = [number for one in self.stages for number in one.ready_forward]
        assert not stuck, f"microbatch {stuck[0]} never runs: it waits for a batch behind it, or for room"
        return [one.actions for one in self.stages]

    def _start_all(self, now: float) -> None:
        for stage, one in enumerate(self.stages):
            if not one.busy and (action := self._choose(stage)) is not None:
                one.busy = True
                one.actions.append(action)
                price = self.prices.passes[action.microbatch][stage]
                forth = isinstance(action, Forward)
                one.in_flight += forth
                one.kept += price.kept_bytes if forth else 0
                seconds = price.forward if forth else price.backward
                heapq.heappush(self._ends, (now + seconds, next(self._number), stage, action))

    def _choose(self, stage: int) -> Forward | Backward | None:
        one = self.stages[stage]
        if one.ready_backward and not self.rules.forward_first[stage]:
            return Backward(one.ready_backward.popleft(), stage)
        place = self._launchable(stage)
        if place is not None:
            number = one.ready_forward[place]
            del one.ready_forward[place]
            return Forward(number, stage)
        return Backward(one.ready_backward.popleft(), stage) if one.ready_backward else None

    def _launchable(self, stage: int) -> int | None:
        """The first ready microbatch that may go now."""
        one = self.stages[stage]
        if one.in_flight >= self.rules.flights[stage]:
            return None
        blocked: set[str] = set()
        for place, number in enumerate(one.ready_forward):
            if one.open.isdisjoint(self.before[number]) and blocked.isdisjoint(self.jobs[number]):
                return place if self._fits(stage, number) else None
            blocked |= self.jobs[number]
        return None

    def _fits(self, stage: int, number: int) -> bool:
        if not self.rules.room:
            return True
        kept = self.prices.passes[number][stage].kept_bytes
        fits = self.stages[stage].kept + kept <= self.rules.room[stage]
        if not fits:
            self.delayed.add(stage)
        return fits

    def _end(self, stage: int, action: Action) -> None:
        one = self.stages[stage]
        one.busy = False
        if isinstance(action, Forward):
            if stage + 1 < len(self.stages):
                self.stages[stage + 1].ready_forward.append(action.microbatch)
            else:
                one.ready_backward.append(action.microbatch)
        elif isinstance(action, Backward):
            one.in_flight -= 1
            one.kept -= self.prices.passes[action.microbatch][stage].kept_bytes
            for segment in self.microbatches[action.microbatch].segments:
                key = segment.job, segment.step
                one.left[key] -= len(segment.samples)
                if not one.left[key]:
                    one.open.remove(key)
            if stage > 0:
                self.stages[stage - 1].ready_backward.append(action.microbatch)
