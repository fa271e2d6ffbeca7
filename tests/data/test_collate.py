from __future__ import annotations

import numpy as np
import pytest
import torch

from weftune.core.batch import IGNORED, Segment
from weftune.data.collate import Part, collate

ROWS = [
    {"input_ids": [11, 12, 13, 14], "labels": [-100, -100, 13, 14]},
    {"input_ids": [21, 22], "labels": [21, 22]},
    {"input_ids": [31, 32, 33], "labels": [-100, 32, -100]},
]


@pytest.fixture
def samples(samples_of, smollm2):
    return samples_of(ROWS, smollm2)


def test_samples_lie_end_to_end_with_shifted_targets(samples):
    batch = collate([Part("a", 3, samples, 2, 40), Part("a", 3, samples, 0, 7), Part("b", 1, samples, 1, 0)])
    assert batch.tokens_T.tolist() == [31, 32, 33, 11, 12, 13, 14, 21, 22]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert batch.targets_T.tolist() == [32, IGNORED, IGNORED, IGNORED, 13, 14, IGNORED, 22, IGNORED]
    assert batch.token_index_T.tolist() == [40, 41, 42, 7, 8, 9, 10, 0, 1]
    assert batch.sample_lengths == (3, 4, 2)
    assert batch.segments == (Segment("a", 3, 0, 7), Segment("b", 1, 7, 9))
    for tensor in (batch.tokens_T, batch.positions_T, batch.targets_T, batch.token_index_T):
        assert tensor.dtype == torch.int64


def test_as_many_rows_have_targets_as_the_samples_say(samples):
    for i in range(len(samples)):
        batch = collate([Part("a", 1, samples, i, 0)])
        assert int((batch.targets_T != IGNORED).sum()) == samples.supervised[i]


def test_the_samples_of_a_job_must_stand_together(samples):
    with pytest.raises(AssertionError, match="stand together"):
        collate([Part("a", 1, samples, 0, 0), Part("b", 1, samples, 1, 0), Part("a", 1, samples, 2, 4)])


def test_a_microbatch_holds_one_step_of_a_job(samples):
    with pytest.raises(AssertionError, match="one step"):
        collate([Part("a", 1, samples, 0, 0), Part("a", 2, samples, 1, 0)])


def test_each_sample_brings_its_reference_score_and_samples_without_one_a_zero(samples):
    scored = samples.with_references(np.array([-1.0, -2.0, -3.0]))
    assert samples.references is None
    batch = collate([Part("a", 1, scored, 2, 0), Part("a", 1, scored, 0, 3), Part("b", 1, samples, 1, 0)])
    assert batch.references_S.tolist() == [-3.0, -1.0, 0.0]
    assert batch.references_S.dtype == torch.float64
    assert collate([Part("b", 1, samples, 1, 0)]).references_S is None
    assert scored.add_prefix(2).references.tolist() == [-1.0, -2.0, -3.0]
