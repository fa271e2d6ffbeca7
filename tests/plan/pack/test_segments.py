"""Jobs share microbatches; on the ladder these are evenly full and few sizes occur."""

from hypothesis import given
from hypothesis import strategies as st

from weftune.plan.pack.segments import ladder_size, pack_segments
from weftune.plan.program.program import PlacedSample, SegmentPlan


def test_rungs_are_never_far_above_and_never_below() -> None:
    for tokens in range(1, 20_000, 7):
        size = ladder_size(tokens)
        assert tokens <= size
        assert size - tokens < max(128, tokens / 8)
        assert ladder_size(size) == size


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1024, 8192))
def test_on_the_ladder_no_microbatch_more_is_needed_and_all_keep_to_the_capacity(lengths, capacity):
    samples = tuple(PlacedSample(i, length, sum(lengths[:i])) for i, length in enumerate(lengths))
    plain = pack_segments([SegmentPlan("a", 1, samples)], capacity)
    laddered = pack_segments([SegmentPlan("a", 1, samples)], capacity, pads_to_ladder=True)
    assert len(laddered) == len(plain)
    assert all(one.tokens <= one.rows <= capacity for one in laddered)
    assert sum(one.tokens for one in laddered) == sum(lengths)


def test_microbatches_of_a_round_on_the_ladder_are_evenly_full() -> None:
    samples = tuple(PlacedSample(i, 100, 100 * i) for i in range(100))
    rows = [one.rows for one in pack_segments([SegmentPlan("a", 1, samples)], 8192, pads_to_ladder=True)]
    assert len(rows) == 2
    assert sum(rows) <= 1.05 * 10_000
