"""One microbatch is filled as far as the pool allows."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.packings import instances
from weftune.plan.pack.fill import fullest
from weftune.plan.pack.instance import instance


@settings(max_examples=200, deadline=None)
@given(instances(most=8), st.integers(0, 60))
def test_no_other_choice_of_samples_puts_more_tokens_into_the_room(case, room):
    pool = range(len(case.lengths))
    chosen = fullest(case, pool, room)
    subsets = [subset for size in range(len(pool) + 1) for subset in combinations(pool, size)]
    assert len(set(chosen)) == len(chosen)
    assert case.load(chosen) <= room
    assert case.tokens(chosen) == max(case.tokens(one) for one in subsets if case.load(one) <= room)


def test_of_equal_fillings_the_one_with_longer_samples_is_taken():
    assert fullest(instance([2, 3, 5], 5), range(3), 5) == [2]
