"""Small models for the tests of streaming: layers, hosts, and every partition there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import strategies as st

from weftune.plan.cost.estimate import LayerCost
from weftune.plan.layout.mobius_step import Host, StreamPartition

SECONDS = st.integers(0, 40).map(lambda tenths: tenths / 10)


def layer(kind: str = "block") -> st.SearchStrategy[LayerCost]:
    return st.builds(
        LayerCost,
        kind=st.just(kind),
        forward=SECONDS,
        backward=SECONDS,
        weight_bytes=st.integers(1, 20),
        activation_bytes=st.integers(0, 4),
        gradient_bytes=st.integers(0, 4),
        state_bytes=st.integers(0, 3),
        kept_bytes=st.integers(0, 4),
    )


@st.composite
def bases(draw: st.DrawFn, most: int) -> list[LayerCost]:
    """An embedding, blocks that are alike, and a head."""
    blocks = draw(st.integers(0, most - 2))
    return [draw(layer("embedding")), *[draw(layer())] * blocks, draw(layer("head"))]


HOSTS = st.builds(
    Host,
    gpus=st.integers(1, 4),
    memory_bytes=st.integers(30, 120),
    bandwidth=st.sampled_from([1.0, 4.0, 20.0]),
)


def partition(cuts: Sequence[int], resident: Sequence[bool]) -> StreamPartition:
    return StreamPartition(tuple(cuts), tuple(resident))


def every_partition(layers: int) -> Iterator[StreamPartition]:
    for chosen in product((False, True), repeat=layers - 1):
        cuts = [0, *(cut for cut, here in enumerate(chosen, 1) if here), layers]
        for resident in product((False, True), repeat=len(cuts) - 1):
            yield partition(cuts, resident)


@st.composite
def partitions(draw: st.DrawFn, layers: int) -> StreamPartition:
    chosen = draw(st.lists(st.booleans(), min_size=layers - 1, max_size=layers - 1))
    cuts = [0, *(cut for cut, here in enumerate(chosen, 1) if here), layers]
    count = len(cuts) - 1
    return partition(cuts, draw(st.lists(st.booleans(), min_size=count, max_size=count)))
