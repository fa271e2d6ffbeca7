"""The range of every number of a job, to its last value inside and its first outside."""

import math

import pytest

from weftune.core.bounds import Bound
from weftune.jobs.spec.schema import ANY, BOUNDS, bound_of_key, number_faults

WHOLE, SHARE = "must be a whole number", "must be below 1 (a share of the run) or a whole number of steps"
LARGE = 10**12

RANGES = [
    # key, the last values inside, what is just outside with its sentence
    (("adapter", "rank"), [1, 65536], [(0, "at least 1"), (65537, "at most 65536"), (1.5, WHOLE)]),
    (("adapter", "alpha"), [1e-9, 1e9], [(0, "above 0")]),
    (("adapter", "dropout"), [0, 0.999], [(-1e-9, "at least 0"), (1, "below 1")]),
    (("adapter", "loraplus_lr_ratio"), [1e-9, 16], [(0, "above 0")]),
    (("adapter", "d_initial"), [-1, 0, 0.1], [(math.inf, "finite")]),
    (("adapter", "size"), [1, 65536], [(0, "at least 1"), (65537, "at most 65536"), (1.5, WHOLE)]),
    (("adapter", "sparsity"), [1e-9, 1], [(0, "above 0"), (1.1, "at most 1")]),
    (("adapter", "l0_weight"), [0, 1], [(-1, "at least 0")]),
    (("adapter", "relaxed"), [1e-9, 1, 7, LARGE], [(0, "above 0"), (LARGE + 1, "at most"), (1.5, SHARE)]),
    (("adapter", "mask_lr_ratio"), [1e-9, 100], [(0, "above 0")]),
    (("adapter", "num_virtual_tokens"), [1, 65536], [(0, "at least 1"), (65537, "at most"), (1.5, WHOLE)]),
    (("adapter", "svd_iterations"), [0, 1000, None], [(-1, "at least 0"), (1001, "at most"), (1.5, WHOLE)]),
    (("adapter", "projection_prng_key"), [0, 2**63 - 1], [(-1, "at least 0"), (2**63, "most"), (1.5, WHOLE)]),
    (("adapter", "rank_pattern", ANY), [1, 65536], [(0, "at least 1"), (65537, "at most"), (2.5, WHOLE)]),
    (("adapter", "alpha_pattern", ANY), [1e-9], [(0, "above 0")]),
    (("objective", "beta"), [1e-9, 10.0], [(0, "above 0")]),
    (("objective", "label_smoothing"), [0, 0.49], [(-1e-9, "at least 0"), (0.5, "below 0.5")]),
    (("objective", "cpo_alpha"), [0, 5.0], [(-1e-9, "at least 0")]),
    (("objective", "desirable_weight"), [0, 5.0], [(-1e-9, "at least 0")]),
    (("objective", "undesirable_weight"), [0, 5.0], [(-1e-9, "at least 0")]),
    (("objective", "simpo_gamma"), [0, 5.0], [(-1e-9, "at least 0")]),
    (("objective", "center_rewards_coefficient"), [0, 5.0], [(-1e-9, "at least 0")]),
    (("data", "path", ANY, "weight"), [1e-9, 10**6], [(0, "above 0"), (10**6 + 1, "at most 1000000")]),
    (("data", "limit"), [1, None, 10**15], [(0, "at least 1"), (1.5, WHOLE)]),
    (("data", "max_length"), [2, None], [(1, "at least 2"), (LARGE + 1, "at most 1e+12"), (2.5, WHOLE)]),
    (("eval", "fraction"), [1e-9, 0.999, None], [(0, "above 0"), (1, "below 1")]),
    (("eval", "every"), [1e-9, 1, 7, LARGE, None], [(0, "above 0"), (LARGE + 1, "at most"), (1.5, SHARE)]),
    (("eval", "generate", "prompts"), [1, 1000], [(0, "at least 1"), (1001, "at most"), (1.5, WHOLE)]),
    (("eval", "generate", "max_new_tokens"), [1, 65536], [(0, "at least 1"), (65537, "most"), (1.5, WHOLE)]),
    (("epochs",), [1e-9, 1.5, 10**9, None], [(0, "above 0"), (10**9 + 1, "at most 1000000000")]),
    (("steps",), [1, LARGE, None], [(0, "at least 1"), (LARGE + 1, "at most"), (1.5, WHOLE)]),
    (("batch_size",), [1, 10**9], [(0, "at least 1"), (10**9 + 1, "at most 1000000000"), (1.5, WHOLE)]),
    (("learning_rate",), [1e-12, 100.0], [(0, "above 0")]),
    (("warmup",), [0, 0.5, 1, 7, LARGE], [(-1e-9, "at least 0"), (LARGE + 1, "at most"), (1.5, SHARE)]),
    (("weight_decay",), [0, 5.0], [(-1e-9, "at least 0")]),
    (("betas", ANY), [0, 0.999], [(-1e-9, "at least 0"), (1, "below 1")]),
    (("eps",), [1e-30, 1], [(0, "above 0"), (1.5, "at most 1")]),
    (("clip",), [0, 5.0, None], [(-1e-9, "at least 0")]),
    (("seed",), [0, 2**63 - 1], [(-1, "at least 0"), (2**63, "at most"), (1.5, WHOLE)]),
    (("priority",), [-(10**9), 10**9], [(-(10**9) - 1, "least -1e+09"), (10**9 + 1, "most"), (0.5, WHOLE)]),
    (("early_stop", "patience"), [1, LARGE], [(0, "at least 1"), (LARGE + 1, "at most"), (1.5, WHOLE)]),
    (("early_stop", "min_delta"), [0, 0.5], [(-1e-9, "at least 0")]),
    (("save_every",), [1e-9, 1, 7, LARGE, None], [(0, "above 0"), (LARGE + 1, "at most"), (2.5, SHARE)]),
    (("sweep", "trials"), [1, 1000, None], [(0, "at least 1"), (1001, "at most 1000"), (1.5, WHOLE)]),
    (("sweep", "keep"), [1, 1000], [(0, "at least 1"), (1001, "at most 1000"), (1.5, WHOLE)]),
    (("sweep", "halving", "at", ANY), [1e-9, 0.999], [(0, "above 0"), (1, "below 1")]),
    (("base", "rope_scaling", "factor"), [1, 10**6], [(0.9, "at least 1"), (10**6 + 1, "at most 1000000")]),
    (("base", "rope_scaling", "original_max_position_embeddings"), [1, None], [(0, "least 1"), (1.5, WHOLE)]),
    *(
        (("base", "rope_scaling", key), [1e-9, 32, None], [(0, "above 0")])
        for key in (
            "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "low_freq_factor", "high_freq_factor",
        )
    ),
    (("sweep", "halving", "keep"), [1e-9, 0.999], [(0, "above 0"), (1, "below 1")]),
]  # fmt: skip


def test_every_number_has_its_range_here():
    assert {key for key, *_ in RANGES} == BOUNDS.keys()


def test_the_range_of_a_key_is_found_by_the_way_to_it():
    assert bound_of_key(("adapter", "rank")) is BOUNDS["adapter", "rank"]
    assert bound_of_key(("adapter", "rank_pattern", "q_proj")) is BOUNDS["adapter", "rank_pattern", ANY]
    assert bound_of_key(("adapter",)) is bound_of_key(("schedule",)) is None


def put(key, value):
    """A mapping with `value` at the key."""
    *above, last = key
    if last == ANY:
        return put(above, [value] if above == ["betas"] else {"q_proj": value})
    if ANY in above:
        return put(above[: above.index(ANY)], [{last: 1}, {last: value}])
    for part in reversed(key):
        value = {part: value}
    return value


def faults(key, value):
    return [fault.sentence for fault in number_faults(put(key, value))]


@pytest.mark.parametrize(("key", "inside", "outside"), RANGES, ids=lambda one: ".".join(map(str, one))[:30])
def test_a_number_is_refused_from_the_first_value_outside_of_its_range(key, inside, outside):
    for value in inside:
        assert faults(key, value) == []
    for value, sentence in outside:
        (fault,) = faults(key, value)
        assert sentence in fault


@pytest.mark.parametrize("key", [key for key, *_ in RANGES])
def test_what_is_no_finite_number_is_refused_for_every_key(key):
    kind = "whole number" if BOUNDS[key].is_integer else "number"
    for value, got in ((True, "true"), ("8", '"8"'), ([], "an empty list")):
        assert faults(key, value) == [f"must be a {kind}, got {got}"]
    for value in (math.nan, math.inf, -math.inf, 10**400):
        (fault,) = faults(key, value)
        assert fault.startswith("must be a finite number, got ")


@pytest.mark.parametrize("key", [key for key, *_ in RANGES])
def test_nothing_is_an_answer_only_where_the_key_may_be_left_open(key):
    assert (faults(key, None) == []) == BOUNDS[key].allows_none


def test_a_fault_is_told_at_its_own_place():
    values = {"adapter": {"rank_pattern": {"a": 1, "b": 0}}, "data": {"path": [{"weight": 0}, {"weight": 1}]}}
    assert {fault.loc for fault in number_faults(values)} == {
        ("adapter", "rank_pattern", "b"),
        ("data", "path", 0, "weight"),
    }


def test_a_share_may_be_one_and_above_it_whole_steps_only():
    share = Bound(allows_fraction=True)
    assert [share.fault(value) for value in (0.25, 1, 1.0, 2.0)] == [None] * 4
    assert share.fault(1.25) is not None
    assert Bound().fault(1.25) is None


def test_nothing_is_no_answer_unless_a_bound_says_so():
    assert Bound().fault(None) == "must be a number, got nothing"
    assert Bound(allows_none=True).fault(None) is None


def test_what_is_no_list_or_mapping_is_not_looked_into():
    """Its type is told elsewhere."""
    for values in (
        {"betas": 2},
        {"betas": "12"},
        {"adapter": [{"rank": 0}]},
        {"adapter": {"rank_pattern": 0}},
    ):
        assert list(number_faults(values)) == []
