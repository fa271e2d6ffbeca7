"""The starting point of an adapter: none, an adapter folder, or the adapter of another job of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class FromJob:
    """The finished adapter of another job, for which this job waits."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    job: str


def source_of(adapter: Any) -> str:
    """Return the job that a spec's `init_from` names. Empty if it names a folder, or nothing."""
    return adapter.init_from.job if isinstance(adapter.init_from, FromJob) else ""
