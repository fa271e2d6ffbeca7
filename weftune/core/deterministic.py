"""Torch's deterministic kernels, for the time of a run.

In this mode the backward of flash attention (varlen_attn, and scaled_dot_product_attention where it takes
that) adds up dq in an order of its own instead of by atomics, the memory-efficient backward splits no keys,
and cuDNN's attention is left out. Torch refuses an operation that has no deterministic form.
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
"""One of the two values with which cuBLAS promises the same bits; torch refuses products without it."""
REFUSED = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_kernels(asked: bool = True) -> Iterator[None]:
    """Inside, torch computes the same bits each time, if `asked`; afterwards all is as before.

    An operation that torch refuses ends in a UserError that names it.
    """
    if not asked:
        yield
        return
    os.environ.setdefault(WORKSPACE, WORKSPACE_SIZE)
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    details: Any = torch.utils.deterministic
    filled = details.fill_uninitialized_memory
    # Not only warned: where torch warns, attention keeps its atomics.
    torch.use_deterministic_algorithms(True)
    # Nobody reads what was not written, and to fill every new tensor takes a launch each.
    details.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        found = REFUSED.match(str(error))
        if found is None:
            raise
        raise UserError(
            f"deterministic: torch {torch.__version__} has no deterministic form of {found[1]}, which this "
            "run needs; leave deterministic out"
        ) from error
    finally:
        details.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before, warn_only=warned)


def are_kernels_deterministic() -> bool:
    """Whether torch was asked for it, by `deterministic_kernels` or by the user."""
    return torch.are_deterministic_algorithms_enabled()
