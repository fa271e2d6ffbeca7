"""Weft fine-tunes many adapters at once on one frozen base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.jobs.spec import JobSpec
    from weft.trainer import Options, Result, Trainer, train

__all__ = ["JobSpec", "Options", "Result", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    """Import what is asked for and no more: `weft --help` needs no torch."""
    if name == "JobSpec":
        from weft.jobs.spec import JobSpec

        return JobSpec
    if name in __all__:
        from weft import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
