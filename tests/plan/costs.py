"""A device with known terms, and passes as it would measure them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.studies.bases import CONFIG_135M, SHAPE_135M
from weftune.plan.cost.time import CostModel, PassTime, PassWork, Rate, StateTime, Terms
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import GlobalBatch, PlacedSample, Program
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window

CONFIG, SHAPE = CONFIG_135M, SHAPE_135M

TRUTH = CostModel(
    forward=Terms(
        fixed=0.02, token=2e-3, square=4e-7, sample=1e-3, supervised=1e-3, adapter=2e-10, segment=5e-3
    ),
    backward=Terms(fixed=0.01, token=2e-3, square=1e-6, sample=1e-3, adapter=4e-10, segment=8e-3),
    evaluation=Terms(fixed=0.01, token=1.5e-3, square=4e-7, supervised=5e-4, adapter=2e-10),
    step=Rate(job=1e-3, parameter=8e-9),
    source="truth",
)


def work(samples: Sequence[int], supervised: float = 0.5, size: int = 10**6, jobs: int = 1) -> PassWork:
    tokens = sum(samples)
    return PassWork(
        tokens=tokens,
        squares=sum(length**2 for length in samples),
        samples=len(samples),
        supervised=int(supervised * tokens),
        adapted=tokens * size,
        segments=jobs,
    )


def draw(dice: random.Random) -> PassWork:
    lengths = [dice.randint(16, 300) for _ in range(dice.randint(1, 8))]
    return work(lengths, dice.random(), dice.choice([10**5, 10**6, 4 * 10**6]), dice.randint(1, 4))


def measured(one: PassWork, truth: CostModel = TRUTH, slower: float = 1.0, training: bool = True) -> PassTime:
    forward = truth.forward if training else truth.evaluation
    return PassTime(
        work=one,
        forward=slower * forward(one),
        backward=slower * truth.backward(one) if training else 0.0,
        training=training,
    )


def step(parameters: int, jobs: int = 1) -> StateTime:
    return StateTime(jobs, parameters, TRUTH.step(jobs, parameters))


def program(*lengths: int, capacity: int = 64) -> Program:
    """One job, one batch, evaluated on its first sample when it begins."""
    samples, offset = [], 0
    for number, length in enumerate(lengths):
        samples.append(PlacedSample(number, length, offset, length // 2))
        offset += length
    batch = GlobalBatch(
        "a", 1, tuple(samples), supervised_tokens=sum(one.supervised_tokens for one in samples)
    )
    course = JobWindow("a", 0, (batch,), tuple(samples[:1]), frozenset({0}), frozenset({1}), begins_run=True)
    return plan_window([course], one_device_layout(), capacity)
