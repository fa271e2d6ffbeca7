"""Dropout bits hang on (seed, step, site, token, feature) alone, and look like coin tosses."""

import numpy as np
import pytest
import torch

from weft.ops.dropout import kept_TK, key, mix, mix_without_last_fold_


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
    assert [mix(int(v)) for v in values[:100]] == fmix32(values)[:100].tolist()
    unfolded = mix_without_last_fold_(signed(values)).numpy().view(np.uint32)
    assert (unfolded ^ unfolded >> np.uint32(16) == fmix32(values)).all()


def test_a_value_is_kept_if_its_bits_reach_the_threshold():
    """The rule written once more, from the definition: a kernel elsewhere must draw the same."""
    rows = fmix32(np.array([3, 4, 50000]) ^ 1234)
    bits = rows[:, None] + np.arange(40, dtype=np.uint32) * np.uint32(0x9E3779B9)
    high = fmix32(bits) >> np.uint32(16)
    kept = kept_TK(1234, torch.tensor([3, 4, 50000]), 40, 0.25).numpy()
    # Read as signed, the smallest quarter of all integers is 0x8000… to 0xBFFF….
    dropped = (high >= 0x8000) & (high < 0xC000)
    assert (kept == ~dropped).all()


def test_known_bits():
    """A GPU kernel must draw these too; they may never change, or resumed jobs would."""
    assert key(7, 3, "model.layers.0.self_attn.q_proj") == 0x79D80F5
    kept = kept_TK(0x79D80F5, torch.tensor([0, 1, 70000]), 8, 0.5)
    assert kept.int().tolist() == [
        [0, 1, 0, 1, 1, 1, 1, 1],
        [0, 0, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 1],
    ]
