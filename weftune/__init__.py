"""Weftune fine-tunes many adapters at once on one frozen base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weftune.errors import UserError
    from weftune.jobs.spec.spec import JobSpec
    from weftune.launch.api import SweepResult, sweep, train
    from weftune.trainer.options import Options
    from weftune.trainer.trainer import Result, Trainer

    __version__: str

__all__ = [
    "JobSpec",
    "Options",
    "Result",
    "SweepResult",
    "Trainer",
    "UserError",
    "__version__",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for and no more: `weftune --help` needs no torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("weftune")
    if name == "JobSpec":
        from weftune.jobs.spec.spec import JobSpec

        return JobSpec
    if name == "UserError":
        from weftune.errors import UserError

        return UserError
    if name in __all__:
        from weftune.launch import api

        return getattr(api, name)
    raise AttributeError(f"module 'weftune' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The API and nothing else, whichever submodules have been imported."""
    return list(__all__)
