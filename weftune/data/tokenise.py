"""Conversion of chats and texts to samples: tokens and the mask of supervised tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftune.data.cache import Tally
from weftune.data.chats import Rendered, equivalent_chats
from weftune.data.encode import Encoded, Encoder, contains_control_token, replace_control_tokens
from weftune.data.formats import Chat, Content, Labelled, Message, Pair, Sample, Text
from weftune.data.row import BadRow, CommonBadRow
from weftune.data.spec import DataSpec, RowKind
from weftune.data.template import Template, template_source
from weftune.errors import DataError

NO_TEMPLATE = (
    "the base's tokenizer has no chat template, and these rows are chats; "
    "write `data.chat_template: chatml`, or name a Jinja file"
)

SKIP = "leave such rows out with `data.skip_bad_rows: true`"
RAISE_OR_SKIP = f"raise `data.max_length` to {{needed_tokens}} or more, or {SKIP}"
SHORTEN_OR_SKIP = f"`data.max_length` cannot be raised beyond that; shorten such rows, or {SKIP}"
Outcome = tuple[Sample, ...] | BadRow
"""The samples of one row of data, or the reason why the row is unusable."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that determine, together with the rows of data, the samples of a job."""

    spec: DataSpec
    encoder: Encoder
    template: Template | None
    tool_template: Template | None
    """Template for rows with tools, if the tokenizer has a separate one for them."""
    max_tokens: int
    context: int | None
    """Maximum number of tokens that the base supports, if this is known; `max_tokens` is never larger. None
    if it is unknown."""
    row_kind: RowKind = "answers"


class Tokeniser:
    def __init__(self, rules: Rules, tally: Tally) -> None:
        self._rules, self._encoder, self._tally = rules, rules.encoder, tally
        self._supervises_all = rules.spec.train_on == "all"

    def outcomes(self, contents: Sequence[Content]) -> Iterator[Outcome]:
        """Yield the samples of each row, or the reason why the row is unusable, in order."""
        chats = iter(
            self._encode_chats([chat for content in contents for chat in _chats_in_content(content)])
        )
        texts = self._encode_texts([content for content in contents if isinstance(content, Text)])
        for content in contents:
            if isinstance(content, Pair | Labelled):
                yield self._truncate(self._join_sides(content, self._encode_sides(content, chats)))
            elif isinstance(content, Chat):
                yield self._truncate(next(chats))
            elif isinstance(content, Sample):
                yield self._truncate(self._pretokenised_sample(content))
            else:
                yield self._truncate((next(texts),))

    def _truncate(self, samples: Outcome) -> Outcome:
        if isinstance(samples, BadRow):
            return samples
        max_tokens = self._rules.max_tokens
        cut = [
            replace(sample, tokens=sample.tokens[:max_tokens], mask=sample.mask[:max_tokens])
            for sample in samples
        ]
        kept = tuple(sample for sample in cut if sample.mask[1:].any())
        if len(kept) < (len(cut) if self._rules.row_kind == "pairs" else 1):
            return self._no_supervision_error(samples)
        self._tally.truncated += any(len(sample.tokens) > max_tokens for sample in samples)
        return kept

    def _no_supervision_error(self, samples: Sequence[Sample]) -> BadRow:
        """Return the error for a row without supervised tokens. The error says whether the row lost such
        tokens by truncation."""
        reached = [int(sample.mask[1:].argmax()) + 2 for sample in samples if sample.mask[1:].any()]
        if not reached:
            return BadRow("the row has no supervised token")
        sentence = "the row has no supervised token within its first {} tokens"
        if self._rules.context is not None and min(reached) > self._rules.context:
            whole = sentence.format(self._rules.context) + ", which is all that the base reads"
            return CommonBadRow(whole, kind="longer than the context", remedy=SHORTEN_OR_SKIP)
        return CommonBadRow(
            sentence.format(self._rules.max_tokens),
            kind="longer than max_length",
            remedy=RAISE_OR_SKIP,
            needed_tokens=min(reached),
        )

    def _pretokenised_sample(self, content: Sample) -> Outcome:
        tokens = content.tokens
        outside = np.flatnonzero((tokens < 0) | (tokens >= self._encoder.size))
        if len(outside):
            at = int(outside[0])
            return BadRow(
                f"`input_ids[{at}]` is {tokens[at]}, but the vocabulary has {self._encoder.size} tokens"
            )
        return (Sample(tokens.astype(np.int32), content.mask),)

    def _encode_texts(self, contents: Sequence[Text]) -> Iterator[Sample]:
        """Yield the samples of texts. A prompt is tokenised separately, exactly as at inference, and its
        completion as a continuation, so that tokens never span the border between them."""
        encoder = self._encoder
        if contents and encoder.eos is None:
            raise DataError(
                "the base's tokenizer has no end-of-text token, which text and completion rows end with"
            )
        heads = encoder.encode_texts([content.text for content in contents])
        tails = iter(
            encoder.encode_continuations([one.completion for one in contents if one.completion is not None])
        )
        lead = np.array(encoder.prefix_tokens, dtype=np.int32)
        end = np.array([encoder.eos], dtype=np.int32)
        for content, head in zip(contents, heads, strict=True):
            parts, unsupervised = [lead, head, end], len(lead)
            if content.completion is not None:
                parts = [lead, head, next(tails), end]
                unsupervised += 0 if self._supervises_all else len(head)
            tokens = np.concatenate(parts)
            self._tally.control += contains_control_token([content.text, content.completion], encoder.control)
            yield Sample(tokens, np.arange(len(tokens)) >= unsupervised)

    def _encode_sides(self, content: Pair | Labelled, chats: Iterator[Outcome]) -> Sequence[Outcome]:
        """Return the sides of a pair or of a labelled answer, each as the tokens of its prompt and all of its
        tokens. `chats` yields the tokens of those sides that are chats."""
        parts = [
            [side.text, side.completion] if isinstance(side, Text) else list(side.messages)
            for side in content.sides
        ]
        self._tally.control += contains_control_token(parts, self._encoder.control)
        texts = [side for side in content.sides if isinstance(side, Text)]
        return self._encode_text_sides(texts) if texts else [next(chats) for _ in content.sides]

    def _encode_text_sides(self, sides: Sequence[Text]) -> Sequence[Outcome]:
        """Return for each text (a prompt with one answer) a pair: the tokens of the prompt, and the tokens of
        prompt and answer together. Prompt and answer are tokenised together, as in TRL."""
        encoder = self._encoder
        if encoder.eos is None:
            raise DataError("the base's tokenizer has no end-of-text token, which answers end with")
        texts = [(side.text, side.completion or "") for side in sides]
        given, *whole = encoder.encode_texts([texts[0][0], *(prompt + answer for prompt, answer in texts)])
        lead, end = np.array(encoder.prefix_tokens, np.int32), np.array([encoder.eos], np.int32)
        prompt = _unmasked_sample(np.concatenate([lead, given]))
        return [(prompt, _unmasked_sample(np.concatenate([lead, one, end]))) for one in whole]

    def _join_sides(self, content: Pair | Labelled, sides: Sequence[Outcome]) -> Outcome:
        """Return the samples of a pair or of a labelled answer. Each of `sides` consists of the tokens of the
        prompt, and the tokens of prompt and answer together. The answers of a pair begin where the first of
        them differs from the prompt, as in TRL, so both samples have the same prompt tokens."""
        side_samples: list[Sequence[Sample]] = []
        for side in sides:
            if isinstance(side, BadRow):
                return side
            side_samples.append(side)
        prompt_tokens = min(_common_prefix(*(one.tokens for one in side)) for side in side_samples)
        self._tally.parted_prompts += prompt_tokens < len(side_samples[0][0].tokens)
        desirable = content.desirable if isinstance(content, Labelled) else True
        return tuple(
            Sample(whole.tokens, np.arange(len(whole.tokens)) >= prompt_tokens, desirable)
            for _, whole in side_samples
        )

    def _encode_chats(self, chats: Sequence[Chat]) -> list[Outcome]:
        """Return the samples of each chat. All chats are rendered by one call to the limited process, and
        those without control tokens are tokenised in one call."""
        hidden = [self._hide_control_tokens(chat) for chat in chats]
        shown = [chat for chat in hidden if isinstance(chat, Chat)]
        plain = self._render(self._rules.template, [chat for chat in shown if chat.tools is None])
        with_tools = self._render(
            self._rules.tool_template, [chat for chat in shown if chat.tools is not None]
        )
        rows: list[tuple[Chat, tuple[Rendered, ...]] | BadRow] = []
        for chat in hidden:
            if isinstance(chat, BadRow):
                rows.append(chat)
                continue
            rendered = next(plain if chat.tools is None else with_tools)
            rows.append(rendered if isinstance(rendered, BadRow) else (chat, rendered))
        pairs = [row for row in rows if not isinstance(row, BadRow)]
        texts = [one.text for chat, rendered in pairs if not chat.placeholders for one in rendered]
        encoded = iter(self._encoder.encode_rendered(texts))
        return [row if isinstance(row, BadRow) else self._chat_samples(*row, encoded) for row in rows]

    def _render(
        self, template: Template | None, chats: Sequence[Chat]
    ) -> Iterator[tuple[Rendered, ...] | BadRow]:
        if not chats:
            return iter(())
        if template is None:
            raise DataError(NO_TEMPLATE)
        ends = None if self._supervises_all else sorted(self._encoder.added)
        return iter(template.render_chats(chats, ends))

    def _hide_control_tokens(self, chat: Chat) -> Chat | BadRow:
        """Return the chat with each control token replaced by a placeholder, a private-use character."""
        control = self._encoder.control
        if not contains_control_token([chat.messages, chat.tools], control):
            return chat
        try:
            (messages, tools), placeholders = replace_control_tokens([chat.messages, chat.tools], control)
        except BadRow as problem:
            return problem
        return replace(chat, messages=tuple(messages), tools=tools, placeholders=placeholders)

    def _chat_samples(
        self, chat: Chat, row: Sequence[Rendered], plain_tokens: Iterator[Encoded]
    ) -> tuple[Sample, ...]:
        """Return samples whose tokens are exactly those of `apply_chat_template`, with BOS only if the
        template prints it. `plain_tokens` yields the encoded texts of chats without control tokens."""
        encoder, tally, template = self._encoder, self._tally, self._rules.tool_template
        encoded = [
            encoder.encode_with_placeholders(one.text, chat.placeholders)
            if chat.placeholders
            else next(plain_tokens)
            for one in row
        ]
        if chat.answer is not None:
            return tuple(_unmasked_sample(part.tokens) for part in encoded)
        samples = list(zip(row, encoded, strict=True))
        tally.split += len(row) > 1
        tally.parted += any(one.prompt_differs for one in row)
        tally.endless += any(one.lacks_end_token for one in row)
        tally.control += bool(chat.placeholders)
        tally.untold += chat.tools is not None and template is not None and not template.prints_tools
        tally.merged += any(
            encoder.splits_token(part, start) for one, part in samples for start, _ in one.spans or ()
        )
        return tuple(self._to_sample(one, part) for one, part in samples)

    def _to_sample(self, rendered: Rendered, encoded: Encoded) -> Sample:
        mask = np.full(len(encoded.tokens), rendered.spans is None)
        for start, stop in rendered.spans or ():
            # A token that begins in the prompt and continues into the answer counts too: the answer begins
            # with it.
            mask |= ((encoded.starts >= start) | (encoded.stops > start)) & (encoded.starts < stop)
        if len(mask) and encoded.tokens[0] == self._encoder.bos:
            mask[0] = False
        return Sample(encoded.tokens, mask)


def _chats_in_content(content: Content) -> Iterator[Chat]:
    sides = content.sides if isinstance(content, Pair | Labelled) else (content,)
    return (side for side in sides if isinstance(side, Chat))


def _unmasked_sample(tokens: NDArray[np.int32]) -> Sample:
    return Sample(tokens, np.ones(len(tokens), dtype=bool))


def _common_prefix(first_tokens: NDArray[np.integer], second_tokens: NDArray[np.integer]) -> int:
    """Return the number of tokens with which both sequences begin."""
    shorter = min(len(first_tokens), len(second_tokens))
    differing = np.flatnonzero(first_tokens[:shorter] != second_tokens[:shorter])
    return int(differing[0]) if len(differing) else shorter


def prompt_tokens(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    is_plain_text: bool = False,
    *,
    tools: list[Any] | None = None,
    uses_current_date: bool = True,
) -> list[int]:
    """Return the tokens of a prompt, which the tokenizer's chat template renders up to the answer. A string
    is the user's message of a chat; it is tokenised as plain text if `is_plain_text` or if the tokenizer has
    no template. `tokenizer` may be an `Encoder`. The template sees the current date if `uses_current_date`,
    otherwise the fixed date that it sees in training.

    With a template these are the tokens of `apply_chat_template`, but control tokens in the prompt stay text.
    """
    encoder = tokenizer if isinstance(tokenizer, Encoder) else Encoder(tokenizer)
    source = None if is_plain_text else template_source(encoder.tokenizer, None, tools=tools is not None)
    if source is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = _chat_prompt(encoder, source, messages, tools, uses_current_date)
    elif isinstance(prompt, str):
        (tokens,) = encoder.encode_texts([prompt])
        ids = [*encoder.prefix_tokens, *tokens.tolist()]
    else:
        raise DataError("This base has no chat template, so it takes a text and no messages.")
    if not ids:
        raise DataError("The prompt is empty: there is nothing that the model could answer.")
    return ids


def _chat_prompt(
    encoder: Encoder,
    source: str,
    messages: Sequence[Message],
    tools: list[Any] | None,
    uses_current_date: bool,
) -> list[int]:
    """Return the tokens of the first form of the chat that the template can print."""
    problems: list[BadRow] = []
    try:
        hidden, placeholders = replace_control_tokens([list(messages), tools], encoder.control)
    except BadRow as problem:
        raise DataError(f"This prompt cannot be put to the model: {problem}.") from problem
    template = Template(source, encoder.tokenizer.special_tokens_map)
    for form in equivalent_chats(Chat(tuple(hidden[0]), hidden[1], ())):
        try:
            text = template.render(
                form.messages, form.tools, prompt=True, uses_current_date=uses_current_date
            )
        except BadRow as problem:
            problems.append(problem)
        else:
            ids: list[int] = encoder.encode_with_placeholders(text, placeholders).tokens.tolist()
            return ids
    raise DataError(f"This prompt cannot be put to the model: {problems[0]}.") from problems[0]
