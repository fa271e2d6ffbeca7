"""Evaluation of finished adapters and of the base model alone on the same rows of data.

Losses are computed in packed passes that all adapters share; after that, all greedy answers are generated in
one batch.

Shapes: T rows of a pass, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weftune.core.batch import Microbatch
from weftune.core.evaluation import REWARDS, AdapterScores, AnsweredRow, Evaluation
from weftune.core.files import cache_folder
from weftune.data.build import build_store, find_format
from weftune.data.collate import Part, collate
from weftune.data.encode import Encoder
from weftune.data.formats import (
    Labelled,
    Pair,
    Sample,
    Text,
    detect_format,
    has_columns,
    normalise_row,
    rename_columns,
    row_kind_name,
)
from weftune.data.prepare import SharedData
from weftune.data.row import BadRow, Row, Table
from weftune.data.samples import Samples, StoreRows
from weftune.data.spec import EXACT_MATCH, DataSpec
from weftune.data.tables import open_path
from weftune.data.tokenise import prompt_tokens
from weftune.errors import AdapterError, DataError, Mistake
from weftune.generate.answers import BASE, Answers, StreamedAnswer
from weftune.generate.metric import UserMetric
from weftune.generate.sampling import Sampling
from weftune.jobs.store.job_file import JOB_FILE, read_job_file, recorded_data
from weftune.objectives.objective import SampleScores, mean_metrics
from weftune.objectives.reward import Reward
from weftune.objectives.spec import DpoSpec, RewardSpec
from weftune.run.passes.plain import Plain
from weftune.run.passes.rows import DeviceMicrobatch, build_membership, to_device_microbatch
from weftune.run.passes.scorer import Scorer
from weftune.run.training.state import EvaluationSums

PASS_ROWS = 4096
"""Maximum number of rows (tokens) of a pass; a longer sample has a pass of its own."""
ShowProgress = Callable[[str, int, int | None], None]
"""Callback that reports progress. It receives a description of the counted items, the number of finished
items, and their total number, or None if that is unknown."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of data as one adapter encodes them: with the tokenizer, chat template and settings of its
    training."""

    encoder: Encoder
    """Encoder with the tokenizer of the adapter."""
    samples: Samples
    rows: int
    """Number of rows of data from which the samples were made."""
    notes: list[str]
    """Sentences for the user about rows of data that were skipped or truncated."""
    virtual_rows: int = 0
    """Number of virtual tokens that the adapter inserts before every sample, as in prompt tuning."""
    virtual_keys: int = 0
    """Number of keys that the adapter adds before every sample in every layer, as in prefix tuning."""
    is_base: bool = False
    """Whether the samples pass through the base without any adapter."""
    rejected: Samples | None = None
    """Rejected samples of preference pairs, in which case `samples` are the chosen ones. None for other
    data."""

    def for_base(self) -> EncodedRows:
        """Return a copy of the encoded rows that is evaluated on the base without an adapter."""
        return replace(self, virtual_rows=0, virtual_keys=0, is_base=True)


def evaluate(
    answers: Answers,
    adapters: Mapping[str, Path],
    data: str,
    *,
    with_base: bool = True,
    max_tokens: int = 128,
    metric: UserMetric | None = None,
    skip_bad_rows: bool = False,
    show_progress: ShowProgress = lambda counted, done, total: None,
) -> Evaluation:
    """Evaluate the adapters of `answers`, given with their folders, and the bare base if `with_base`.

    Rows are encoded for every adapter with the settings of its own training, and for the base with the
    settings of the first adapter. Answers have up to `max_tokens` tokens; with 0, no answers are generated.
    Rows that cannot be used are an error unless `skip_bad_rows` or an adapter's training leaves them out.
    """
    table = open_path(data, None, Path(data).name)
    settings = {
        name: replace(own, skip_bad_rows=own.skip_bad_rows or skip_bad_rows)
        for name, own in data_settings(table, adapters).items()
    }
    encoded = {name: encode_rows(answers, name, table, own, show_progress) for name, own in settings.items()}
    if reward_models := {name: one for name, one in encoded.items() if answers.is_reward_model(name)}:
        refuse_mixed_kinds(reward_models, adapters, table)
        results = score_rewards(answers, reward_models, adapters, show_progress)
        notes = dict.fromkeys(note for one in encoded.values() for note in one.notes)
        return Evaluation(data, answers.spec.published_name, tuple(results), (), tuple(notes))
    first = next(iter(adapters))
    if with_base:
        encoded = {BASE: encoded[first].for_base(), **encoded}
    if settings[first].format == "preference":
        sums, rewards = score_pairs(answers, encoded, adapters, show_progress)
    else:
        sums, rewards = sum_losses(answers, encoded, show_progress), {}
    rows = list(rows_with_prompts(table, settings[first])) if max_tokens else []
    skips = settings[first].skip_bad_rows
    rows, notes_on_answers = answer_rows(answers, encoded, rows, max_tokens, skips, show_progress)
    scores = (
        AdapterScores(
            name,
            one.rows,
            sums[name].tokens,
            adapter_scores(name, sums[name], rows, metric) | rewards.get(name, {}),
        )
        for name, one in encoded.items()
    )
    every_note = dict.fromkeys([*(note for one in encoded.values() for note in one.notes), *notes_on_answers])
    return Evaluation(data, answers.spec.published_name, tuple(scores), tuple(rows), tuple(every_note))


# -- rows --------------------------------------------------------------------------------------------------


def data_settings(table: Table, adapters: Mapping[str, Path]) -> dict[str, DataSpec]:
    """Return, for each adapter, the data settings (the keys of `data` in a jobs file) for reading the table.

    An adapter's settings are those of its training, except that all adapters use the columns and the format
    of the first adapter whose columns the table has."""
    recorded = {name: _recorded_settings(folder) for name, folder in adapters.items()}
    fitting = (found for own in recorded.values() if (found := _settings_with_format(table, own)) is not None)
    read = next(fitting, DataSpec())
    return {name: replace(own, columns=read.columns, format=read.format) for name, own in recorded.items()}


def _recorded_settings(folder: Path) -> DataSpec:
    """Return the data settings of the finished job in a folder, without those that select rows."""
    found = read_job_file(folder)
    try:
        data = DataSpec() if found is None else recorded_data(found.values)
    except (TypeError, AttributeError) as error:
        sentence = f"{folder / JOB_FILE} does not say how the adapter was trained to read rows: {error}."
        raise AdapterError(sentence) from error
    # The tokenizer that is saved with an adapter has the chat template of its training.
    own_template = (folder / "tokenizer_config.json").is_file()
    template = None if own_template else data.chat_template
    return replace(data, path=(), rows=None, split=None, limit=None, chat_template=template)


def _settings_with_format(table: Table, data: DataSpec) -> DataSpec | None:
    """Return the data settings, changed if necessary to a format that fits the table's first row. Return None
    if no format fits."""
    row = rename_columns(next(table.rows(), Row("", {})).value, data.columns)
    if data.format != "auto" and has_columns(row, data.format):
        return data
    format = detect_format(row)
    return None if format is None else replace(data, format=format)


def encode_rows(
    answers: Answers, name: str, table: Table, settings: DataSpec, show_progress: ShowProgress
) -> EncodedRows:
    """Tokenise the table as training would for the adapter `name`. Of answers with labels, only those
    labelled desirable are used. The result is cached on disk."""
    adapter, context = answers.adapted.banks.attached[name].adapter.spec, answers.adapted.base.shape.context
    if before := adapter.positions_before:
        settings = replace(settings, max_length=settings.max_sample_tokens(context - before))
    encoder = Encoder(answers.tokenizers[name])
    row_kind = row_kind_name(settings.format)
    rules = SharedData(encoder, cache_folder() / "tokens", context).rules(settings, row_kind)
    store = build_store(
        table, rules, cache_folder() / "tokens", lambda rows: show_progress("rows read", rows, None)
    )
    chosen, rejected = np.arange(len(store.lengths)), None
    if row_kind == "pairs":
        chosen, rejected = chosen[0::2], Samples([StoreRows(store, chosen[1::2])], store.key)
    rows = store.tally.rows - store.tally.skipped
    if row_kind == "labelled":
        assert store.desirable is not None
        chosen = np.flatnonzero(store.desirable)
        rows = len(chosen)
        if not rows:
            raise DataError(Mistake(table.label, "none of its answers has the label true"))
    return EncodedRows(
        encoder,
        Samples([StoreRows(store, chosen)], store.key),
        rows,
        store.tally.notes(None, rules.max_tokens),
        adapter.rows_before,
        adapter.keys_before,
        rejected=rejected,
    )


def rows_with_prompts(table: Table, settings: DataSpec) -> Iterator[AnsweredRow]:
    """Yield the rows of data that have a prompt, with the answer that is expected for it. The expected answer
    is the completion, or the text of the assistant's message at the end of a chat."""
    format = find_format(table, settings, row_kind_name(settings.format))
    for row in table.rows():
        try:
            content = normalise_row(row.value, format, settings)
        except BadRow:
            continue  # rows that cannot be used were reported when the table was encoded
        if isinstance(content, Labelled) and not content.desirable:
            continue
        if isinstance(content, Pair | Labelled):
            content = content.sides[0]
        if isinstance(content, Sample) or (isinstance(content, Text) and content.completion is None):
            continue
        if isinstance(content, Text):
            yield AnsweredRow(row.location, row.value, content.text, None, content.completion)
            continue
        *before, last = content.messages
        if last["role"] != "assistant":
            yield AnsweredRow(row.location, row.value, content.messages, content.tools, None)
        elif before:
            expected = None if "tool_calls" in last else last.get("content")
            yield AnsweredRow(row.location, row.value, tuple(before), content.tools, expected)


# -- losses ------------------------------------------------------------------------------------------------


def score_pairs(
    answers: Answers,
    encoded: Mapping[str, EncodedRows],
    adapters: Mapping[str, Path],
    show_progress: ShowProgress,
) -> tuple[dict[str, EvaluationSums], dict[str, dict[str, float | None]]]:
    """Return two mappings from adapters: one to the sums of losses over the chosen samples, and one to the
    reward metrics. The reward metrics of the base, which is the reference policy, are None."""
    references = {one.samples.fingerprint: name for name, one in encoded.items() if one.is_base}
    scored = dict(encoded)
    for name, one in encoded.items():
        if one.samples.fingerprint not in references:
            references[one.samples.fingerprint] = f"{BASE}\0{name}"
            scored[f"{BASE}\0{name}"] = one.for_base()
    rejected = {name: replace(one, samples=one.rejected) for name, one in scored.items() if one.rejected}
    differences: dict[str, list[float]] = {name: [] for name in scored}
    chosen_logprobs: dict[str, list[float]] = {name: [] for name in scored}
    sums = sum_losses(answers, scored, show_progress, chosen_logprobs)
    sum_losses(answers, rejected, show_progress, differences)
    for name, logps in differences.items():
        logps[:] = [good - bad for good, bad in zip(chosen_logprobs[name], logps, strict=True)]
    rewards: dict[str, dict[str, float | None]] = {}
    for name, one in encoded.items():
        beta = _reward_scale(adapters[name]) if name in adapters else 0.0
        reference = differences[references[one.samples.fingerprint]]
        margins = [beta * (own - base) for own, base in zip(differences[name], reference, strict=True)]
        means = sum(margins) / len(margins), sum(margin > 0 for margin in margins) / len(margins)
        rewards[name] = dict(zip(REWARDS, (None, None) if one.is_base else means, strict=True))
    return sums, rewards


def _reward_scale(folder: Path) -> float:
    """Return the factor of a reward (`objective.beta`) of a job that was trained with DPO, and the default
    value for other jobs."""
    found = read_job_file(folder)
    objective = found.values["job"].get("objective") if found is not None else None
    if not isinstance(objective, Mapping) or objective.get("kind") != "dpo":
        return DpoSpec().beta
    return float(objective.get("beta", DpoSpec().beta))


@torch.no_grad()
def sum_losses(
    answers: Answers,
    encoded: Mapping[str, EncodedRows],
    show_progress: ShowProgress,
    logprobs: dict[str, list[float]] | None = None,
) -> dict[str, EvaluationSums]:
    """Return for each adapter the sums of losses and of correct predictions over all its samples. If
    `logprobs` is given, the log-probability of every sample is appended to its adapter's list."""
    scorer = Scorer(answers.adapted.base.head(), answers.adapted.banks.trained_head_rows)
    sums: dict[str, EvaluationSums] = {}
    for h_TD, laid in run_passes(answers, encoded, show_progress):
        if logprobs is not None:
            by_segment = scorer.sample_logprobs(h_TD, laid)
            for segment, own in zip(laid.microbatch.segments, by_segment, strict=True):
                logprobs[segment.job] += own
        for one in scorer.evaluate(h_TD, laid):
            sums[one.job] = sums[one.job] + one if one.job in sums else one
    return sums


def run_passes(
    answers: Answers, encoded: Mapping[str, EncodedRows], show_progress: ShowProgress
) -> Iterator[tuple[Tensor, DeviceMicrobatch]]:
    """Run packed passes over the samples of all adapters. Yield the last hidden states [T, D] and the
    microbatch of each pass. Passes run on the CUDA stream of the base."""
    adapted = answers.adapted
    base, banks = adapted.base, adapted.banks
    total = sum(len(one.samples) for one in encoded.values())
    done = 0
    for microbatch in microbatches(encoded):
        with adapted.on_stream():
            laid = to_device_microbatch(microbatch, microbatch.rows, base.device)
            membership = build_membership(base, banks, laid, adapted.route)
            yield Plain(base, banks, laid, adapted.route, membership).forward(training=False), laid
        done += len(microbatch.sample_lengths)
        show_progress("samples scored", done, total)


# -- reward models -----------------------------------------------------------------------------------------


def refuse_mixed_kinds(
    reward_models: Mapping[str, EncodedRows], adapters: Mapping[str, Path], table: Table
) -> None:
    """Check that an evaluation with reward models has no other inputs: raise AdapterError if an adapter is
    not a reward model, and DataError if the rows are not preference pairs."""
    first = adapters[next(iter(reward_models))]
    if others := [folder for name, folder in adapters.items() if name not in reward_models]:
        raise AdapterError(
            f"{first} holds a reward model and {others[0]} does not; evaluate reward models by themselves."
        )
    if any(one.rejected is None for one in reward_models.values()):
        sentence = f"{first} holds a reward model, which is evaluated on preference pairs only"
        raise DataError(Mistake(table.label, f"{sentence}: rows with prompt, chosen and rejected"))


@torch.no_grad()
def score_rewards(
    answers: Answers,
    encoded: Mapping[str, EncodedRows],
    adapters: Mapping[str, Path],
    show_progress: ShowProgress,
) -> Iterator[AdapterScores]:
    """Yield for each reward model its loss on the pairs and the metrics that its training reports."""
    adapted = answers.adapted
    scorer = Scorer(adapted.base.head(), adapted.banks.trained_head_rows)
    for name in encoded:
        scorer.attach_head(adapted.banks, name)
    sides = (
        encoded,
        {name: replace(one, samples=one.rejected) for name, one in encoded.items() if one.rejected},
    )
    rewards: dict[str, list[Tensor]] = {name: [] for name in encoded}
    for side in sides:
        for h_TD, laid in run_passes(answers, side, show_progress):
            for segment, own_B in zip(
                laid.microbatch.segments, scorer.scalar_values(h_TD, laid), strict=True
            ):
                rewards[segment.job].append(own_B.double())
    for name, one in encoded.items():
        values_B = torch.cat(rewards[name]).view(2, -1).T.flatten()
        objective = Reward(spec := _reward_spec(adapters[name]))
        given = SampleScores(values_B, (1,) * len(values_B), values_B=values_B)
        held_out, metrics_M = objective.evaluation_sums(given), objective.metrics(given)
        means = mean_metrics(metrics_M, held_out.count, spec.max_metric_count).tolist()
        scores = {"loss": float(held_out.loss) / held_out.count, **spec.named_metrics(means)}
        tokens = sum(int(side[name].samples.supervised.sum()) for side in sides)
        yield AdapterScores(name, one.rows, tokens, scores)


def _reward_spec(folder: Path) -> RewardSpec:
    """Return the objective of a finished reward model, with the `center_rewards_coefficient` of its training
    if one is recorded."""
    found = read_job_file(folder)
    objective = found.values["job"].get("objective") if found is not None else None
    coefficient = objective.get("center_rewards_coefficient") if isinstance(objective, Mapping) else None
    return RewardSpec(center_rewards_coefficient=coefficient)


def microbatches(encoded: Mapping[str, EncodedRows], max_rows: int = PASS_ROWS) -> Iterator[Microbatch]:
    """Yield microbatches of at most `max_rows` rows; a longer sample has a microbatch of its own. The n-th
    samples of all adapters are adjacent, so adapters share passes."""
    samples = {
        name: one.samples.add_prefix(one.virtual_rows, one.virtual_keys) for name, one in encoded.items()
    }
    parts: list[Part] = []
    rows = 0
    for index in range(max(map(len, samples.values()))):
        for name, own in samples.items():
            if index >= len(own):
                continue
            length = int(own.lengths[index])
            if parts and rows + length > max_rows:
                yield _collate_parts(parts, encoded)
                parts, rows = [], 0
            parts.append(Part(name, 1, own, index, 0, own.rows_before, own.first_position))
            rows += length
    yield _collate_parts(parts, encoded)


def _collate_parts(parts: Sequence[Part], encoded: Mapping[str, EncodedRows]) -> Microbatch:
    """Return the samples as one microbatch, sorted by adapter. Samples that are evaluated on the base alone
    have no adapter."""
    microbatch = collate(sorted(parts, key=lambda part: part.job))
    segments = (
        replace(segment, adapter=None) if encoded[segment.job].is_base else segment
        for segment in microbatch.segments
    )
    return replace(microbatch, segments=tuple(segments))


# -- answers -----------------------------------------------------------------------------------------------


def answer_rows(
    answers: Answers,
    encoded: Mapping[str, EncodedRows],
    rows: Sequence[AnsweredRow],
    max_tokens: int,
    skip_bad_rows: bool,
    show_progress: ShowProgress,
) -> tuple[list[AnsweredRow], list[str]]:
    """Generate the greedy answers of all adapters in one batch. Return the rows that were answered, and a
    sentence that counts the prompts that are too long for the base, if there are any. A prompt that a chat
    template refuses is left out if `skip_bad_rows`, and an error otherwise."""
    context = answers.adapted.base.shape.context
    answer_requests: list[tuple[AnsweredRow, str, list[int]]] = []
    kept_rows: list[AnsweredRow] = []
    long = 0
    for row in rows:
        try:
            prompts = {name: encode_prompt_row(one.encoder, row) for name, one in encoded.items()}
        except DataError:
            if not skip_bad_rows:
                raise
            continue  # counted when the rows were encoded
        lengths = [len(prompts[name]) + one.virtual_rows + one.virtual_keys for name, one in encoded.items()]
        long += max(lengths) >= context
        if max(lengths) < context:
            kept_rows.append(row)
            answer_requests += [(row, name, tokens) for name, tokens in prompts.items()]
    done = 0

    def count_answer(answer: StreamedAnswer, text: str) -> None:
        nonlocal done
        if answer.finish_reason is not None:
            done += 1
            show_progress("answers generated", done, len(answer_requests))

    if answer_requests:
        prompts_only = [(name, tokens) for _, name, tokens in answer_requests]
        found = answers.complete_prompts(prompts_only, Sampling(max_tokens=max_tokens), on_text=count_answer)
        for (row, name, _), answer in zip(answer_requests, found, strict=True):
            row.answers[name] = answer.text
    if not long:
        return kept_rows, []
    count_text = f"{long:,} of {len(rows):,} prompts"
    return kept_rows, [f"{count_text} are longer than the base's {context:,} positions and have no answer."]


def encode_prompt_row(encoder: Encoder, row: AnsweredRow) -> list[int]:
    """Return the tokens of a row's prompt. Raise DataError with the row's location if the chat template
    refuses it."""
    try:
        is_plain_text = isinstance(row.prompt, str)
        return prompt_tokens(encoder, row.prompt, is_plain_text, tools=row.tools, uses_current_date=False)
    except DataError as error:
        raise DataError(Mistake(row.location, str(error))) from error


def adapter_scores(
    adapter: str, sums: EvaluationSums, rows: Sequence[AnsweredRow], metric: UserMetric | None
) -> dict[str, float | None]:
    """Return the value of every metric for one adapter. Metrics of answers are None if no answers were
    generated."""
    loss = sums.loss / sums.tokens
    scores: dict[str, float | None] = {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "token_accuracy": sums.correct / sums.tokens,
        EXACT_MATCH: mean_score(adapter, rows),
    }
    if metric is not None:
        scores[metric.name] = mean_score(adapter, rows, metric)
    return scores


def mean_score(adapter: str, rows: Sequence[AnsweredRow], metric: UserMetric | None = None) -> float | None:
    """Return the mean of the user's metric over the rows or, without a metric, the fraction of rows whose
    answer equals the expected one, among rows that have an expected answer. None if there is nothing to
    score."""
    if metric is None:
        values = [float(row.is_match(adapter)) for row in rows if row.expected is not None]
    else:
        values = [metric.score(row, adapter) for row in rows]
    return sum(values) / len(values) if values else None
