"""Torch's deterministic kernels for the duration of a run.

With deterministic kernels, the backward of flash attention (varlen_attn, or scaled_dot_product_attention with
that backend) sums dq in a fixed order instead of by atomics, the memory-efficient backward splits no keys,
and cuDNN's attention is not used. Torch raises an error for an operation that has no deterministic
implementation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from weftune.errors import UserError

WORKSPACE, WORKSPACE_SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Environment variable that determines the workspace of cuBLAS, and one of its two values with which results
are deterministic. Torch reads it at the first matrix product on a GPU. Without it, torch raises an error at
every product in deterministic mode."""
REFUSED = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_kernels(enabled: bool = True) -> Iterator[None]:
    """Return a context manager in which torch computes the same bits in every run, if `enabled`. Torch's
    settings are restored afterwards.

    An operation without a deterministic implementation raises a UserError that names it.
    """
    if not enabled:
        yield
        return
    set_workspace()
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    details: Any = torch.utils.deterministic
    filled = details.fill_uninitialized_memory
    # Not warn_only: if torch only warns, attention keeps its atomics.
    torch.use_deterministic_algorithms(True)
    # Uninitialized memory is never read, and filling it takes a launch per new tensor.
    details.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        sentence = _determinism_advice(str(error))
        if sentence is None:
            raise
        raise UserError(f"deterministic: {sentence}") from error
    finally:
        details.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before, warn_only=warned)


def set_workspace() -> None:
    """Set the cuBLAS workspace that deterministic products need, unless the user has set it. This must be
    done before the first product on a GPU."""
    os.environ.setdefault(WORKSPACE, WORKSPACE_SIZE)


def _determinism_advice(refusal: str) -> str | None:
    """Return advice for an error that torch raises in deterministic mode, or None for any other error."""
    if found := REFUSED.match(refusal):
        return (
            f"torch {torch.__version__} has no deterministic form of {found[1]}, which this run needs; leave "
            "deterministic out"
        )
    if refusal.startswith("Deterministic behavior was enabled") and WORKSPACE in refusal:
        return (
            f"this process has used the GPU without {WORKSPACE}={WORKSPACE_SIZE}; set it before Python "
            "starts, or train in a process of its own"
        )
    return None


def are_kernels_deterministic() -> bool:
    """Return whether torch's deterministic mode is on, set by `deterministic_kernels` or by the user."""
    return torch.are_deterministic_algorithms_enabled()
