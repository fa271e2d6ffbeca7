"""What a job may say about its data. No tokenizer and no torch here: `jobs` builds on this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Format = Literal[
    "auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt", "preference", "kto", "tokens"
]
TrainOn = Literal["assistant", "all", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, folder or Hub id of a mixture. `weight` 2 shows its samples twice an epoch, 0.5 half."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    path: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where a job's rows come from and how they become samples."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "arbitrary_types_allowed": True}

    path: str | tuple[Source, ...] = ()
    """A file, a Hub id, or a mixture of them; empty only when `rows` is given."""
    rows: Any = None
    """Rows given from Python instead of `path`: a sequence of dicts or a `datasets.Dataset`."""
    format: Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column name → the file's: `{prompt: question}`."""
    split: str | None = None
    limit: int | None = None
    max_length: int = 2048
    train_on: TrainOn = "assistant"
    chat_template: str | None = None
    """`chatml`, or a Jinja file; None takes the tokenizer's own."""
    skip_bad_rows: bool = False

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(path=self.path),) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec:
    """Held-out rows: a file of their own, or a share of the training file chosen by the hash of each row."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    path: str | None = None
    fraction: float | None = None
    every: float | None = None
    """Below 1 a share of the run, otherwise steps; None: only at step 0 and at the end."""
