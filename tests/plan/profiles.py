"""A profile of a device whose terms are known."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.costs import SHAPE, step, work
from weftune.plan.cost.memory import SLACK_BYTES
from weftune.plan.cost.prior import KindTerms
from weftune.plan.cost.profile import LayeredPass, Profile, profile_key
from weftune.plan.cost.time import PassTime, Terms

LAYER = Terms(fixed=1e-3, token=8e-5, square=2e-8, sample=2e-5, segment=2e-4)
KINDS = KindTerms(
    embedding=Terms(fixed=2e-3, token=1e-6),
    layer=LAYER,
    head=Terms(supervised=1e-3),
    adapter=Terms(adapter=2e-10),
)
PER_TOKEN = 12_000


def profile(kinds: KindTerms = KINDS) -> Profile:
    passes = []
    for layers in (1, 4):
        per_layer = 10**6 // 30
        for lengths, share, jobs, rank in (
            ([64], 1.0, 1, 1), ([64] * 4, 0.1, 1, 1), ([256], 1.0, 1, 1), ([512], 0.1, 1, 1),
            ([32] * 16, 0.5, 4, 1), ([128] * 8, 0.25, 1, 1), ([64] * 4, 0.5, 1, 8), ([64] * 8, 0.1, 4, 8),
        ):  # fmt: skip
            one = work(lengths, share, rank * layers * per_layer, jobs)
            seconds = kinds.base_terms(layers)(one)
            back = replace(kinds, head=Terms()).base_terms(layers)(one)
            peak = PER_TOKEN * layers * one.tokens + SLACK_BYTES // 2
            for training in (True, False):
                time = PassTime(work=one, forward=seconds, backward=back * training, training=training)
                passes.append(LayeredPass(layers, time, peak * training))
    steps = tuple(step(parameters) for parameters in (10**5, 10**6, 10**7))
    return Profile(
        key=profile_key(SHAPE, "cpu", 2), model="small", passes=tuple(passes), steps=steps, seconds=9.0
    )
