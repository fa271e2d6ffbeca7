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


MODULES = {
    "JobSpec": "weftune.jobs.spec.spec",
    "Options": "weftune.trainer.options",
    "Result": "weftune.trainer.trainer",
    "SweepResult": "weftune.launch.api",
    "Trainer": "weftune.trainer.trainer",
    "UserError": "weftune.errors",
    "sweep": "weftune.launch.api",
    "train": "weftune.launch.api",
}
"""Maps each name of the API to its module."""


def __getattr__(name: str) -> Any:
    """Import only the attribute that is requested, so that `weftune --help` does not import torch."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("weftune")
        except PackageNotFoundError:  # A source tree on the path that was not installed.
            return "0+source"
    if name in MODULES:
        from importlib import import_module

        return getattr(import_module(MODULES[name]), name)
    raise AttributeError(f"module 'weftune' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the public API only, whichever submodules have been imported."""
    return list(__all__)
