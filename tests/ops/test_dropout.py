"""Dropout bits hang on (seed, step, site, token, feature) alone, and look like coin tosses."""

import numpy as np
import pytest
import torch

from weftune.ops import dropout
from weftune.ops.dropout import hash_int, hash_to_odd, keep_mask_TK, keep_threshold, mask_key


def fmix32(values: np.ndarray) -> np.ndarray:
    """MurmurHash3's finaliser, written once more in unsigned arithmetic."""
    values = values.astype(np.uint32)
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    return values ^ values >> np.uint32(16)


def signed(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.uint32).view(np.int32).copy())


def test_the_hash_is_murmur3s_finaliser():
    values = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    assert [hash_int(int(v)) for v in values[:100]] == fmix32(values)[:100].tolist()
    assert (hash_to_odd(signed(values)).numpy().view(np.uint32) == fmix32(values) | 1).all()


def test_a_value_is_kept_if_its_bits_reach_the_threshold():
    """The rule written once more, from the definition: a kernel elsewhere must draw the same."""
    rows = fmix32(np.array([3, 4, 50000]) ^ 1234) | 1
    features = fmix32(np.arange(1, 41, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(1234)) | 1
    high = rows[:, None] * features >> np.uint32(16)
    kept = keep_mask_TK(1234, torch.tensor([3, 4, 50000]), 40, 0.25).numpy()
    # Read as signed, the smallest quarter of all integers is 0x8000… to 0xBFFF….
    dropped = (high >= 0x8000) & (high < 0xC000)
    assert (kept == ~dropped).all()


def test_known_bits():
    """A GPU kernel must draw these too; they may never change, or resumed jobs would."""
    assert mask_key(7, 3, "model.layers.0.self_attn.q_proj") == 0x79D80F5
    kept = keep_mask_TK(0x79D80F5, torch.tensor([0, 1, 70000]), 8, 0.5)
    assert kept.int().tolist() == [
        [0, 0, 1, 0, 0, 0, 1, 1],
        [0, 1, 0, 1, 0, 1, 1, 1],
        [0, 1, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_probability_on_rows_and_columns(probability):
    kept = keep_mask_TK(mask_key(0, 1, "site"), torch.arange(4000), 500, probability).double()
    assert abs(1 - kept.mean() - probability) < 3e-3
    spread = (probability * (1 - probability)) ** 0.5
    assert (1 - kept.mean(1) - probability).abs().max() < 6 * spread / 500**0.5
    assert (1 - kept.mean(0) - probability).abs().max() < 6 * spread / 4000**0.5


def test_neighbouring_counters_are_uncorrelated():
    rows = torch.arange(3000)
    masks = [
        keep_mask_TK(mask_key(seed, step, site), rows, 300, 0.5).double() - 0.5
        for seed, step, site in [(0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b")]
    ]
    for i, first in enumerate(masks):
        assert abs((first[1:] * first[:-1]).mean() * 4) < 6e-3
        assert abs((first[:, 1:] * first[:, :-1]).mean() * 4) < 6e-3
        for second in masks[:i]:
            assert abs((first * second).mean() * 4) < 6e-3


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_no_two_rows_and_no_two_features_share_more_than_chance_gives(probability):
    """All pairs: a product of hashes must not make rows or features alike, as a weaker mix of both does."""
    kept = keep_mask_TK(mask_key(0, 1, "site"), torch.arange(1500), 1500, probability).double()
    even = (kept - 1 + probability) / (probability * (1 - probability)) ** 0.5
    for values in (even, even.T):
        pairs = (values @ values.T / 1500**0.5)[tuple(torch.triu_indices(1500, 1500, 1))]
        assert abs(pairs.var() - 1) < 0.02
        assert pairs.abs().max() < 7.5


def test_a_row_keeps_its_mask_wherever_it_is_packed():
    whole = keep_mask_TK(123, torch.arange(50), 16, 0.3)
    assert torch.equal(keep_mask_TK(123, torch.arange(20, 50), 16, 0.3), whole[20:])
    assert torch.equal(keep_mask_TK(123, torch.tensor([49, 3]), 16, 0.3), whole[[49, 3]])


def test_a_gpus_way_gives_the_same_bits():
    for site in (123, 0xFFFFFFFF):
        whole = keep_mask_TK(site, torch.arange(50), 16, 0.3)
        assert torch.equal(
            dropout._keep_mask_by_torch(site, torch.arange(50), range(1, 17), keep_threshold(0.3)), whole
        )


def test_a_block_larger_than_the_cache_is_hashed_piece_by_piece_to_the_same_bits(monkeypatch):
    whole = keep_mask_TK(123, torch.arange(50), 16, 0.3)
    monkeypatch.setattr("weftune.ops.dropout.FEW", 0)
    assert torch.equal(keep_mask_TK(123, torch.arange(50), 16, 0.3), whole)
    monkeypatch.setattr("weftune.ops.dropout.CHUNK", 16 * 7)
    assert torch.equal(keep_mask_TK(123, torch.arange(50), 16, 0.3), whole)


def test_nothing_is_dropped_at_zero_and_half_of_the_bits_reach_the_threshold_of_a_half():
    assert keep_threshold(0.0) == -(1 << 31)
    assert keep_threshold(0.5) == 0
    assert keep_threshold(1.0) == (1 << 31) - 1


def test_known_keys_of_long_seeds():
    """They may never change, nor forget a half of the seed: a run that goes on would drop other values."""
    keys = [mask_key(seed, 3, "site") for seed in (1, 1 + (1 << 32), (5 << 32) + 1, 1 + (1 << 64))]
    assert len(set(keys[:3])) == 3
    assert keys[3] == keys[0]
    assert keys[:2] == [1446879739, 322182480]


def test_how_many_are_drawn_at_a_time_changes_nothing(monkeypatch):
    tokens = torch.arange(50)
    whole = keep_mask_TK(77, tokens, 30, 0.3)
    for chunk in (1, 30, 100, 1 << 30):
        monkeypatch.setattr(dropout, "CHUNK", chunk)
        assert torch.equal(keep_mask_TK(77, tokens, 30, 0.3), whole)
    assert keep_mask_TK(77, tokens[:0], 30, 0.3).shape == (0, 30)


def test_32_bits_read_as_signed():
    values = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    assert [dropout.to_signed(value) for value in values] == [0, 1, 2**31 - 1, -(2**31), 1 - 2**31, -1]
    assert (keep_threshold(0.0), keep_threshold(0.5), keep_threshold(1.0)) == (-(2**31), 0, 2**31 - 1)


def test_a_part_of_the_features_has_the_masks_of_the_whole():
    whole = keep_mask_TK(123, torch.arange(50), 64, 0.3)
    part = keep_mask_TK(123, torch.arange(50), 16, 0.3, first_feature=32)
    assert torch.equal(part, whole[:, 32:48])
