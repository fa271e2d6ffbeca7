"""A week of fine-tuning tasks like that of MuxTune's §5.4, and a cluster that serves them in turn.

The paper adapts a week of the Philly trace and prints three numbers of it: durations of 372.6 minutes on
average with a deviation of 612.9, and 2.59 arrivals a minute. Here arrivals are a Poisson process of that
rate and durations lognormal with that mean and deviation. A duration is what the task takes alone on a
separate instance of four GPUs, as in the paper's table 1; its optimizer steps follow from that.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

MEAN, DEVIATION, RATE = 372.6 * 60, 612.9 * 60, 2.59 / 60
WEEK = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes tasks as far as time goes."""

    dataset: str
    batch: int


@dataclass(frozen=True, slots=True)
class Task:
    arrival: float
    duration: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Served:
    """What became of the week."""

    tokens: float
    """Trained, without padding."""
    finished: int
    arrived: int
    waited: float
    """Seconds from arrival to start, on average over those that started."""
    attached: float
    """Tasks on an instance, on average over time."""


def trace(kinds: Sequence[Kind], seconds: float = WEEK, seed: int = 0) -> list[Task]:
    random = Random(seed)
    spread = math.log(1 + (DEVIATION / MEAN) ** 2)
    middle = math.log(MEAN) - spread / 2
    tasks: list[Task] = []
    now = random.expovariate(RATE)
    while now < seconds:
        duration = random.lognormvariate(middle, math.sqrt(spread))
        tasks.append(Task(now, duration, random.choice(list(kinds))))
        now += random.expovariate(RATE)
    return tasks


Pace = Callable[[Sequence[Kind]], float]
"""Seconds of a round, one step of every task aboard."""


@dataclass(slots=True)
class _Instance:
    tasks: list[int] = field(default_factory=list)
    left: dict[int, float] = field(default_factory=dict)
    """Rounds that each task aboard still needs."""
    since: float = 0.0
    round: float = math.inf
    version: int = 0


class Service:
    """Instances that each hold up to `most` tasks; the first in the queue goes to the emptiest."""

    def __init__(
        self,
        tasks: Sequence[Task],
        steps: Sequence[float],
        tokens: Callable[[Kind], float],
        instances: int,
        most: int,
        pace: Pace,
    ) -> None:
        self.tasks, self.steps, self.tokens, self.most, self.pace = tasks, steps, tokens, most, pace
        self.instances = [_Instance() for _ in range(instances)]
        self.free = instances * most
        self.queue: deque[int] = deque()
        self.trained = self.waited = self.attached = 0.0
        self.finished = self.started = 0
        self._ends: list[tuple[float, int, int]] = []

    def run(self, seconds: float = WEEK) -> Served:
        coming = deque(range(len(self.tasks)))
        while True:
            arrival = self.tasks[coming[0]].arrival if coming else math.inf
            end = self._ends[0][0] if self._ends else math.inf
            now = min(arrival, end, seconds)
            if now >= seconds:
                break
            if arrival <= end:
                self.queue.append(coming.popleft())
            else:
                self._end(now)
            self._admit(now)
        for instance in self.instances:
            self._advance(instance, seconds)
        return Served(
            self.trained,
            self.finished,
            len(self.tasks),
            self.waited / max(1, self.started),
            self.attached / seconds / len(self.instances),
        )

    def _end(self, now: float) -> None:
        _, number, version = heapq.heappop(self._ends)
        instance = self.instances[number]
        if instance.version != version:
            return
        self._advance(instance, now)
        for task in [one for one in instance.tasks if instance.left[one] <= 1e-6]:
            instance.tasks.remove(task)
            self.finished += 1
            self.free += 1
        self._settle(number, now)

    def _admit(self, now: float) -> None:
        while self.queue:
            if self.free == 0:
                return
            number = min(range(len(self.instances)), key=lambda one: len(self.instances[one].tasks))
            instance = self.instances[number]
            self.free -= 1
            self._advance(instance, now)
            task = self.queue.popleft()
            self.waited += now - self.tasks[task].arrival
            self.started += 1
            instance.tasks.append(task)
            instance.left[task] = self.steps[task]
            self._settle(number, now)

    def _advance(self, instance: _Instance, now: float) -> None:
        """All aboard make the same number of steps."""
        if instance.tasks:
            rounds = (now - instance.since) / instance.round
            for task in instance.tasks:
                instance.left[task] -= rounds
                self.trained += rounds * self.tokens(self.tasks[task].kind)
            self.attached += (now - instance.since) * len(instance.tasks)
        instance.since = now

    def _settle(self, number: int, now: float) -> None:
        instance = self.instances[number]
        instance.version += 1
        instance.left = {task: instance.left[task] for task in instance.tasks}
        if instance.tasks:
            instance.round = self.pace([self.tasks[task].kind for task in instance.tasks])
            soonest = min(instance.left.values())
            end = now + max(0.0, soonest) * instance.round
            heapq.heappush(self._ends, (end, number, instance.version))
