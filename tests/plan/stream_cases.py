"""Bases, jobs and devices for which a stream is chosen."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from hypothesis import strategies as st

from weftune.core.shapes import JobShape, ModelShape, SiteShape
from weftune.errors import PlanError
from weftune.plan.layout.need import LayoutDraft, StreamCase, StreamDevice
from weftune.plan.layout.stream_choice import HOST_STATES, StreamChoice, capacities, choose_stream

HIDDEN, VOCABULARY = 256, 100
LAYER = 4 * HIDDEN**2 * 2
ENDS = 2 * HIDDEN * VOCABULARY * 2
NEVER = 1 << 62


def base(layers: int, tied: bool = False) -> ModelShape:
    names = ((layer, name) for layer in range(layers) for name in "qkvo")
    sites = tuple(SiteShape(f"model.layers.{layer}.{name}", HIDDEN, HIDDEN) for layer, name in names)
    ends = HIDDEN * VOCABULARY * (1 if tied else 2)
    return ModelShape(layers, HIDDEN, VOCABULARY, layers * 4 * HIDDEN**2 + ends, 2, sites, context=4096)


def job(name: str = "a", trainable: int = 5000, longest: int = 40) -> JobShape:
    return JobShape(name, 0, 0, trainable, longest)


def gpu(budget: int, **fields) -> StreamDevice:
    given = dict(
        host_budget_bytes=NEVER, bandwidth=1e6, flops=1e9, slack_bytes=5000, device_launch_seconds=0.0
    )
    return StreamDevice(budget_bytes=budget, **{**given, **fields})


JOBS = st.lists(
    st.builds(job, trainable=st.sampled_from([0, 5000, 20_000, 80_000]), longest=st.integers(1, 60)),
    min_size=1,
    max_size=3,
)
DEVICES = st.builds(
    gpu,
    st.just(0),
    host_budget_bytes=st.sampled_from([1_000_000, 2_000_000, NEVER, NEVER]),
    bandwidth=st.sampled_from([1e5, 1e6, 1e7]),
    flops=st.sampled_from([1e8, 1e9, 1e10]),
    slack_bytes=st.sampled_from([0, 5000]),
    uses_fused_ops=st.booleans(),
    device_launch_seconds=st.sampled_from([0.0, 1e-3]),
)


SHARES = st.integers(40, 95).map(lambda percent: percent / 100)
"""Of what everything together would take."""
TOKENS = st.integers(60, 400)


def sized(
    device: StreamDevice, share: float, shape: ModelShape, jobs: list[JobShape], tokens: int
) -> StreamDevice:
    state = sum(one.trainable_parameters for one in jobs) * 18
    activations = 60 * 8 * HIDDEN * 2
    full = device.slack_bytes + shape.base_bytes + state + activations + 3 * tokens * HIDDEN * 2
    return replace(device, budget_bytes=int(share * full))


def cases(
    shape: ModelShape, jobs: list[JobShape], device: StreamDevice, most: int, tokens: int
) -> list[StreamCase]:
    longest = max(one.max_sample_tokens for one in jobs)
    return [
        StreamCase(shape, tuple(jobs), device, tokens, capacity, way.adapters_travel, way.offloads_inputs)
        for way in HOST_STATES
        for capacity in capacities(longest, most, tokens)
    ]


def every_draft(layers: int) -> Iterator[LayoutDraft]:
    for chosen in product((False, True), repeat=layers - 1):
        ends = [0, *(cut for cut, here in enumerate(chosen, 1) if here), layers]
        sizes = tuple(stop - start for start, stop in pairwise(ends))
        for resident in product((False, True), repeat=len(sizes)):
            for slots in range(1, 5):
                yield LayoutDraft(sizes, resident, (slots,))


def chosen(
    shape: ModelShape, jobs: list[JobShape], device: StreamDevice, most: int, tokens: int
) -> StreamChoice | None:
    try:
        return choose_stream(shape, jobs, device, most, tokens)
    except PlanError:
        return None
