"""The dataclasses for the keys `data` and `eval` of a jobs file. This module imports neither tokenizers nor
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from weftune.core.bounds import MAX_COUNT, RUN_SHARE, Bound

Format = Literal[
    "auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt", "preference", "kto", "tokens"
]
RowKind = Literal["answers", "pairs", "labelled"]
"""Kind of rows that an objective trains on: any answers, preference pairs, or answers with a label."""
DEFAULT_MAX_LENGTH = 2048
TrainOn = Literal["assistant", "all", "completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, folder or Hub id of a mixture. With a `weight` of 2, its samples are shown twice per
    epoch."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    path: str
    weight: Annotated[float, Bound(above=0, at_most=1e6)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The source of a job's rows, and the options by which rows become samples (key `data` of a job)."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "arbitrary_types_allowed": True}

    path: str | tuple[Source, ...] = ()
    """A file, a Hub id, or a mixture of them; empty only when `rows` is given."""
    rows: Any = None
    """Rows given from Python instead of `path`: a sequence of dicts or a `datasets.Dataset`."""
    format: Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Maps Weftune's column names to the column names of the file: `{prompt: question}`."""
    split: str | None = None
    limit: Annotated[int | None, Bound(at_least=1)] = None
    max_length: Annotated[int | None, Bound(at_least=2, at_most=MAX_COUNT)] = None
    """Maximum number of tokens per sample. None selects DEFAULT_MAX_LENGTH, or the base's context if less."""
    train_on: TrainOn = "assistant"
    chat_template: str | None = None
    """`chatml` or the path of a Jinja file. None selects the tokenizer's template."""
    skip_bad_rows: bool = False

    def max_sample_tokens(self, context: int | None) -> int:
        """Return the maximum number of tokens per sample on a base with the context length `context`."""
        longest = DEFAULT_MAX_LENGTH if self.max_length is None else self.max_length
        return longest if context is None else min(longest, context)

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(path=self.path),) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSpec:
    """Settings of the answers to held-out prompts at each evaluation: how many prompts are answered, and the
    maximum length of an answer in tokens."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    prompts: Annotated[int, Bound(at_least=1, at_most=1000)] = 8
    """Number of prompts, taken from the first held-out rows."""
    max_new_tokens: Annotated[int, Bound(at_least=1, at_most=65536)] = 64


EXACT_MATCH = "exact_match"
"""Name of the metric that is the fraction of answers that are equal to the expected ones."""
RESERVED_NAMES = (
    *("adapter", "data", "rows", "tokens", "loss", "perplexity", "token_accuracy", "mean_token_accuracy"),
    EXACT_MATCH,
)
"""Names that the results of evaluations already use. A metric function of the user cannot have one of
them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSpec:
    """The evaluation of a job on held-out rows, which are a separate file, or a fraction of the training rows
    chosen by the hash of each row."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    path: str | None = None
    fraction: Annotated[float | None, Bound(above=0, below=1)] = None
    every: Annotated[float | None, RUN_SHARE] = None
    """Interval between evaluations: below 1 a fraction of the run, otherwise a number of steps. None means
    that the job is evaluated at step 0 and at the end only."""
    generate: GenerateSpec | None = None
    """Settings of the answers to held-out prompts at each evaluation. None generates no answers."""
    metric: str | None = None
    """Metric of the answers by which evaluations are compared: `exact_match`, or a Python function as
    `FILE.py:FUNCTION`. None compares the validation loss."""

    @property
    def metric_name(self) -> str | None:
        """Name of the metric of answers in recorded evaluations, without the prefix `eval_`."""
        return None if self.metric is None else self.metric.rpartition(":")[2]
