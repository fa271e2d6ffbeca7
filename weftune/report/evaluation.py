"""The HTML page of `weftune eval`, and the file in which a training job stores its answers to held-out
prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.core.evaluation import METRICS, AnsweredRow, Evaluation
from weftune.core.files import FORMAT
from weftune.objectives.spec import REWARD_METRICS
from weftune.report.template import render_template
from weftune.report.words import NO_VALUE, accuracy_text, count_noun, loss_text

MAX_ROWS = 200
"""Maximum number of rows whose answers are shown on the page of an evaluation."""
ANSWERS = "answers.json"
"""Name of the file, in a job's folder, with the answers of the job's adapter to held-out prompts."""
BARE_BASE = ""
"""Key of the base model's own answers in the mapping from jobs to answers. The key is not `base`, which may
be the name of a job."""


def answers_record(adapter: str, step: int, rows: Sequence[AnsweredRow]) -> dict[str, Any]:
    """Return the content of the file `answers.json`, with the answers of a job's adapter to held-out
    prompts."""
    shown = [
        {
            "location": row.location,
            "prompt": row.prompt,
            "expected": row.expected,
            "base": row.answers[BARE_BASE],
            "answer": row.answers[adapter],
        }
        for row in rows
    ]
    return {"format": FORMAT, "step": step, "rows": shown}


@dataclass(frozen=True, slots=True)
class SampleAnswers:
    """The content of `answers.json`: the answers of a job's adapter and of the base to held-out prompts."""

    step: int
    """Step of the adapter with which the answers were generated."""
    rows: tuple[AnsweredRow, ...]


def read_answers(folder: Path) -> SampleAnswers | None:
    """Return the answers that are stored in a job's folder, or None if there are none or they cannot be
    read."""
    try:
        value = json.loads((folder / ANSWERS).read_bytes())
        return SampleAnswers(int(value["step"]), tuple(_parse_answered_row(row) for row in value["rows"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse_answered_row(row: Mapping[str, Any]) -> AnsweredRow:
    prompt, expected = row["prompt"], row["expected"]
    if not isinstance(prompt, str):
        prompt = tuple({"role": "", "content": None, "tool_calls": None, **message} for message in prompt)
    answers = {BARE_BASE: str(row["base"]), "job": str(row["answer"])}
    expected = None if expected is None else str(expected)
    return AnsweredRow(str(row["location"]), {}, prompt, None, expected, answers)


def metric_title(metric: str) -> str:
    """Return the heading of a metric's column in the table of scores."""
    return metric.replace("_", " ") if metric in (*METRICS, *REWARD_METRICS) else metric


def score_text(metric: str, value: float | None) -> str:
    if value is None:
        return NO_VALUE
    if metric in ("token_accuracy", "exact_match", "rewards/accuracies", "accuracy"):
        return accuracy_text(value)
    return loss_text(value, 2 if metric == "perplexity" else 4)


def evaluation_page(evaluation: Evaluation, metric: str) -> str:
    """Return a self-contained page: the table of scores, and the answers to each row side by side."""
    ranked = evaluation.rank_results(metric)
    shown = evaluation.answers[:MAX_ROWS]
    count = len(evaluation.answers)
    better = METRICS.get(metric, "higher")
    words = f"Ranked by {metric_title(metric)}; {better} is better."
    if any(one.scores.get("exact_match") is not None for one in ranked):
        words += " Exact match compares generated answers with the expected ones."
    return render_template(
        "evaluation.html.jinja",
        {},
        {
            "title": evaluation.data,
            "facts": [
                f"base {evaluation.base}",
                count_noun(sum(one.adapter != "base" for one in ranked), "adapter"),
                count_noun(max(one.rows for one in ranked), "row"),
            ],
            "words": words,
            "notes": evaluation.notes,
            "metrics": [(one, metric_title(one)) for one in ranked[0].scores],
            "results": ranked,
            "best": evaluation.best_adapter(metric),
            "text": score_text,
            "rows": shown,
            "titles": {one.adapter: one.adapter for one in ranked},
            "rows_note": f"The first {MAX_ROWS:,} of {count:,} rows are shown." if count > MAX_ROWS else "",
        },
    )
