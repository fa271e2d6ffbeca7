"""Torch's deterministic kernels last as long as a run."""

import os

import pytest
import torch
from torch.utils import deterministic as details

from weftune.core.deterministic import (
    WORKSPACE,
    WORKSPACE_SIZE,
    are_kernels_deterministic,
    deterministic_kernels,
)
from weftune.errors import UserError


def state():
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warned, details.fill_uninitialized_memory


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)


def test_inside_torch_is_strict_and_afterwards_all_is_as_before():
    before = state()
    with deterministic_kernels():
        assert state() == (True, False, False)
        assert are_kernels_deterministic()
        assert os.environ[WORKSPACE] == WORKSPACE_SIZE
    assert state() == before
    with pytest.raises(KeyError), deterministic_kernels():
        raise KeyError
    assert state() == before


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels():
            assert os.environ[WORKSPACE] == ":16:8"
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_unasked_nothing_is_touched():
    before = state()
    with deterministic_kernels(False):
        assert state() == before
        assert WORKSPACE not in os.environ


def test_an_operation_that_torch_refuses_is_a_sentence_with_its_name():
    told = r"^deterministic: torch .* form of put_, .*; leave deterministic out$"
    with pytest.raises(UserError, match=told), deterministic_kernels():
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))


def test_a_process_that_began_to_multiply_without_the_workspace_is_told_so():
    """Torch's own words, which only a GPU brings."""
    refusal = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it "
        "uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set "
        "an environment variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8"
    )
    told = "^deterministic: this process has used the GPU without CUBLAS_WORKSPACE_CONFIG=:4096:8; set it"
    with pytest.raises(UserError, match=told), deterministic_kernels():
        raise RuntimeError(refusal)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="sizes do not match"), deterministic_kernels():
        raise RuntimeError("sizes do not match")
