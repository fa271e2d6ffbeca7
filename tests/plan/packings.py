"""What the packing tests share: instances, and the fewest bins by trying everything."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from weftune.plan.pack.instance import Bins, Instance, make_instance

CAPACITY = 60


@st.composite
def instances(draw, most=24, longest=CAPACITY, multiples=(1, 4, 10)) -> Instance:
    """Random lengths of up to three jobs, padded or not."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    jobs = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    return make_instance(lengths, CAPACITY, draw(st.sampled_from(multiples)), jobs)


def assert_legal(case: Instance, bins: Bins) -> None:
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(case.lengths)))
    assert all(bins)
    assert all(case.load(chosen) <= case.capacity for chosen in bins)


def fewest(case: Instance) -> int:
    """By trying every bin that the longest sample left could lie in; for at most about nine samples."""
    return _fewest(case, frozenset(range(len(case.lengths))))


@cache
def _fewest(case: Instance, left: frozenset[int]) -> int:
    if not left:
        return 0
    first, *others = sorted(left)
    best = len(left)
    for chosen in range(1 << len(others)):
        bin_ = [first, *(one for place, one in enumerate(others) if chosen >> place & 1)]
        if case.load(bin_) <= case.capacity:
            best = min(best, 1 + _fewest(case, left - frozenset(bin_)))
    return best
