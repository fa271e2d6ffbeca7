"""Results of evaluations: scores of adapters on the same rows of data, the ranking of the adapters, and
answered prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

METRICS = {"loss": "lower", "perplexity": "lower", "token_accuracy": "higher", "exact_match": "higher"}
"""Maps each metric to the string that says whether lower or higher values are better. For the user's own
metric, higher values are better."""

REWARDS = ("rewards/margins", "rewards/accuracies")
"""Metrics of preference pairs, computed with the base model (without an adapter) as reference policy. Higher
values are better."""


@dataclass(frozen=True, slots=True)
class AdapterScores:
    """Scores of one adapter, or of the base model without an adapter."""

    adapter: str
    rows: int
    """Number of rows of data on which the adapter was evaluated."""
    tokens: int
    """Number of supervised tokens, over which loss and token accuracy are means."""
    scores: Mapping[str, float | None]
    """Maps each metric to its value. The value is None if the metric cannot be computed from the data."""


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """A row of data with a prompt, and the answers of all adapters to this prompt."""

    location: str
    values: Mapping[str, Any]
    """Maps each column of the data to its value in the row."""
    prompt: str | tuple[dict[str, Any], ...]
    """The prompt as a string, or as the messages of a chat."""
    tools: list[Any] | None
    expected: str | None
    answers: dict[str, str] = field(default_factory=dict)
    """Maps each adapter to its answer."""

    def is_match(self, adapter: str) -> bool:
        """Return whether the adapter's answer is the expected one, apart from whitespace at both ends."""
        return self.expected is not None and self.answers[adapter].strip() == self.expected.strip()


@dataclass(frozen=True, slots=True)
class Evaluation:
    data: str
    base: str
    """Name of the base model."""
    results: tuple[AdapterScores, ...]
    answers: tuple[AnsweredRow, ...]
    """Rows of data with prompts, each with the adapters' answers, in the order of the file. Empty if no
    answers were generated."""
    notes: tuple[str, ...] = ()
    """Sentences about rows that were skipped or truncated."""

    def rank_results(self, metric: str) -> list[AdapterScores]:
        """Return the scores of all adapters, sorted by a metric, best first. Adapters with equal values are
        ordered by their loss, and adapters without a value are last."""
        return sorted(
            self.results, key=lambda one: (_sort_key(metric, one.scores), _sort_key("loss", one.scores))
        )

    def best_adapter(self, metric: str) -> str | None:
        """Return the name of the adapter with the best value of a metric, or None if fewer than two adapters
        have a value."""
        first = self.rank_results(metric)[:2]
        is_comparable = len(first) == 2 and isfinite(_sort_key(metric, first[1].scores))
        return first[0].adapter if is_comparable else None

    def record(self) -> dict[str, Any]:
        """Return the scores and answers as a JSON-compatible dict."""
        results = [
            {"adapter": one.adapter, "data": self.data, "rows": one.rows, "tokens": one.tokens, **one.scores}
            for one in self.results
        ]
        return {"results": results}


def _sort_key(metric: str, scores: Mapping[str, float | None]) -> float:
    """Return a sort key that is smaller for better values of the metric, and infinite for an adapter without
    a value."""
    value = scores[metric]
    if value is None or not isfinite(value):
        return inf
    return value if METRICS.get(metric) == "lower" else -value
