"""The held-out prompts that a training job answers at each evaluation, and the metric of the answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weftune.core.evaluation import AnsweredRow
from weftune.data.build import find_format
from weftune.data.encode import Encoder
from weftune.data.prepare import Prepared, open_held_out
from weftune.data.row import row_hash
from weftune.data.spec import EXACT_MATCH, EvalSpec
from weftune.data.template import template_source
from weftune.errors import DataError, Mistake
from weftune.generate.evaluate import encode_prompt_row, mean_score, rows_with_prompts
from weftune.generate.metric import UserMetric, load_metric
from weftune.jobs.courses import longest_prompt
from weftune.jobs.spec.spec import JobSpec


@dataclass(frozen=True, slots=True)
class HeldOutPrompts:
    """The held-out prompts that one job answers at every evaluation, and the metric of the answers."""

    rows: tuple[AnsweredRow, ...]
    """Rows of held-out data that have a prompt. Answers are not filled in yet."""
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of the prompt of each row."""
    max_new_tokens: int
    metric_name: str | None
    """Name of the metric that scores the answers. None if the job has no such metric."""
    user_metric: UserMetric | None = None
    """Function of the user that computes the metric. None for built-in metrics."""

    def with_answers(self, answers: Mapping[str, Sequence[str]]) -> list[AnsweredRow]:
        """Return the rows with their answers filled in. `answers` maps each adapter to its answers, in the
        order of the prompts."""
        return [
            replace(row, answers={name: own[index] for name, own in answers.items()})
            for index, row in enumerate(self.rows)
        ]

    def scores(self, rows: Sequence[AnsweredRow], adapter: str) -> dict[str, float]:
        """Return a mapping from the name of the job's metric to its value. The mapping is empty if the job
        has no metric. Raise UserError if the user's function fails."""
        if self.metric_name is None:
            return {}
        value = mean_score(adapter, rows, self.user_metric)
        assert value is not None, "prompts without the answers that the metric needs are refused"
        return {self.metric_name: value}


def read_held_out(spec: JobSpec, prepared: Prepared, encoder: Encoder, context: int) -> HeldOutPrompts | None:
    """Return the held-out prompts that a job answers at evaluations, or None if it generates no answers.
    Raise DataError if no held-out row has a prompt that is short enough, or an expected answer for
    `exact_match`."""
    if spec.eval is None or spec.eval.generate is None:
        return None
    own = _set_template(encoder, spec.data.chat_template)
    most = min(longest_prompt(prepared), context - 1 - spec.adapter.keys_before)
    encoded_rows: list[tuple[AnsweredRow, tuple[int, ...]]] = []
    for row in _held_out_rows(spec, spec.eval, prepared):
        tokens = tuple(encode_prompt_row(own, row))
        if len(tokens) + spec.adapter.rows_before <= most:
            encoded_rows.append((row, tokens))
        if len(encoded_rows) == spec.eval.generate.prompts:
            break
    if not encoded_rows:
        sentence = f"no held-out row has a prompt of at most {most:,} tokens that could be answered"
        raise DataError(Mistake("eval.generate", f"{sentence}; leave it out"))
    rows, tokens_of_rows = zip(*encoded_rows, strict=True)
    if spec.eval.metric == EXACT_MATCH and all(row.expected is None for row in rows):
        sentence = f"{EXACT_MATCH} needs expected answers, and none of the {len(rows)} prompts has one"
        raise DataError(Mistake("eval.metric", f"{sentence}; write a function as FILE.py:FUNCTION"))
    return HeldOutPrompts(
        rows,
        tokens_of_rows,
        spec.eval.generate.max_new_tokens,
        spec.eval.metric_name,
        _user_metric(spec.eval),
    )


def _user_metric(evaluation: EvalSpec) -> UserMetric | None:
    if evaluation.metric is None or evaluation.metric == EXACT_MATCH:
        return None
    file, _, function = evaluation.metric.rpartition(":")
    return load_metric(Path(file), function, key="eval.metric")


def _held_out_rows(spec: JobSpec, evaluation: EvalSpec, prepared: Prepared) -> Iterator[AnsweredRow]:
    """Yield the held-out rows that have a prompt, in the order of their files."""
    assert prepared.evaluation is not None
    # With `eval.fraction`, a row is held out by its hash.
    hashes = frozenset(prepared.evaluation.row_hashes().tolist())
    for table in open_held_out(spec.data, evaluation):
        format = find_format(table, spec.data, spec.objective.row_kind)
        for row in rows_with_prompts(table, replace(spec.data, format=format)):
            if row_hash(row.values) in hashes:
                yield row


def _set_template(encoder: Encoder, chat_template: str | None) -> Encoder:
    """Return an encoder whose tokenizer has the job's chat template, as does the tokenizer that is saved with
    the job's adapter."""
    if chat_template is None:
        return encoder
    tokenizer: Any = copy.deepcopy(encoder.tokenizer)
    tokenizer.chat_template = template_source(tokenizer, chat_template)
    return Encoder(tokenizer)
