"""What an adapter starts from: nothing, an adapter folder, or the adapter of another job of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class FromJob:
    """The finished adapter of another job, which is waited for."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    job: str


def source_of(adapter: Any) -> str:
    """The job that a spec's `init_from` names; empty where it names a folder, or nothing."""
    return adapter.init_from.job if isinstance(adapter.init_from, FromJob) else ""
