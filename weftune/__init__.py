"""Weftune fine-tunes many adapters at once on one frozen base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weftune.jobs.spec import JobSpec
    from weftune.trainer import Options, Result, Trainer, train

__all__ = ["JobSpec", "Options", "Result", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    """Import what is asked for and no more: `weftune --help` needs no torch."""
    if name == "JobSpec":
        from weftune.jobs.spec import JobSpec

        return JobSpec
    if name in __all__:
        from weftune import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'weftune' has no attribute {name!r}")
